use std::{
    future::pending,
    net::{Ipv4Addr, SocketAddr},
    sync::atomic::{AtomicUsize, Ordering},
};

use kiyot_proto::cell::TunnelPart;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream, UdpSocket},
};
use tokio_stream::wrappers::ReceiverStream;

use super::*;

fn query(id: u64, resolver: u32, message: &[u8]) -> NameQuery {
    NameQuery { id, resolver, tcp: false, message: Bytes::copy_from_slice(message) }
}

fn servers() -> [Server; 2] {
    ["127.0.0.53", "::1"].map(|server| Server::parse_node_only(server).unwrap())
}

/// Returns the responses to these queries, with `query_server` as name server.
async fn responses_to<A: Future<Output = std::io::Result<Bytes>> + Send + 'static>(
    queries: Vec<NameQuery>,
    query_server: impl Fn(Server, Bytes) -> A,
) -> (Result<(), Failure>, Vec<NameAnswer>) {
    let (sender, mut receiver) = mpsc::channel(1000);
    let stays_open = futures::stream::iter(queries.into_iter().map(Ok))
        .chain(futures::stream::pending())
        .boxed();
    let mut answers = Vec::new();
    let (resolver, servers) = (Resolver::default(), servers());
    let result = tokio::select! {
        result = resolver
            .respond(stays_open, sender, &servers, query_server, |_, _| pending()) => result,
        () = async {
            // All deadlines have passed by then, so no response follows.
            while let Ok(Some(answer)) = timeout(QUERY_TIMEOUT * 2, receiver.recv()).await {
                answers.push(answer);
            }
        } => Ok(()),
    };
    answers.sort_by_key(|answer| answer.id);
    (result, answers)
}

#[tokio::test(start_paused = true)]
async fn failed_queries_get_a_failure_response() {
    let queries = vec![
        query(1, 0, &[7; DNS_HEADER_BYTES]),
        query(2, 1, &[7; DNS_HEADER_BYTES]),
        query(3, 1, &[8; DNS_HEADER_BYTES]),
    ];
    let query_server = |server: Server, message: Bytes| async move {
        match (server.to_string().as_str(), message[0]) {
            ("127.0.0.53", _) => Ok(Bytes::from_static(b"fine")),
            ("::1", 7) => Err(std::io::ErrorKind::ConnectionRefused.into()),
            _ => std::future::pending().await,
        }
    };
    let (result, answers) = responses_to(queries, query_server).await;
    result.unwrap();
    let said: Vec<_> = answers.iter().map(|answer| (answer.id, answer.message.clone())).collect();
    assert_eq!(
        said,
        [
            (1, Bytes::from_static(b"fine")),
            (2, message::failed(&[7; DNS_HEADER_BYTES])),
            (3, Bytes::new())
        ]
    );
}

/// Verifies N9.
#[tokio::test]
async fn unknown_name_server_or_message_size_is_refused() {
    let never = |_, _| async { unreachable!("no query is sent") };
    let large = vec![0; MAX_UDP_MESSAGE_BYTES + 1];
    for (bad, word) in [
        (query(1, 2, &[0; DNS_HEADER_BYTES]), "2"),
        (query(1, u32::MAX, &[0; DNS_HEADER_BYTES]), "has 2"),
        (query(1, 0, b"short"), "5 bytes"),
        (query(1, 0, &large), "4097 bytes"),
    ] {
        let (result, answers) = responses_to(vec![bad], never).await;
        let failure = result.unwrap_err();
        assert!(
            failure.code() == Code::InvalidArgument && failure.message().contains(word),
            "{failure:?}"
        );
        assert_eq!(answers, []);
    }
}

