//! A client of the query API. Each request is unsigned, on its own connection.

use std::{net::SocketAddr, time::Duration};

use bytes::Bytes;
use http::{Request, header};
use http_body_util::{BodyExt, Full, Limited};
use hyper_util::rt::TokioIo;
use tokio::{net::TcpStream, time::timeout};

use crate::{query::Query, xml::Element};

/// Deadline of a call. No test may delay replies for longer.
const CALL_TIMEOUT: Duration = Duration::from_secs(60);

/// Most bytes of a reply. moto's whole list of instance types has 3 MiB.
const MAX_REPLY_BYTES: usize = 64 * 1024 * 1024;

/// Header by whose credentials scope moto learns the region.
const AUTHORIZATION: &str = "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/ec2/aws4_request, \
     SignedHeaders=host, Signature=none";

/// A reply of the API.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reply {
    /// HTTP status.
    pub status: u16,
    /// XML document.
    pub body: String,
}

impl Reply {
    /// Returns the root of the document, or an empty element if the body is no XML.
    pub fn root(&self) -> Element {
        Element::parse(&self.body).unwrap_or_default()
    }

    /// Returns the code of an error; `None` for a success.
    pub fn error(&self) -> Option<String> {
        (self.status >= 300).then(|| {
            let root = self.root();
            root.all("Code").first().map_or_else(String::new, |code| code.text.clone())
        })
    }
}

/// Sends a call and returns its reply, even if the reply is an error of the API.
pub async fn call(address: SocketAddr, query: &Query) -> Result<Reply, String> {
    send(address, query.form(), None).await
}

/// Drops moto's resources.
pub(crate) async fn reset(moto: SocketAddr) -> Result<(), String> {
    let reply = post(moto, "/moto-api/reset", String::new(), AUTHORIZATION).await?;
    if reply.status == 200 { Ok(()) } else { Err(reply.body) }
}

/// Sends a form with the signature of its caller.
pub(crate) async fn send(
    address: SocketAddr,
    form: String,
    authorization: Option<&str>,
) -> Result<Reply, String> {
    post(address, "/", form, authorization.unwrap_or(AUTHORIZATION)).await
}

async fn post(
    address: SocketAddr,
    path: &str,
    form: String,
    authorization: &str,
) -> Result<Reply, String> {
    let exchange = async {
        let stream = TcpStream::connect(address).await.map_err(|error| error.to_string())?;
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake::<_, Full<Bytes>>(TokioIo::new(stream))
                .await
                .map_err(|error| error.to_string())?;
        let request = Request::post(path)
            .header(header::HOST, address.to_string())
            .header(header::CONNECTION, "close")
            .header(header::CONTENT_TYPE, "application/x-www-form-urlencoded")
            .header(header::AUTHORIZATION, authorization)
            .body(Full::new(Bytes::from(form)))
            .map_err(|error| error.to_string())?;
        let reply = async {
            let reply = sender.send_request(request).await.map_err(|error| error.to_string())?;
            let status = reply.status().as_u16();
            let body = Limited::new(reply.into_body(), MAX_REPLY_BYTES).collect().await;
            let body = body.map_err(|error| error.to_string())?.to_bytes();
            Ok(Reply { status, body: String::from_utf8_lossy(&body).into_owned() })
        };
        let (reply, _) = tokio::join!(reply, connection);
        reply
    };
    timeout(CALL_TIMEOUT, exchange)
        .await
        .unwrap_or_else(|_| Err(format!("no reply within {CALL_TIMEOUT:?}")))
}
