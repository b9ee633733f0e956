use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::atomic::{AtomicUsize, Ordering},
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, UdpSocket},
};
use tonic::Code;

use super::*;

fn query(id: u64, resolver: u32, message: &[u8]) -> NameQuery {
    NameQuery { id, resolver, tcp: false, message: Bytes::copy_from_slice(message) }
}

fn servers() -> [Server; 2] {
    ["127.0.0.53", "::1"].map(|server| Server::of_node(server).unwrap())
}

/// What comes of these queries, each answered by `ask`.
async fn answered<A: Future<Output = std::io::Result<Bytes>> + Send + 'static>(
    queries: Vec<NameQuery>,
    ask: impl Fn(Server, bool, Bytes) -> A,
) -> (Result<(), Status>, Vec<NameAnswer>) {
    let (sender, mut receiver) = mpsc::channel(1000);
    let stays_open = futures::stream::iter(queries.into_iter().map(Ok)).chain(futures::stream::pending()).boxed();
    let mut answers = Vec::new();
    let (resolver, servers) = (Resolver::default(), servers());
    let result = tokio::select! {
        result = resolver.answer(stays_open, sender, &servers, ask) => result,
        () = async {
            // Whatever waits by the clock is past it: then nothing more comes.
            while let Ok(Some(answer)) = timeout(DEADLINE * 2, receiver.recv()).await {
                answers.push(answer);
            }
        } => Ok(()),
    };
    answers.sort_by_key(|answer| answer.id);
    (result, answers)
}

#[tokio::test(start_paused = true)]
async fn queries_are_answered_or_said_to_have_failed() {
    let queries = vec![query(1, 0, &[7; HEAD]), query(2, 1, &[7; HEAD]), query(3, 1, &[8; HEAD])];
    let ask = |server: Server, tcp: bool, message: Bytes| async move {
        assert!(!tcp);
        match (server.to_string().as_str(), message[0]) {
            ("127.0.0.53", _) => Ok(Bytes::from_static(b"fine")),
            ("::1", 7) => Err(std::io::ErrorKind::ConnectionRefused.into()),
            _ => std::future::pending().await,
        }
    };
    let (result, answers) = answered(queries, ask).await;
    result.unwrap();
    let said: Vec<_> = answers.iter().map(|answer| (answer.id, answer.message.clone())).collect();
    assert_eq!(said, [(1, Bytes::from_static(b"fine")), (2, message::failed(&[7; HEAD])), (3, Bytes::new())]);
}

#[tokio::test]
async fn no_other_name_server_is_asked_and_no_other_size_is_taken() {
    let never = |_, _, _| async { unreachable!("nothing is asked") };
    let large = vec![0; TCP_MESSAGE + 1];
    for (bad, word) in [
        (query(1, 2, &[0; HEAD]), "2"),
        (query(1, u32::MAX, &[0; HEAD]), "has 2"),
        (query(1, 0, b"short"), "5 bytes"),
        (query(1, 0, &large), "65536 bytes"),
    ] {
        let (result, answers) = answered(vec![bad], never).await;
        let status = result.unwrap_err();
        assert!(status.code() == Code::InvalidArgument && status.message().contains(word), "{status:?}");
        assert_eq!(answers, []);
    }
}

#[tokio::test(start_paused = true)]
async fn no_cell_asks_more_than_it_may_at_a_time() {
    static NOW: AtomicUsize = AtomicUsize::new(0);
    static MOST: AtomicUsize = AtomicUsize::new(0);
    let queries = (0..2 * OF_A_CELL as u64).map(|id| query(id, 0, &[0; HEAD])).collect();
    let ask = |_, _, message| async move {
        MOST.fetch_max(NOW.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
        sleep(Duration::from_secs(1)).await;
        NOW.fetch_sub(1, Ordering::SeqCst);
        Ok(message)
    };
    let (result, answers) = answered(queries, ask).await;
    result.unwrap();
    assert_eq!((answers.len(), MOST.load(Ordering::SeqCst)), (2 * OF_A_CELL, OF_A_CELL));
}

async fn udp(answers: impl Fn(&[u8]) -> Vec<Vec<u8>> + Send + 'static) -> SocketAddr {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let address = socket.local_addr().unwrap();
    tokio::spawn(async move {
        let mut buffer = [0; 512];
        loop {
            let (length, from) = socket.recv_from(&mut buffer).await.unwrap();
            for answer in answers(&buffer[..length]) {
                socket.send_to(&answer, from).await.unwrap();
            }
        }
    });
    address
}

#[tokio::test]
async fn an_answer_is_the_one_with_the_querys_id() {
    let server = udp(|query| {
        let mut other = message::failed(query).to_vec();
        other[0] ^= 1;
        vec![b"x".to_vec(), query.to_vec(), other, message::failed(query).to_vec()]
    });
    let query = [9; HEAD];
    assert_eq!(ask::by_udp(server.await, &query).await.unwrap(), message::failed(&query));
}

#[tokio::test]
async fn an_answer_too_large_for_udp_is_said_to_be_cut() {
    let server = udp(|query| vec![[&message::failed(query)[..], &[0; 5000]].concat()]);
    let query = [9; HEAD];
    assert_eq!(ask::by_udp(server.await, &query).await.unwrap(), message::cut(&query));
}

#[tokio::test]
async fn by_tcp_messages_have_their_length_before_them() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let server = listener.local_addr().unwrap();
    tokio::spawn(async move {
        for answer in [[1; TCP_MESSAGE], [0xff; TCP_MESSAGE]] {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut query = vec![0; stream.read_u16().await.unwrap().into()];
            stream.read_exact(&mut query).await.unwrap();
            stream.write_all(&[&[0xff; 2][..], &answer].concat()).await.unwrap();
        }
    });
    let query = [0xff; HEAD];
    assert!(ask::by_tcp(server, &query).await.is_err(), "another id");
    assert_eq!(ask::by_tcp(server, &query).await.unwrap(), [0xff; TCP_MESSAGE][..]);
}