/// Verifies N9.
#[tokio::test(start_paused = true)]
async fn queries_of_a_cell_are_limited() {
    static NOW: AtomicUsize = AtomicUsize::new(0);
    static PEAK: AtomicUsize = AtomicUsize::new(0);
    let queries =
        (0..2 * MAX_CELL_QUERIES as u64).map(|id| query(id, 0, &[0; DNS_HEADER_BYTES])).collect();
    let query_server = |_, message| async move {
        PEAK.fetch_max(NOW.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
        sleep(Duration::from_secs(1)).await;
        NOW.fetch_sub(1, Ordering::SeqCst);
        Ok(message)
    };
    let (result, answers) = responses_to(queries, query_server).await;
    result.unwrap();
    assert_eq!(
        (answers.len(), PEAK.load(Ordering::SeqCst)),
        (2 * MAX_CELL_QUERIES, MAX_CELL_QUERIES)
    );
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
async fn response_is_matched_by_id() {
    let server = udp(|query| {
        let mut other = message::failed(query).to_vec();
        other[0] ^= 1;
        vec![b"x".to_vec(), query.to_vec(), other, message::failed(query).to_vec()]
    });
    let query = [9; DNS_HEADER_BYTES];
    assert_eq!(udp::query_socket(server.await, &query).await.unwrap(), message::failed(&query));
}

#[tokio::test]
async fn oversized_response_is_truncated() {
    let server = udp(|query| vec![[&message::failed(query)[..], &[0; 5000]].concat()]);
    let query = [9; DNS_HEADER_BYTES];
    assert_eq!(udp::query_socket(server.await, &query).await.unwrap(), message::truncated(&query));
}

/// Connections of a cell that never end are limited.
///
/// Verifies N12.
#[tokio::test(start_paused = true)]
async fn connections_of_a_cell_are_limited() {
    static SPLICED: AtomicUsize = AtomicUsize::new(0);
    let connection = |id| NameQuery { id, resolver: 1, tcp: true, message: Bytes::new() };
    let queries =
        futures::stream::iter((0..MAX_TCP_CONNECTIONS as u64 + 2).map(|id| Ok(connection(id))))
            .chain(futures::stream::pending())
            .boxed();
    let (sender, mut refused) = mpsc::channel(1000);
    let (resolver, servers) = (Resolver::default(), servers());
    let query_server = |_, _| async { unreachable!("no UDP query is sent") };
    let splice_connection = |server: Server, _| async move {
        assert_eq!(server.to_string(), "::1");
        SPLICED.fetch_add(1, Ordering::SeqCst);
        std::future::pending().await
    };
    tokio::select! {
        ended = resolver.respond(queries, sender, &servers, query_server, splice_connection) => {
            panic!("{ended:?}")
        }
        () = async {
            for id in [0, 1] {
                let answer = refused.recv().await.unwrap();
                let id = MAX_TCP_CONNECTIONS as u64 + id;
                assert_eq!(answer, NameAnswer { id, ..NameAnswer::default() });
            }
            // Accepted connections begin in their own tasks, in any order with the refusals.
            while SPLICED.load(Ordering::SeqCst) < MAX_TCP_CONNECTIONS {
                tokio::task::yield_now().await;
            }
        } => {}
    }
    assert_eq!(SPLICED.load(Ordering::SeqCst), MAX_TCP_CONNECTIONS);
}

/// Verifies N9.
#[tokio::test(start_paused = true)]
async fn refused_connections_of_a_cell_wait_until_it_takes_the_answers() {
    static READ: AtomicUsize = AtomicUsize::new(0);
    let queries = futures::stream::iter((0..1000).map(|id| {
        READ.fetch_add(1, Ordering::SeqCst);
        Ok(NameQuery { id, resolver: 1, tcp: true, message: Bytes::new() })
    }));
    let queries = queries.chain(futures::stream::pending()).boxed();
    let (sender, _untaken) = mpsc::channel(1);
    let (resolver, servers) = (Resolver::default(), servers());
    let query_server = |_, _| async { unreachable!("no UDP query is sent") };
    let splice_connection = |_, _| std::future::pending();
    let response = resolver.respond(queries, sender, &servers, query_server, splice_connection);
    tokio::time::timeout(Duration::from_secs(60), response).await.unwrap_err();
    // The accepted connections, a refusal in the channel, and a refusal that waits.
    assert_eq!(READ.load(Ordering::SeqCst), MAX_TCP_CONNECTIONS + 2);
}

/// Starts a connection to a fake server, and returns the ends of its tunnel.
async fn spliced(
    serve: impl AsyncFnOnce(TcpStream),
    pod: impl AsyncFnOnce(mpsc::Sender<Result<TunnelPart, Failure>>, mpsc::Receiver<TunnelPart>),
) -> std::io::Result<()> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let connection = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let (up, of_server) = mpsc::channel(4);
    let (of_pod, down) = mpsc::channel(4);
    let served = async { serve(listener.accept().await.unwrap().0).await };
    let (result, (), ()) = tokio::join!(
        connection::splice(connection, up, ReceiverStream::new(down)),
        served,
        pod(of_pod, of_server)
    );
    result
}

/// Verifies N12.
#[tokio::test]
async fn connection_is_copied_until_both_sides_have_ended() {
    let serve = async |mut stream: TcpStream| {
        let mut received = Vec::new();
        stream.read_to_end(&mut received).await.unwrap();
        assert_eq!(received, b"several queries at once");
        stream.write_all(&vec![7; 1 << 20]).await.unwrap();
    };
    let pod = async |up: mpsc::Sender<_>, mut down: mpsc::Receiver<TunnelPart>| {
        for (content, end) in [("several ", false), ("queries at once", false), ("", true)] {
            up.send(Ok(TunnelPart { content: content.into(), end, ..Default::default() }))
                .await
                .unwrap();
        }
        let mut answered = 0;
        while let Some(part) = down.recv().await {
            answered += part.content.len();
        }
        assert_eq!(answered, 1 << 20);
    };
    spliced(serve, pod).await.unwrap();
}

/// Verifies N12.
#[tokio::test(start_paused = true)]
async fn idle_connection_is_closed() {
    let begun = tokio::time::Instant::now();
    let serve =
        async |mut stream: TcpStream| assert_eq!(stream.read(&mut [0; 8]).await.unwrap(), 0);
    let pod = async |_up: mpsc::Sender<_>, mut down: mpsc::Receiver<TunnelPart>| {
        assert_eq!(down.recv().await, None)
    };
    spliced(serve, pod).await.unwrap();
    assert!(begun.elapsed() >= kiyot_link::resolver::TCP_IDLE_TIMEOUT, "by the clock of this test");
}

/// Verifies N12.
#[tokio::test]
async fn lost_link_ends_its_connections() {
    let serve =
        async |mut stream: TcpStream| assert_eq!(stream.read(&mut [0; 8]).await.unwrap(), 0);
    let pod = async |up: mpsc::Sender<_>, _down| drop(up);
    assert_eq!(spliced(serve, pod).await.unwrap_err().kind(), std::io::ErrorKind::UnexpectedEof);
}
