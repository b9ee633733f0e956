//! Streaming server between a client and a fake cell.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use futures::{StreamExt as _, stream::BoxStream};
use kiyot_engine::id::CellId;
use kiyot_proto::cell::TunnelPart;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream},
    net::TcpStream,
    sync::{Semaphore, mpsc},
    time::{Instant, sleep},
};
use tokio_stream::wrappers::ReceiverStream;

use super::{
    CellStreams, MAX_CELL_STREAMS, MAX_UNREAD_HEADS, Streaming, parse_cell_url, tokens::Route,
    tunnel::Tunnels,
};
use crate::backends::milpa::failure::{Code, Failure};

/// Fake cell that hands each tunnel to the test as the connection to the streaming server, with the
/// port.
#[derive(Debug, Default, Clone)]
pub(super) struct FakeCell {
    opened: Option<mpsc::UnboundedSender<(u32, DuplexStream)>>,
}

#[async_trait]
impl Tunnels for FakeCell {
    async fn open(
        &self,
        mut up: mpsc::Receiver<TunnelPart>,
    ) -> Result<BoxStream<'static, Result<TunnelPart, Failure>>, Failure> {
        let Some(opened) = &self.opened else {
            return Err(Failure::cell(Code::Unavailable, "no cell"));
        };
        let first =
            up.recv().await.ok_or_else(|| Failure::cell(Code::InvalidArgument, "no first part"))?;
        let (ours, theirs) = tokio::io::duplex(1 << 10);
        opened
            .send((first.port, theirs))
            .map_err(|_| Failure::cell(Code::Unavailable, "the test is over"))?;
        let (mut read, mut write) = tokio::io::split(ours);
        let (down, parts) = mpsc::channel(2);
        let to_server = async move {
            let mut part = Some(first);
            while let Some(TunnelPart { content, end, .. }) = part {
                if write.write_all(&content).await.is_err() {
                    return;
                }
                if end {
                    let _ = write.shutdown().await;
                    return;
                }
                part = up.recv().await;
            }
        };
        // Keeps the tunnel, as the agent does, until both directions have ended or it is dropped.
        let tunnel = down.clone();
        let from_server = async move {
            loop {
                let mut content = bytes::BytesMut::with_capacity(100);
                let end = read.read_buf(&mut content).await.unwrap_or(0) == 0;
                if down
                    .send(Ok(TunnelPart {
                        content: content.freeze(),
                        end,
                        ..TunnelPart::default()
                    }))
                    .await
                    .is_err()
                    || end
                {
                    return;
                }
            }
        };
        tokio::spawn(async move {
            tokio::select! {
                () = tunnel.closed() => {}
                _ = async { tokio::join!(to_server, from_server) } => {}
            }
        });
        Ok(ReceiverStream::new(parts).boxed())
    }
}

struct Scene {
    streaming: Streaming,
    cell: FakeCell,
    tunnels: mpsc::UnboundedReceiver<(u32, DuplexStream)>,
    /// Limit of the streams of `cell`.
    streams: Arc<Semaphore>,
}

impl Scene {
    async fn new() -> Self {
        let (opened, tunnels) = mpsc::unbounded_channel();
        Self {
            streaming: Streaming::start().await,
            cell: FakeCell { opened: Some(opened) },
            tunnels,
            streams: Arc::new(Semaphore::new(MAX_CELL_STREAMS)),
        }
    }

    fn token(&self, cell: &FakeCell) -> String {
        let url = self
            .streaming
            .register(Route {
                port: 4321,
                target: "/exec/T?a=b".into(),
                tunnels: Arc::new(cell.clone()),
                streams: Arc::clone(&self.streams),
            })
            .unwrap();
        url.strip_prefix(&format!("http://{}/", self.streaming.address().unwrap()))
            .unwrap()
            .to_owned()
    }

    async fn client(&self, text: &str) -> TcpStream {
        let mut client = TcpStream::connect(self.streaming.address().unwrap()).await.unwrap();
        client.write_all(text.as_bytes()).await.unwrap();
        client
    }

    /// Connects without a turn of another task.
    fn client_at_once(&self, text: &str) -> TcpStream {
        let mut client = std::net::TcpStream::connect(self.streaming.address().unwrap()).unwrap();
        std::io::Write::write_all(&mut client, text.as_bytes()).unwrap();
        client.set_nonblocking(true).unwrap();
        TcpStream::from_std(client).unwrap()
    }

