use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::net::TcpListener;

use super::*;

const PROTOCOL: &str = "v4.channel.k8s.io";

/// Answers a connection with a response after it has read the request's head.
async fn server(answer: &str) -> (Target, tokio::task::JoinHandle<TcpStream>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let target = Target { address: listener.local_addr().unwrap(), path: "/token".to_owned() };
    let answer = answer.to_owned();
    let serving = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(stream.read_u8().await.unwrap());
        }
        stream.write_all(answer.as_bytes()).await.unwrap();
        stream
    });
    (target, serving)
}

fn upgraded() -> String {
    format!("HTTP/1.1 101 Switching Protocols\r\nX-Stream-Protocol-Version: {PROTOCOL}\r\n\r\n")
}

#[tokio::test]
async fn refusal_names_status_and_body_or_the_chosen_protocol() {
    let (target, _server) =
        server("HTTP/1.1 404 Not Found\r\nContent-Length: 7\r\n\r\nno more").await;
    let error = connect(&target, PROTOCOL).await.unwrap_err();
    assert_eq!(error.to_string(), "the streaming server refuses with 404: no more");
    let (target, server) = server("HTTP/1.1 101 S\r\n\r\n").await;
    let error = connect(&target, PROTOCOL).await.unwrap_err();
    assert!(matches!(error, UpgradeError::Protocol { .. }), "{error}");
    drop(server.await);
}

#[tokio::test]
async fn server_that_closes_before_its_answer_is_an_error() {
    let (target, server) = server("HTTP/1.1 101 S\r\n").await;
    let connecting = tokio::spawn(async move { connect(&target, PROTOCOL).await });
    drop(server.await.unwrap());
    assert!(matches!(connecting.await.unwrap(), Err(UpgradeError::Io(_))));
}

#[tokio::test]
async fn pings_of_the_server_are_answered_and_bytes_behind_the_head_are_read() {
    let (target, server) = server(&(upgraded() + "\0\0\0\x01\x01\0\0\x02hi")).await;
    let (sender, mut receiver) = connect(&target, PROTOCOL).await.unwrap();
    let mut stream = server.await.unwrap();
    let frame = receiver.next().await.unwrap();
    assert_eq!(frame, Some(Frame::Data { stream: 1, bytes: "hi".into(), end: true }));
    stream.write_all(b"\x80\x03\0\x06\0\0\0\x04\0\0\0\x02\x80\x03\0\x07\0\0\0\0").await.unwrap();
    assert_eq!(receiver.next().await.unwrap(), Some(Frame::GoAway));
    let mut answer = [0; 12];
    stream.read_exact(&mut answer).await.unwrap();
    assert_eq!(&answer, b"\x80\x03\0\x06\0\0\0\x04\0\0\0\x02");
    drop(stream);
    assert_eq!(receiver.next().await.unwrap(), None);
    drop(sender);
}

/// Bytes of a part that a sender repeats.
const PART_BYTES: usize = 32 << 10;

/// More than the kernel's buffers of a connection hold.
const MAX_BUFFERED_BYTES: usize = 64 << 20;

#[tokio::test]
async fn sender_waits_for_a_server_that_reads_nothing_and_ends_with_the_receiver() {
    let (target, server) = server(&upgraded()).await;
    let (sender, receiver) = connect(&target, PROTOCOL).await.unwrap();
    let _stream = server.await.unwrap();
    let (sent, mut before) = (Arc::new(AtomicUsize::new(0)), 0);
    let count = Arc::clone(&sent);
    let sending = tokio::spawn(async move {
        let part = Bytes::from(vec![0; PART_BYTES]);
        while sender.send(1, part.clone()).await.is_ok() {
            count.fetch_add(1, Ordering::Relaxed);
        }
    });
    // Until the kernel's buffers and the queue are full.
    loop {
        tokio::time::sleep(Duration::from_millis(200)).await;
        let now = sent.load(Ordering::Relaxed);
        assert!(
            now < MAX_BUFFERED_BYTES / PART_BYTES,
            "{now} parts of {PART_BYTES} bytes are sent"
        );
        if now > 0 && now == before {
            break;
        }
        before = now;
    }
    assert!(!sending.is_finished());
    drop(receiver);
    sending.await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_opened_at_once_are_sent_in_the_order_of_their_ids() {
    let (target, server) = server(&upgraded()).await;
    let (sender, _receiver) = connect(&target, PROTOCOL).await.unwrap();
    let mut stream = server.await.unwrap();
    let opening: Vec<_> = (0..100)
        .map(|_| {
            let sender = sender.clone();
            tokio::spawn(async move { sender.open(&[("a", "b")], false).await.unwrap() })
        })
        .collect();
    for number in 0..100u32 {
        let mut head = [0; 8];
        stream.read_exact(&mut head).await.unwrap();
        let mut payload = vec![0; usize::from(head[7])];
        stream.read_exact(&mut payload).await.unwrap();
        assert_eq!(payload[..4], (2 * number + 1).to_be_bytes());
    }
    for opened in opening {
        opened.await.unwrap();
    }
}
