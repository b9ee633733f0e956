//! A streaming server that plays a cell. The words of a command, or the port of a connection,
//! select its behaviour.

use std::collections::BTreeMap;

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};

/// A frame of the client.
#[derive(Debug)]
enum Frame {
    Opened { stream: u32, headers: BTreeMap<String, String> },
    Data { stream: u32, bytes: Vec<u8>, end: bool },
    Reset,
    Other,
}

/// Returns the URL of a server for a single connection, which plays a command.
pub(crate) async fn exec(command: Vec<String>) -> String {
    let (url, listener) = listen().await;
    tokio::spawn(async move {
        let words: Vec<_> = command.iter().map(String::as_str).collect();
        let stream = listener.accept().await.unwrap().0;
        if words == ["refuse"] {
            refuse(stream).await;
        } else {
            run(Peer::upgrade(stream, "v4.channel.k8s.io").await, &words).await;
        }
    });
    url
}

/// Returns the URL of a server for a single connection, which plays the ports of a pod.
pub(crate) async fn port_forward() -> String {
    let (url, listener) = listen().await;
    tokio::spawn(async move {
        let stream = listener.accept().await.unwrap().0;
        forward(Peer::upgrade(stream, "portforward.k8s.io").await).await;
    });
    url
}

async fn listen() -> (String, TcpListener) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    (format!("http://{}/token", listener.local_addr().unwrap()), listener)
}

async fn refuse(mut stream: TcpStream) {
    read_head(&mut stream).await;
    let answer = "HTTP/1.1 502 Bad Gateway\r\nContent-Length: 9\r\n\r\nno tunnel";
    stream.write_all(answer.as_bytes()).await.unwrap();
}

async fn read_head(stream: &mut TcpStream) {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.unwrap());
    }
}

/// Plays a command until its end.
async fn run(mut peer: Peer, words: &[&str]) {
    let wanted = match words {
        ["cat"] => &["error", "stdin", "stdout", "stderr"][..],
        ["terminal"] => &["error", "stdin", "stdout", "resize"],
        _ => &["error", "stdout", "stderr"],
    };
    let mut streams = BTreeMap::new();
    while streams.len() < wanted.len() {
        let Some(Frame::Opened { stream, headers }) = peer.next().await else { return };
        streams.insert(headers["streamtype"].clone(), stream);
    }
    assert_eq!(streams.keys().len(), wanted.len(), "{streams:?}");
    let of = |kind: &str| streams[kind];
    match words {
        ["cat"] => {
            peer.send(of("stderr"), b"begun\n", false).await;
            while let Some(frame) = peer.next().await {
                let Frame::Data { stream, bytes, end } = frame else { continue };
                assert_eq!(stream, of("stdin"));
                peer.send(of("stdout"), &bytes, false).await;
                if end {
                    break;
                }
            }
            peer.status(of("error"), r#"{"status":"Success"}"#).await;
        }
        ["exit", code] => {
            peer.send(of("stdout"), b"all of it\n", false).await;
            let status = format!(
                r#"{{"status":"Failure","reason":"NonZeroExitCode","message":"no",
                    "details":{{"causes":[{{"reason":"ExitCode","message":"{code}"}}]}}}}"#
            );
            peer.status(of("error"), &status).await;
        }
        ["fail"] => {
            let status = r#"{"status":"Failure","reason":"InternalError","message":"no sh\u001b"}"#;
            peer.status(of("error"), status).await;
        }
        ["lose"] => {}
        ["yes"] => while peer.send(of("stdout"), &[b'y'; 1 << 14], false).await {},
        ["hang"] => {
            peer.send(of("stdout"), b"ready\n", false).await;
            while peer.next().await.is_some() {}
        }
        // Echoes input and sizes until a line says how to end.
        ["terminal"] => {
            peer.send(of("stdout"), b"ready\r\n", false).await;
            while let Some(frame) = peer.next().await {
                let Frame::Data { bytes, .. } = frame else { continue };
                peer.send(of("stdout"), &bytes, false).await;
                match bytes.as_slice() {
                    b"q" => return peer.status(of("error"), r#"{"status":"Success"}"#).await,
                    b"l" => return,
                    _ => {}
                }
            }
        }
        _ => panic!("{words:?}"),
    }
}

