use futures::StreamExt;
use kiyot_proto::cell::{NameAnswer, NameQuery, TunnelPart};
use kiyot_testkit::wait_for;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};
use tokio_stream::wrappers::ReceiverStream;

use super::*;
use crate::agent::tunnel;

/// Returns a resolver with a name server on the loopback, and the addresses of its sockets.
async fn resolver() -> (Arc<Resolver>, std::net::SocketAddr, std::net::SocketAddr) {
    let resolver = Arc::new(Resolver::new(true));
    let udp = Arc::new(UdpSocket::bind("127.0.0.1:0").await.unwrap());
    let tcp = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (at_udp, at_tcp) = (udp.local_addr().unwrap(), tcp.local_addr().unwrap());
    let sender = resolver.sender.clone();
    let tasks =
        [tokio::spawn(serve_udp(udp, 0, sender.clone())), tokio::spawn(serve_tcp(tcp, 0, sender))];
    *resolver.listeners() = Listeners {
        servers: 1,
        tasks: tasks.into_iter().map(AbortOnDropHandle::new).collect(),
        supervisor: None,
    };
    (resolver, at_udp, at_tcp)
}

type Call = (
    mpsc::Sender<Result<NameAnswer, Status>>,
    futures::stream::BoxStream<'static, Result<NameQuery, Status>>,
);

async fn call(resolver: &Arc<Resolver>) -> Call {
    let (sender, answers) = mpsc::channel(16);
    sender.send(Ok(NameAnswer { resolvers: 1, ..Default::default() })).await.unwrap();
    let queries = Arc::clone(resolver).resolve(ReceiverStream::new(answers)).await.unwrap();
    (sender, queries)
}

async fn answer((sender, queries): &mut Call, message: &'static [u8]) -> NameQuery {
    let query = queries.next().await.unwrap().unwrap();
    sender
        .send(Ok(NameAnswer { id: query.id, message: message.into(), resolvers: 0 }))
        .await
        .unwrap();
    query
}

#[tokio::test]
async fn datagram_is_forwarded_and_answered() {
    let (resolver, udp, _) = resolver().await;
    let client = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    // Too short and too long messages are dropped.
    client.send_to(b"short", udp).await.unwrap();
    client.send_to(&[0; MAX_UDP_MESSAGE_BYTES + 1], udp).await.unwrap();
    // A query before the daemon's call is buffered.
    client.send_to(b"twelve bytes", udp).await.unwrap();
    let mut call = call(&resolver).await;
    let query = answer(&mut call, b"answered").await;
    assert_eq!((&*query.message, query.tcp, query.resolver), (&b"twelve bytes"[..], false, 0));
    let mut buffer = [0; 64];
    let (length, from) = client.recv_from(&mut buffer).await.unwrap();
    assert_eq!((&buffer[..length], from), (&b"answered"[..], udp));
}

/// Verifies N12.
#[tokio::test]
async fn connection_waits_until_claimed() {
    let (resolver, _, tcp) = resolver().await;
    let mut call = call(&resolver).await;
    let mut client = TcpStream::connect(tcp).await.unwrap();
    let query = call.1.next().await.unwrap().unwrap();
    assert!(query.tcp && query.message.is_empty() && query.resolver == 0);
    let (mut taken, _permit, _) = resolver.take_connection(query.id).unwrap();
    assert!(resolver.take_connection(query.id).is_none(), "once");
    client.write_all(b"query").await.unwrap();
    let mut query = [0; 5];
    taken.read_exact(&mut query).await.unwrap();
    assert_eq!(&query, b"query");
    // The daemon refuses this connection, which closes it.
    let mut other = TcpStream::connect(tcp).await.unwrap();
    answer(&mut call, b"").await;
    assert_eq!(other.read(&mut [0; 8]).await.unwrap(), 0);
    assert_eq!(
        resolver.sender.tcp_permits.available_permits(),
        MAX_TCP_CONNECTIONS - 2,
        "the claimed connection, and the permit of the next accept"
    );
}

