//! An HTTP proxy on the node.

use std::{
    io::{Error, ErrorKind, Result},
    net::SocketAddr,
    sync::{Arc, Mutex},
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional},
    net::{TcpListener, TcpStream},
};
use tokio_util::task::AbortOnDropHandle;

/// The maximal length of the head of a request.
const MAX_HEAD_BYTES: usize = 16 * 1024;

/// HTTP proxy, for requests with an absolute URI and for tunnels (RFC 9110, sections 7.1, 9.3.6).
pub(crate) struct HttpProxy {
    at: SocketAddr,
    requests: Arc<Mutex<Vec<Proxied>>>,
    _task: AbortOnDropHandle<()>,
}

/// A request to the proxy.
#[derive(Debug, Clone)]
pub(crate) struct Proxied {
    pub(crate) method: String,
    /// The destination: host and port.
    pub(crate) to: String,
    /// The header `proxy-authorization`.
    pub(crate) authorization: String,
}

impl HttpProxy {
    /// Starts a proxy on an address of the node.
    pub(crate) async fn start(address: &str) -> Self {
        let listener = TcpListener::bind((address, 0)).await.unwrap();
        let at = listener.local_addr().unwrap();
        let requests = Arc::<Mutex<Vec<_>>>::default();
        let all = Arc::clone(&requests);
        let serve_all = async move {
            let mut connections = Vec::new();
            while let Ok((client, _)) = listener.accept().await {
                let all = Arc::clone(&all);
                // A client that disconnects ends its own connection only.
                let serving = async move { serve(client, &all).await.unwrap_or_default() };
                connections.push(AbortOnDropHandle::new(tokio::spawn(serving)));
            }
        };
        Self { at, requests, _task: AbortOnDropHandle::new(tokio::spawn(serve_all)) }
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.at
    }

    /// Returns the requests to a host and port.
    pub(crate) fn requests_to(&self, to: SocketAddr) -> Vec<Proxied> {
        let to = to.to_string();
        let requests = self.requests.lock().unwrap();
        requests.iter().filter(|request| request.to == to).cloned().collect()
    }
}

async fn serve(mut client: TcpStream, requests: &Mutex<Vec<Proxied>>) -> Result<()> {
    let invalid = || Error::from(ErrorKind::InvalidData);
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        if head.len() == MAX_HEAD_BYTES {
            return Err(invalid());
        }
        head.push(client.read_u8().await?);
    }
    let head = String::from_utf8(head).map_err(|_| invalid())?;
    let (line, headers) = head.split_once("\r\n").ok_or_else(invalid)?;
    let mut words = line.split(' ');
    let (method, target) = words.next().zip(words.next()).ok_or_else(invalid)?;
    let is_tunnel = method == "CONNECT";
    let (to, path) = match target.strip_prefix("http://") {
        Some(rest) => rest.split_at(rest.find('/').unwrap_or(rest.len())),
        None => (target, ""),
    };
    let authorization = headers.lines().find_map(|header| {
        let (name, value) = header.split_once(": ")?;
        name.eq_ignore_ascii_case("proxy-authorization").then(|| value.to_owned())
    });
    requests.lock().unwrap().push(Proxied {
        method: method.to_owned(),
        to: to.to_owned(),
        authorization: authorization.unwrap_or_default(),
    });
    let mut server = TcpStream::connect(to).await?;
    if is_tunnel {
        client.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await?;
    } else {
        server.write_all(format!("{method} {path} HTTP/1.1\r\n{headers}").as_bytes()).await?;
    }
    copy_bidirectional(&mut client, &mut server).await?;
    Ok(())
}
