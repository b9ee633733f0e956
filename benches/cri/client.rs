//! A gRPC client as thin as can be, so that what is measured is the other side.

use std::path::Path;

use bytes::{BufMut, Bytes, BytesMut};
use h2::client::{self, SendRequest};
use http::{Request, header::CONTENT_TYPE};
use tokio::net::UnixStream;

/// One call that is made again and again.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    /// The method's name, for the table.
    pub(crate) name: &'static str,
    /// The request as it is on the wire.
    frame: Bytes,
}

impl Call {
    /// A method of the runtime service, and its message.
    pub(crate) fn new(name: &'static str, message: &impl prost::Message) -> Self {
        let mut frame = BytesMut::new();
        frame.put_u8(0);
        frame.put_u32(u32::try_from(message.encoded_len()).unwrap());
        message.encode(&mut frame).unwrap();
        Self { name, frame: frame.freeze() }
    }
}

/// One connection, as a kubelet has one.
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

    /// Makes a call and reads the whole answer. None when it failed.
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
        let mut answer = response.await.ok()?.into_body();
        while let Some(data) = answer.data().await {
            let data = data.ok()?;
            answer.flow_control().release_capacity(data.len()).ok()?;
        }
        let trailers = answer.trailers().await.ok()??;
        (trailers.get("grpc-status")? == "0").then_some(())
    }
}
