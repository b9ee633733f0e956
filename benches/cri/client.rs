//! A minimal gRPC client, so that the measured time is the server's.

use std::path::Path;

use bytes::{BufMut, Bytes, BytesMut};
use h2::client::{self, SendRequest};
use http::{Request, header::CONTENT_TYPE};
use tokio::net::UnixStream;

/// An encoded call.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    /// The method's name.
    pub(crate) name: &'static str,
    /// The request as a gRPC frame.
    frame: Bytes,
}

impl Call {
    /// Encodes a call of the runtime service.
    pub(crate) fn new(name: &'static str, message: &impl prost::Message) -> Self {
        let mut frame = BytesMut::new();
        frame.put_u8(0);
        frame.put_u32(u32::try_from(message.encoded_len()).unwrap());
        message.encode(&mut frame).unwrap();
        Self { name, frame: frame.freeze() }
    }
}

/// A connection. Clones share it.
#[derive(Debug, Clone)]
pub(crate) struct Client(SendRequest<Bytes>);

impl Client {
    /// Connects to a socket.
    pub(crate) async fn connect(socket: &Path) -> Option<Self> {
        let stream = UnixStream::connect(socket).await.ok()?;
        let (sender, connection) = client::Builder::new()
            .initial_window_size(1 << 20)
            .initial_connection_window_size(1 << 24)
            .handshake(stream)
            .await
            .ok()?;
        tokio::spawn(connection);
        Some(Self(sender))
    }

    /// Makes a call, and reads the whole response. Returns `None` if the call fails.
    pub(crate) async fn call(&mut self, call: &Call) -> Option<()> {
        let request =
            Request::post(format!("http://localhost/runtime.v1.RuntimeService/{}", call.name))
                .header(CONTENT_TYPE, "application/grpc")
                .header("te", "trailers")
                .body(())
                .ok()?;
        let mut sender = self.0.clone().ready().await.ok()?;
        let (response, mut body) = sender.send_request(request, false).ok()?;
        body.send_data(call.frame.clone(), true).ok()?;
        let mut response = response.await.ok()?.into_body();
        while let Some(data) = response.data().await {
            let data = data.ok()?;
            response.flow_control().release_capacity(data.len()).ok()?;
        }
        let trailers = response.trailers().await.ok()??;
        (trailers.get("grpc-status")? == "0").then_some(())
    }
}
