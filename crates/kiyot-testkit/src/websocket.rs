//! A WebSocket client of the streaming URLs of CRI, with `v4.channel.k8s.io`.

use std::collections::BTreeMap;

use futures::{SinkExt, StreamExt};
use tokio::net::TcpStream;
use tokio_tungstenite::{
    WebSocketStream, client_async,
    tungstenite::{self, Message, client::IntoClientRequest, http::HeaderValue},
};

/// An open connection of exec, attach or port-forward.
#[derive(Debug)]
pub struct Streams {
    socket: WebSocketStream<TcpStream>,
    received: BTreeMap<u8, Vec<u8>>,
}

impl Streams {
    /// Connects to the URL of an Exec, Attach or PortForward.
    ///
    /// The server's response if it refuses the upgrade, or the connection's error.
    /// The server's response if it refuses the upgrade, or the connection's error.
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

    /// Sends data on a channel: 0 is standard input, 4 the size of the terminal.
    pub async fn send(&mut self, channel: u8, bytes: &[u8]) {
        let mut frame = vec![channel];
        frame.extend_from_slice(bytes);
        self.socket.send(Message::binary(frame)).await.expect("the stream takes bytes");
    }

    /// Reads until a channel's data contains a text or the connection ends, and returns the data.
    pub async fn read_until(&mut self, channel: u8, text: &str) -> String {
        while !self.text(channel).contains(text) {
            if !self.read().await {
                break;
            }
        }
        self.text(channel)
    }

    /// Reads and drops at least this many bytes of a channel.
    ///
    /// # Panics
    /// If the connection ends earlier.
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
            assert!(self.read().await, "the connection ended after {carried} bytes of {bytes}");
        }
    }

    /// Reads until the connection ends.
    pub async fn read_to_end(&mut self) {
        while self.read().await {}
    }

    /// Returns a channel's data: 1 is standard output, 2 standard error, 3 the exit status.
    pub fn text(&self, channel: u8) -> String {
        String::from_utf8_lossy(self.bytes(channel)).into_owned()
    }

    /// Returns a channel's bytes.
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
