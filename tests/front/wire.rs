//! Misbehaving clients, frame by frame.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use http::Response;
use kiyot::backends::Method;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixStream,
    sync::mpsc,
};

use crate::{
    caller::{LONG, soon},
    fake_runtime::{FakeRuntime, send_all},
    server::{Setup, TestServer},
};

const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const WINDOW_UPDATE: u8 = 8;
const ACK: u8 = 1;
/// The flags END_STREAM and END_HEADERS.
const WHOLE: u8 = 5;
const LAST_ID: u32 = (1 << 31) - 1;

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    [&(payload.len() as u32).to_be_bytes()[1..], &[kind, flags], &stream.to_be_bytes(), payload]
        .concat()
}

/// Returns a HEADERS frame of a call without a body.
fn request(stream: u32, path: &str) -> Vec<u8> {
    // `:method: POST`, `:scheme: http`, and `:path` as a literal.
    frame(HEADERS, WHOLE, stream, &[&[0x83, 0x86, 4, path.len() as u8], path.as_bytes()].concat())
}

/// Connects a client that has sent its preface, with the largest windows.
async fn connect(server: &TestServer) -> UnixStream {
    let mut stream = UnixStream::connect(&server.running.address).await.unwrap();
    let window = LAST_ID - 65_535;
    let settings = frame(SETTINGS, 0, 0, &[[0, 4].as_slice(), &LAST_ID.to_be_bytes()].concat());
    let begin = [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        &settings[..],
        &frame(WINDOW_UPDATE, 0, 0, &window.to_be_bytes()),
    ]
    .concat();
    stream.write_all(&begin).await.unwrap();
    stream
}

/// Returns the stream and the payload of the next frame of a kind; `None` at the connection's end.
async fn next(stream: &mut UnixStream, kind: u8) -> Option<(u32, Vec<u8>)> {
    loop {
        let mut head = [0; 9];
        stream.read_exact(&mut head).await.ok()?;
        let [a, b, c, is, _, id @ ..] = head;
        let mut payload = vec![0; u32::from_be_bytes([0, a, b, c]) as usize];
        stream.read_exact(&mut payload).await.ok()?;
        if is == kind {
            return Some((u32::from_be_bytes(id), payload));
        }
    }
}

/// The client does not read its socket. An endless response is read from the runtime no faster than
/// it is sent, does not block other calls, and is reset in the end.
///
/// Verifies F19.
#[tokio::test(flavor = "multi_thread")]
async fn unread_response_in_the_socket_is_reset() {
    const ON_THE_WAY: usize = 8 << 20;
    let server = Setup { client_timeout: Duration::from_secs(3), ..Setup::default() }.start();
    let (sent, (ended, mut ends)) = (Arc::new(AtomicUsize::new(0)), mpsc::unbounded_channel());
    let count = sent.clone();
    let _runtime = FakeRuntime::listen(&server.containerd(), move |mut call| {
        let (count, ended) = (count.clone(), ended.clone());
        async move {
            if call.head.uri.path() == Method::Version.path() {
                return call.answer(b"here").await;
            }
            let mut stream = call.respond.send_response(Response::new(()), false).unwrap();
            let part = Bytes::from(vec![0; 16 << 10]);
            while send_all(&mut stream, part.clone()).await {
                count.fetch_add(part.len(), Ordering::SeqCst);
            }
            ended.send(()).unwrap();
        }
    });
    let mut unread = connect(&server).await;
    unread.write_all(&request(1, "/runtime.v1.RuntimeService/Converse")).await.unwrap();
    let caller = server.caller().await;
    assert_eq!(caller.call(Method::Version, b"").await.ok(), b"here");
    soon(ends.recv()).await.unwrap();
    let sent = sent.load(Ordering::SeqCst);
    assert!(sent > 0 && sent < ON_THE_WAY, "{sent}");
    assert_eq!(caller.call(Method::Version, b"").await.ok(), b"here");
    // The connection is still usable if it is read again.
    let (stream, code) = soon(next(&mut unread, RST_STREAM)).await.unwrap();
    assert_eq!((stream, code), (1, vec![0, 0, 0, 8]));
    unread.write_all(&request(3, Method::Version.path())).await.unwrap();
    assert_eq!(soon(next(&mut unread, HEADERS)).await.unwrap().0, 3);
}