    /// Waits until the only stream has ended. The clock is paused.
    async fn has_ended(&self) {
        let began = Instant::now();
        while self.streams.available_permits() < MAX_CELL_STREAMS {
            // Long, because the kernel's time is not paused.
            assert!(began.elapsed() < Duration::from_secs(100_000), "the stream is still open");
            sleep(Duration::from_secs(1)).await;
        }
    }

    /// Returns both ends of a stream after its response. The clock is paused.
    async fn upgraded(&mut self) -> (TcpStream, DuplexStream) {
        let token = self.token(&self.cell);
        let mut client = self.client(&format!("GET /{token} HTTP/1.1\r\n\r\n")).await;
        let (_, mut server) = self.tunnels.recv().await.unwrap();
        exactly(&mut server, "GET /exec/T?a=b HTTP/1.1\r\n\r\n").await;
        server.write_all(b"HTTP/1.1 101 x\r\n\r\n").await.unwrap();
        exactly(&mut client, "HTTP/1.1 101 x\r\n\r\n").await;
        tokio::time::pause();
        (client, server)
    }
}

async fn all(stream: &mut (impl tokio::io::AsyncRead + Unpin)) -> String {
    let mut text = String::new();
    stream.read_to_string(&mut text).await.unwrap();
    text
}

async fn exactly(stream: &mut (impl tokio::io::AsyncRead + Unpin), expected: &str) {
    let mut bytes = vec![0; expected.len()];
    stream.read_exact(&mut bytes).await.unwrap();
    assert_eq!(String::from_utf8_lossy(&bytes), expected);
}