/// Verifies N12.
#[tokio::test(start_paused = true)]
async fn unclaimed_connection_is_closed() {
    let (resolver, _, tcp) = resolver().await;
    let mut client = TcpStream::connect(tcp).await.unwrap();
    assert_eq!(client.read(&mut [0; 8]).await.unwrap(), 0);
    assert!(resolver.sender.unclaimed().is_empty());
}

/// Verifies N13.
#[tokio::test]
async fn unclaimed_connection_of_replaced_listeners_is_closed() {
    let (resolver, _, tcp) = resolver().await;
    let mut client = TcpStream::connect(tcp).await.unwrap();
    wait_for("the connection is unclaimed", || resolver.sender.unclaimed().len() == 1).await;
    // As when the link is created again.
    resolver.listeners().tasks.clear();
    wait_for("its permit is back", || {
        resolver.sender.tcp_permits.available_permits() == MAX_TCP_CONNECTIONS
    })
    .await;
    assert_eq!(client.read(&mut [0; 8]).await.unwrap(), 0);
}

/// Verifies N13.
#[tokio::test]
async fn connection_to_a_name_server_ends_with_its_listener() {
    let (resolver, _, tcp) = resolver().await;
    let mut call = call(&resolver).await;
    let mut client = TcpStream::connect(tcp).await.unwrap();
    let query = call.1.next().await.unwrap().unwrap();
    let claimed = resolver.take_connection(query.id).unwrap();
    let relayed = tunnel::relay(claimed, TunnelPart::default(), futures::stream::pending());
    let carried = tokio::spawn(relayed.for_each(async |_| {}));
    // As when the link is created again.
    resolver.listeners().tasks.clear();
    wait_for("its permit is back", || {
        resolver.sender.tcp_permits.available_permits() == MAX_TCP_CONNECTIONS
    })
    .await;
    carried.await.unwrap();
    assert_eq!(client.read(&mut [0; 8]).await.unwrap(), 0);
}

#[tokio::test]
async fn new_resolve_call_replaces_the_previous_call() {
    let (resolver, udp, _) = resolver().await;
    let mut first = call(&resolver).await;
    let client = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let mut second = call(&resolver).await;
    while first.1.next().await.is_some() {}
    client.send_to(b"twelve bytes", udp).await.unwrap();
    answer(&mut second, b"answered").await;
    assert_eq!(client.recv_from(&mut [0; 64]).await.unwrap().0, 8);
}

#[tokio::test]
async fn answer_with_unknown_id_is_dropped() {
    let (resolver, udp, _) = resolver().await;
    let mut call = call(&resolver).await;
    let client = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    client.send_to(b"twelve bytes", udp).await.unwrap();
    let query = call.1.next().await.unwrap().unwrap();
    for (id, message) in
        [(query.id + 1, "unasked"), (query.id, "answered"), (query.id, "answered again")]
    {
        call.0.send(Ok(NameAnswer { id, message: message.into(), resolvers: 0 })).await.unwrap();
    }
    client.send_to(b"another query", udp).await.unwrap();
    answer(&mut call, b"second").await;
    let mut answers = Vec::new();
    let mut buffer = [0; 64];
    for _ in 0..2 {
        let length = client.recv(&mut buffer).await.unwrap();
        answers.push(String::from_utf8_lossy(&buffer[..length]).into_owned());
    }
    assert_eq!(answers, ["answered", "second"]);
}

#[tokio::test]
async fn invalid_listener_request_is_refused() {
    let resolver = Arc::new(Resolver::new(false));
    assert_eq!(resolver.ensure(1).unwrap_err().code(), tonic::Code::FailedPrecondition);
    assert!(resolver.ensure(0).is_ok());
    let status = Arc::new(Resolver::new(true)).ensure(9).unwrap_err();
    assert!(
        status.code() == tonic::Code::InvalidArgument && status.message().contains("at most 8"),
        "{status:?}"
    );
}
