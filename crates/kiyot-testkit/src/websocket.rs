//! A client of the streaming URLs of CRI, as an API server of old speaks to them: WebSocket with
//! `v4.channel.k8s.io`.

use std::collections::BTreeMap;

use futures::{SinkExt, StreamExt};
use tokio::net::TcpStream;
use tokio_tungstenite::{
    WebSocketStream, client_async,
    tungstenite::{self, Message, client::IntoClientRequest, http::HeaderValue},
};

/// An open stream of exec, attach or port-forward.
#[derive(Debug)]
pub struct Streams {
    socket: WebSocketStream<TcpStream>,
    received: BTreeMap<u8, Vec<u8>>,
}

impl Streams {
    /// Opens a URL that Exec, Attach or PortForward answered.
    ///
    /// # Errors
    /// What the server answered instead of an upgrade.
    pub async fn open(url: &str) -> Result<Self, Box<tungstenite::Error>> {
        let rest = url.strip_prefix("http://").expect("a streaming URL is plain HTTP");
        let (authority, _) = rest.split_once('/').expect("a streaming URL has a path");
        let mut request = format!("ws://{rest}").into_client_request().map_err(Box::new)?;
        request
            .headers_mut()
            .insert("sec-websocket-protocol", HeaderValue::from_static("v4.channel.k8s.io"));
        let stream = TcpStream::connect(authority).await.map_err(|error| Box::new(error.into()))?;
        let (socket, _) = client_async(request, stream).await.map_err(Box::new)?;
        Ok(Self { socket, received: BTreeMap::new() })
    }

    /// Sends bytes on a channel: 0 is the standard input, 4 the size of the terminal.
    pub async fn send(&mut self, channel: u8, bytes: &[u8]) {
        let mut frame = vec![channel];
        frame.extend_from_slice(bytes);
        self.socket.send(Message::binary(frame)).await.expect("the stream takes bytes");
    }

    /// Reads until a channel has this text, or the stream ends; gives all of the channel so far.
    pub async fn read_until(&mut self, channel: u8, text: &str) -> String {
        while !self.text(channel).contains(text) {
            if !self.read().await {
                break;
            }
        }
        self.text(channel)
    }

    /// Reads until a channel has carried at least so many bytes. What was read is forgotten.
    ///
    /// # Panics
    /// When the stream ends before.
    pub async fn read_bytes(&mut self, channel: u8, bytes: usize) {
        let mut carried = 0;
        loop {
            carried += self
                .received
                .get_mut(&channel)
                .map_or(0, |received| std::mem::take(received).len());
            if carried >= bytes {
                return;
            }
            assert!(self.read().await, "the stream ended after {carried} bytes of {bytes}");
        }
    }

    /// Reads to the end of the stream.
    pub async fn read_to_end(&mut self) {
        while self.read().await {}
    }

    /// What a channel has carried so far: 1 is the standard output, 2 the standard error, 3 how it
    /// ended.
    pub fn text(&self, channel: u8) -> String {
        String::from_utf8_lossy(self.bytes(channel)).into_owned()
    }

    /// The bytes that a channel has carried so far.
    pub fn bytes(&self, channel: u8) -> &[u8] {
        self.received.get(&channel).map_or(&[], Vec::as_slice)
    }

    async fn read(&mut self) -> bool {
        match self.socket.next().await {
            Some(Ok(Message::Binary(frame))) => {
                if let Some((channel, bytes)) = frame.split_first() {
                    self.received.entry(*channel).or_default().extend_from_slice(bytes);
                }
                true
            }
            Some(Ok(Message::Close(_)) | Err(_)) | None => false,
            Some(Ok(_)) => true,
        }
    }
}