#[tokio::test]
async fn bytes_are_spliced_both_ways_with_half_close() {
    let mut scene = Scene::new().await;
    let token = scene.token(&scene.cell);
    let mut client =
        scene.client(&format!("POST /{token} HTTP/1.1\r\nUpgrade: SPDY/3.1\r\n\r\nearly")).await;
    let (port, mut server) = scene.tunnels.recv().await.unwrap();
    assert_eq!(port, 4321);
    exactly(&mut server, "POST /exec/T?a=b HTTP/1.1\r\nUpgrade: SPDY/3.1\r\n\r\nearly").await;
    server
        .write_all(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: SPDY/3.1\r\n\r\nhello")
        .await
        .unwrap();
    exactly(&mut client, "HTTP/1.1 101 Switching Protocols\r\nUpgrade: SPDY/3.1\r\n\r\nhello")
        .await;

    // More than all buffers on the way hold.
    let much = "x".repeat(3 << 20);
    let (mut client_read, mut client_write) = client.split();
    let (mut server_read, mut server_write) = tokio::io::split(server);
    tokio::join!(
        async {
            client_write.write_all(much.as_bytes()).await.unwrap();
            client_write.shutdown().await.unwrap();
        },
        async { assert_eq!(all(&mut server_read).await.len(), much.len()) },
    );
    // The client has closed its side; the other direction still works.
    tokio::join!(
        async {
            server_write.write_all(much.as_bytes()).await.unwrap();
            server_write.shutdown().await.unwrap();
        },
        async { assert_eq!(all(&mut client_read).await.len(), much.len()) },
    );
}

#[tokio::test]
async fn response_without_upgrade_is_forwarded_without_later_bytes() {
    let mut scene = Scene::new().await;
    for (answer, forwarded) in [
        (
            "HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\ngoneMORE",
            "HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\ngone",
        ),
        (
            "HTTP/1.1 500 No\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nno\r\n0\r\n\r\nMORE",
            "HTTP/1.1 500 No\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nno\r\n0\r\n\r\n",
        ),
        (
            "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 403 No\r\nContent-Length: 0\r\n\r\nMORE",
            "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 403 No\r\nContent-Length: 0\r\n\r\n",
        ),
    ] {
        let token = scene.token(&scene.cell);
        let mut client = scene.client(&format!("GET /{token} HTTP/1.1\r\n\r\n")).await;
        let (_, mut server) = scene.tunnels.recv().await.unwrap();
        server.write_all(answer.as_bytes()).await.unwrap();
        assert_eq!(all(&mut client).await, forwarded);
    }
}

#[tokio::test]
async fn token_is_valid_for_one_request() {
    let mut scene = Scene::new().await;
    let token = scene.token(&scene.cell);
    let request = format!("GET /{token} HTTP/1.1\r\n\r\n");
    let _first = scene.client(&request).await;
    let _tunnel = scene.tunnels.recv().await.unwrap();
    let mut second = scene.client(&request).await;
    assert!(all(&mut second).await.starts_with("HTTP/1.1 404 "));
}

#[tokio::test]
async fn invalid_request_gets_a_400_response() {
    let scene = Scene::new().await;
    assert!(
        all(&mut scene.client("\x16\x03\x01 hello\r\n\r\n").await)
            .await
            .starts_with("HTTP/1.1 400 ")
    );
    let absent = FakeCell::default();
    let token = scene.token(&absent);
    let answer = all(&mut scene.client(&format!("GET /{token} HTTP/1.1\r\n\r\n")).await).await;
    assert!(answer.starts_with("HTTP/1.1 502 ") && answer.ends_with("no cell"), "{answer}");
}

#[tokio::test]
async fn stuck_client_does_not_block_others() {
    let mut scene = Scene::new().await;
    let token = scene.token(&scene.cell);
    let _stuck = scene.client(&format!("GET /{token} HTTP/1.1\r\n\r\n")).await;
    let (_, mut server) = scene.tunnels.recv().await.unwrap();
    let flood = tokio::spawn(async move {
        let _ = server.write_all(b"HTTP/1.1 101 x\r\n\r\n").await;
        while server.write_all(&[0; 1 << 16]).await.is_ok() {}
    });
    let token = scene.token(&scene.cell);
    let mut other = scene.client(&format!("GET /{token} HTTP/1.1\r\n\r\n")).await;
    let (_, mut server) = scene.tunnels.recv().await.unwrap();
    server.write_all(b"HTTP/1.1 101 x\r\n\r\nhello").await.unwrap();
    exactly(&mut other, "HTTP/1.1 101 x\r\n\r\nhello").await;
    flood.abort();
}

/// Verifies D5.
#[tokio::test]
async fn stream_without_a_client_ends_though_its_cell_is_silent() {
    let mut scene = Scene::new().await;
    let (client, mut server) = scene.upgraded().await;
    assert_eq!(scene.streams.available_permits(), MAX_CELL_STREAMS - 1);
    drop(client);
    assert_eq!(all(&mut server).await, "");
    scene.has_ended().await;
    // Passes when all tasks wait.
    sleep(Duration::from_secs(1)).await;
    assert!(server.write_all(b"x").await.is_err(), "the tunnel is open");
}

/// Verifies D5.
#[tokio::test]
async fn stream_without_a_client_ends_though_its_cell_reads_nothing() {
    let mut scene = Scene::new().await;
    let (mut client, mut server) = scene.upgraded().await;
    // Until the cell's queue and the kernel's buffers are full.
    let part = [0; 1 << 16];
    while tokio::time::timeout(Duration::from_secs(1), client.write_all(&part)).await.is_ok() {}
    client.set_zero_linger().unwrap();
    drop(client);
    scene.has_ended().await;
    // The server reads only the bytes that the tunnel held.
    let mut left = Vec::new();
    server.read_to_end(&mut left).await.unwrap();
}

/// Verifies D5.
#[tokio::test]
async fn stream_that_its_cell_has_half_closed_ends() {
    let mut scene = Scene::new().await;
    let (mut client, mut server) = scene.upgraded().await;
    server.shutdown().await.unwrap();
    assert_eq!(all(&mut client).await, "");
    scene.has_ended().await;
    assert_eq!(all(&mut server).await, "");
}

/// Verifies D5.
#[tokio::test]
async fn half_closed_stream_lives_while_bytes_move() {
    let mut scene = Scene::new().await;
    let (mut client, mut server) = scene.upgraded().await;
    client.shutdown().await.unwrap();
    assert_eq!(all(&mut server).await, "");
    for _ in 0..20 {
        sleep(Duration::from_secs(9)).await;
        server.write_all(b"x").await.unwrap();
    }
    let silent = Instant::now();
    assert_eq!(all(&mut client).await, "x".repeat(20));
    assert!(silent.elapsed() < Duration::from_secs(21), "{:?}", silent.elapsed());
}

/// Verifies D5.
#[tokio::test]
async fn streams_of_a_cell_are_limited() {
    let mut scene = Scene::new().await;
    let others = Arc::clone(&scene.streams).acquire_many_owned(MAX_CELL_STREAMS as u32 - 1);
    let _others = others.await.unwrap();
    let token = [(); 3].map(|()| scene.token(&scene.cell));
    let client = scene.client(&format!("GET /{} HTTP/1.1\r\n\r\n", token[0])).await;
    let (_, server) = scene.tunnels.recv().await.unwrap();
    let mut refused = scene.client(&format!("GET /{} HTTP/1.1\r\n\r\n", token[1])).await;
    let answer = all(&mut refused).await;
    assert!(
        answer.starts_with("HTTP/1.1 503 ")
            && answer.ends_with("96 streams of the cell are open, and no more are allowed"),
        "{answer}"
    );
    drop((client, server));
    while scene.streams.available_permits() == 0 {
        tokio::task::yield_now().await;
    }
    let _client = scene.client(&format!("GET /{} HTTP/1.1\r\n\r\n", token[2])).await;
    scene.tunnels.recv().await.unwrap();
}

#[test]
fn limit_of_a_cell_is_kept_while_it_is_used() {
    let cells = CellStreams::default();
    let ids = [(); 2].map(|()| CellId::mint().unwrap());
    let first = cells.of(&ids[0]);
    let other = cells.of(&ids[1]);
    assert!(Arc::ptr_eq(&first, &cells.of(&ids[0])) && !Arc::ptr_eq(&first, &other));
    drop(other);
    drop((cells.of(&ids[1]), first, cells.of(&ids[0])));
    assert_eq!(cells.0.lock().unwrap().len(), 2);
    let _third = cells.of(&CellId::mint().unwrap());
    assert_eq!(cells.0.lock().unwrap().len(), 1);
}

/// Verifies D5.
#[tokio::test]
async fn silent_clients_end_by_age_at_their_limit() {
    let mut scene = Scene::new().await;
    tokio::time::pause();
    let mut silent: Vec<_> = (0..=MAX_UNREAD_HEADS).map(|_| scene.client_at_once("")).collect();
    // Before its deadline, at which it would get a response.
    let mut left = Vec::new();
    let _ = silent[0].read_to_end(&mut left).await;
    assert_eq!(left, b"");
    tokio::time::resume();
    let token = scene.token(&scene.cell);
    let _client = scene.client(&format!("GET /{token} HTTP/1.1\r\n\r\n")).await;
    scene.tunnels.recv().await.unwrap();
}

/// Verifies D5.
#[tokio::test]
async fn clients_that_connect_at_once_are_all_served() {
    let mut scene = Scene::new().await;
    let tokens: Vec<_> = (0..MAX_CELL_STREAMS).map(|_| scene.token(&scene.cell)).collect();
    let head = |token: &String| format!("GET /{token} HTTP/1.1\r\n\r\n");
    let _clients: Vec<_> = tokens.iter().map(|it| scene.client_at_once(&head(it))).collect();
    let mut tunnels = Vec::new();
    for _ in &tokens {
        tunnels.push(scene.tunnels.recv().await.unwrap());
    }
}

#[tokio::test]
async fn dropped_server_ends_its_connections() {
    let mut scene = Scene::new().await;
    let token = scene.token(&scene.cell);
    let mut client = scene.client(&format!("GET /{token} HTTP/1.1\r\n\r\n")).await;
    let (_, mut server) = scene.tunnels.recv().await.unwrap();
    server.write_all(b"HTTP/1.1 101 x\r\n\r\n").await.unwrap();
    exactly(&mut client, "HTTP/1.1 101 x\r\n\r\n").await;
    drop(scene.streaming);
    let mut left = Vec::new();
    // Closed or reset, depending on the kernel.
    let _ = client.read_to_end(&mut left).await;
    assert_eq!(left, b"");
}

#[test]
fn cell_urls_are_parsed() {
    assert_eq!(
        parse_cell_url("http://127.0.0.1:4321/exec/T?a=b"),
        Some((4321, "/exec/T?a=b".into()))
    );
    assert_eq!(parse_cell_url("http://[::]:1/x"), Some((1, "/x".into())));
    for bad in [
        "",
        "/exec/T",
        "https://127.0.0.1:1/x",
        "http://127.0.0.1/x",
        "http://127.0.0.1:0/x",
        "http://h:99999/x",
        "http://h:1/\r\nX: y",
    ] {
        assert_eq!(parse_cell_url(bad), None, "{bad}");
    }
    assert_eq!(parse_cell_url(&format!("http://h:1/{}", "x".repeat(5000))), None);
    assert_eq!(parse_cell_url("http://h:1/\u{e4}"), None, "a request line can't have it");
}