/// Plays the ports of a pod: 80 echoes, 81 refuses, 83 greets and ends, and 84 ends the pod.
async fn forward(mut peer: Peer) {
    let (mut errors, mut data) = (BTreeMap::new(), BTreeMap::new());
    while let Some(frame) = peer.next().await {
        match frame {
            Frame::Opened { stream, headers } if headers["streamtype"] == "error" => {
                errors.insert(headers["requestid"].clone(), stream);
            }
            Frame::Opened { stream, headers } => {
                let error = errors[&headers["requestid"]];
                match headers["port"].as_str() {
                    "80" => drop(data.insert(stream, error)),
                    "81" => {
                        peer.send(error, b"port 81: connection refused", true).await;
                        peer.send(stream, b"", true).await;
                    }
                    "83" => {
                        peer.send(stream, b"hello\n", true).await;
                        peer.send(error, b"", true).await;
                    }
                    _ => return,
                }
            }
            Frame::Data { stream, bytes, end } => {
                let Some(error) = data.get(&stream).copied() else { continue };
                peer.send(stream, &bytes, end).await;
                if end {
                    peer.send(error, b"", true).await;
                }
            }
            Frame::Reset | Frame::Other => {}
        }
    }
}

/// The server's side of a connection.
struct Peer {
    stream: TcpStream,
    is_first: bool,
}

impl Peer {
    async fn upgrade(mut stream: TcpStream, protocol: &str) -> Self {
        read_head(&mut stream).await;
        let answer = format!(
            "HTTP/1.1 101 Switching Protocols\r\nUpgrade: SPDY/3.1\r\n\
             X-Stream-Protocol-Version: {protocol}\r\n\r\n"
        );
        stream.write_all(answer.as_bytes()).await.unwrap();
        Self { stream, is_first: true }
    }

    async fn next(&mut self) -> Option<Frame> {
        let mut head = [0; 8];
        self.stream.read_exact(&mut head).await.ok()?;
        let [a, b, c, d, flags, length @ ..] = head;
        let mut payload =
            vec![0; u32::from_be_bytes([0, length[0], length[1], length[2]]) as usize];
        self.stream.read_exact(&mut payload).await.ok()?;
        let word = |at: usize| u32::from_be_bytes(*payload[at..].first_chunk().unwrap());
        Some(match (a & 0x80, u16::from_be_bytes([c, d])) {
            (0, _) => {
                let stream = u32::from_be_bytes([a, b, c, d]);
                Frame::Data { stream, bytes: payload, end: flags & 1 != 0 }
            }
            (_, 1) => {
                // The head of the compression, and a stored block.
                let from = 10 + if std::mem::take(&mut self.is_first) { 6 } else { 0 } + 5;
                let mut at = from + 4;
                let mut text = || {
                    let length = word(at) as usize;
                    at += 4 + length;
                    String::from_utf8(payload[at - length..at].to_vec()).unwrap()
                };
                let headers = (0..word(from)).map(|_| (text(), text())).collect();
                Frame::Opened { stream: word(0), headers }
            }
            (_, 3) => Frame::Reset,
            _ => Frame::Other,
        })
    }

    /// Sends data. Returns whether the connection is still open.
    async fn send(&mut self, stream: u32, bytes: &[u8], end: bool) -> bool {
        let length = u32::try_from(bytes.len()).unwrap().to_be_bytes();
        let head = [&stream.to_be_bytes()[..], &[u8::from(end)], &length[1..]].concat();
        self.stream.write_all(&[&head, bytes].concat()).await.is_ok()
    }

    /// Sends the status, and ends as a server does.
    async fn status(&mut self, stream: u32, status: &str) {
        self.send(stream, status.as_bytes(), true).await;
    }
}