/// While the client reads no answers, the server reads a bounded number of frames that need one.
///
/// Verifies F19.
#[tokio::test(flavor = "multi_thread")]
async fn flood_of_a_client_that_reads_nothing_is_stopped() {
    let server = Setup::default().start();
    let _runtime = FakeRuntime::named(&server.containerd());
    let refused = |id: u32| frame(HEADERS, WHOLE, 2 * id + 1, &[0x83]);
    let floods: [&dyn Fn(u32) -> Vec<u8>; 3] =
        [&|_| frame(PING, 0, 0, &[0; 8]), &|_| frame(SETTINGS, 0, 0, &[]), &refused];
    for flood in floods {
        let mut stream = connect(&server).await;
        let (mut sent, mut id) = (0, 0);
        // The server has stopped reading if the socket accepts no data even in the time of a slow
        // machine.
        while let Ok(written) = tokio::time::timeout(Duration::from_secs(2), async {
            let part: Vec<u8> = (id..id + 1000).flat_map(flood).collect();
            stream.write_all(&part).await.unwrap();
            part.len()
        })
        .await
        {
            (sent, id) = (sent + written, id + 1000);
            assert!(sent < 64 << 20, "{sent}");
        }
        // The server goes on when its answers are read.
        soon(async {
            let mut rest = vec![0; 1 << 20];
            while tokio::time::timeout(Duration::from_secs(2), stream.read(&mut rest))
                .await
                .is_ok_and(|read| read.unwrap() > 0)
            {}
        })
        .await;
        let caller = server.caller().await;
        assert_eq!(caller.call(Method::Version, b"").await.ok(), b"answer to Version");
    }
}

/// The client sends a call before it has read the GOAWAY.
///
/// Verifies F19.
#[tokio::test(flavor = "multi_thread")]
async fn request_sent_before_goaway_was_received_is_answered() {
    let server = Setup::default().start();
    let _runtime = FakeRuntime::named(&server.containerd());
    let mut stream = connect(&server).await;
    // SETTINGS and their acknowledgement, because a connection without a preface is closed at once.
    for _ in 0..2 {
        soon(next(&mut stream, SETTINGS)).await.unwrap();
    }
    let drained = tokio::spawn(async move { (server.running.drain.drain(LONG).await, server.dir) });
    let (_, goaway) = soon(next(&mut stream, GOAWAY)).await.unwrap();
    assert_eq!(goaway, [LAST_ID.to_be_bytes(), [0; 4]].concat());
    let (_, ping) = soon(next(&mut stream, PING)).await.unwrap();
    stream.write_all(&request(1, Method::Version.path())).await.unwrap();
    assert_eq!(soon(next(&mut stream, HEADERS)).await.unwrap().0, 1);
    stream
        .write_all(&[request(3, Method::Version.path()), frame(PING, ACK, 0, &ping)].concat())
        .await
        .unwrap();
    let (_, goaway) = soon(next(&mut stream, GOAWAY)).await.unwrap();
    assert_eq!(goaway, [3_u32.to_be_bytes(), [0; 4]].concat());
    // The last call is answered before the connection ends.
    assert_eq!(soon(next(&mut stream, HEADERS)).await.unwrap().0, 3);
    assert!(soon(next(&mut stream, GOAWAY)).await.is_none());
    assert!(soon(drained).await.unwrap().0);
}

/// Rapid reset (CVE-2023-44487).
///
/// Verifies F19.
#[tokio::test(flavor = "multi_thread")]
async fn requests_reset_at_once_leave_no_state() {
    let server = Setup { max_calls: 20, ..Setup::default() }.start();
    let _runtime = FakeRuntime::named(&server.containerd());
    let mut stream = connect(&server).await;
    let (mut read, mut write) = stream.split();
    let flood = async {
        for id in 0..50_000 {
            let reset = frame(RST_STREAM, 0, 2 * id + 1, &[0, 0, 0, 8]);
            write
                .write_all(&[request(2 * id + 1, Method::Version.path()), reset].concat())
                .await
                .unwrap();
        }
        write.write_all(&request(200_001, Method::Version.path())).await.unwrap();
    };
    let answers = async {
        let mut all = Vec::new();
        // Reads until the response to the last call.
        while !all.windows(4).any(|bytes| bytes == 200_001_u32.to_be_bytes()) {
            let keep = all.len().saturating_sub(3);
            all.drain(..keep);
            assert!(read.read_buf(&mut all).await.unwrap() > 0);
        }
    };
    soon(async { tokio::join!(flood, answers) }).await;
    assert_eq!(server.caller().await.call(Method::Version, b"").await.ok(), b"answer to Version");
}
