//! A caller with an HTTP/2 connection of its own.

use std::{path::Path, time::Duration};

use bytes::Bytes;
use h2::{
    RecvStream, SendStream,
    client::{ResponseFuture, SendRequest},
};
use http::{HeaderMap, HeaderName, HeaderValue, Request};
use kiyot::backends::Method;
use tokio::net::UnixStream;
use tokio_util::task::AbortOnDropHandle;

use crate::fake_runtime::{read_all, send_all};

/// Timeout that a slow machine never reaches.
pub(crate) const LONG: Duration = Duration::from_secs(300);

/// Awaits a future with a generous timeout.
pub(crate) async fn soon<F: Future>(what: F) -> F::Output {
    tokio::time::timeout(LONG, what).await.expect("it took too long")
}

/// Returns a gRPC message with its frame header.
pub(crate) fn frame(message: &[u8]) -> Vec<u8> {
    [&[0], (message.len() as u32).to_be_bytes().as_slice(), message].concat()
}

#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) headers: HeaderMap,
    pub(crate) body: Vec<u8>,
    pub(crate) trailers: Option<HeaderMap>,
}

impl Answer {
    /// Returns the gRPC status of the trailers or of the head.
    pub(crate) fn code(&self) -> i32 {
        self.metadata("grpc-status").parse().unwrap()
    }

    /// Returns the decoded gRPC message.
    pub(crate) fn message(&self) -> String {
        tonic::Status::from_header_map(self.trailers.as_ref().unwrap_or(&self.headers))
            .unwrap()
            .message()
            .to_string()
    }

    pub(crate) fn metadata(&self, name: &str) -> &str {
        self.trailers
            .as_ref()
            .and_then(|trailers| trailers.get(name))
            .or(self.headers.get(name))
            .map_or("", |value| value.to_str().unwrap())
    }

    /// Returns the message of a successful response.
    pub(crate) fn ok(&self) -> &[u8] {
        assert_eq!(self.code(), 0, "{self:?}");
        assert_eq!(self.body[0], 0);
        assert_eq!(
            u32::from_be_bytes(self.body[1..5].try_into().unwrap()) as usize,
            self.body.len() - 5
        );
        &self.body[5..]
    }
}

/// A client; clones share its connection.
#[derive(Clone)]
pub(crate) struct Caller {
    send: SendRequest<Bytes>,
    _driver: std::sync::Arc<AbortOnDropHandle<()>>,
}

impl Caller {
    pub(crate) async fn connect(path: &Path) -> Self {
        let stream = UnixStream::connect(path).await.unwrap();
        let mut builder = h2::client::Builder::new();
        builder
            .initial_window_size(1 << 20)
            .initial_connection_window_size(64 << 20)
            .max_concurrent_reset_streams(10_000);
        let (send, connection) = builder.handshake(stream).await.unwrap();
        let driver = tokio::spawn(async move {
            let _ = connection.await;
        });
        Self { send, _driver: std::sync::Arc::new(AbortOnDropHandle::new(driver)) }
    }

    /// Begins a call, whose body the test sends.
    pub(crate) async fn begin(
        &self,
        path: &str,
        metadata: &[(&'static str, &str)],
    ) -> (ResponseFuture, SendStream<Bytes>) {
        let mut request = Request::post(format!("http://localhost{path}")).body(()).unwrap();
        let headers = request.headers_mut();
        headers.insert("content-type", HeaderValue::from_static("application/grpc"));
        headers.insert("te", HeaderValue::from_static("trailers"));
        for (name, value) in metadata {
            headers.append(HeaderName::from_static(name), HeaderValue::from_str(value).unwrap());
        }
        soon(self.send.clone().ready()).await.unwrap().send_request(request, false).unwrap()
    }

    /// Makes a call with these bytes as the body.
    pub(crate) async fn raw(
        &self,
        path: &str,
        metadata: &[(&'static str, &str)],
        body: Vec<u8>,
    ) -> Result<Answer, h2::Error> {
        let (response, mut stream) = self.begin(path, metadata).await;
        let send = async move {
            if body.len() < 16 << 10 {
                // Like grpc-go, with END_STREAM in the DATA frame of the message.
                let _ = stream.send_data(body.into(), true);
            } else if send_all(&mut stream, body.into()).await {
                let _ = stream.send_data(Bytes::new(), true);
            }
            stream
        };
        let receive = async {
            let (head, mut body) = response.await?.into_parts();
            collect(head.headers, &mut body).await
        };
        soon(async { tokio::join!(send, receive) }).await.1
    }

    /// Makes a call with one message.
    pub(crate) async fn call(&self, method: Method, message: &[u8]) -> Answer {
        self.raw(method.path(), &[], frame(message)).await.unwrap()
    }
}

/// Reads the rest of a response.
pub(crate) async fn collect(
    headers: HeaderMap,
    body: &mut RecvStream,
) -> Result<Answer, h2::Error> {
    let all = read_all(body).await?;
    let trailers = body.trailers().await?;
    Ok(Answer { headers, body: all, trailers })
}
