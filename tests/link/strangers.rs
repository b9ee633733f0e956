//! Strangers at the TCP port: each is limited, and can't keep a cell from connecting.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use kiyot::backends::milpa::gateway::{Gateway, GatewayConfig, Limits, ca::Ca};
use kiyot_engine::id::CellId;
use kiyot_link::{
    alpn,
    bootstrap::{Bootstrap, GatewayAddress},
    clock::Clock,
    stream::Stream,
    tls,
};
use kiyot_testkit::wait_until;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpSocket, TcpStream},
    task::JoinSet,
    time::sleep,
};
use tokio_rustls::TlsConnector;

use crate::{
    calls::echo,
    kit::{Endpoints, Fixture, LIMIT, RunningAgent, TOKEN, TestAdmission, limits, within},
};

/// The address of a stranger. Cells dial from 127.0.0.1.
const STRANGER: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);
/// The timeout of a handshake, in tests that wait for the timeout.
const HANDSHAKE: Duration = Duration::from_millis(500);

fn address(fixture: &Fixture) -> SocketAddr {
    fixture.gateway.tcp_address().unwrap()
}

async fn dial_from(from: impl Into<IpAddr>, to: SocketAddr) -> std::io::Result<TcpStream> {
    let socket = TcpSocket::new_v4()?;
    socket.bind(SocketAddr::new(from.into(), 0))?;
    socket.connect(to).await
}

/// Reads until the gateway has closed a connection, possibly by a reset.
async fn closed(stream: &mut TcpStream) -> Vec<u8> {
    let mut received = Vec::new();
    let _reset = within("the end of the connection", stream.read_to_end(&mut received)).await;
    received
}

fn config(endpoints: Endpoints) -> GatewayConfig {
    GatewayConfig {
        socket: endpoints.socket,
        tcp: endpoints.tcp,
        agent: None,
        ca: Ca::new().unwrap(),
        build_id: "daemon".to_owned(),
        orphan_timeout: Duration::from_secs(900),
        clock: Clock::default(),
        limits: limits(),
    }
}

/// Verifies L18.
#[tokio::test]
async fn socket_and_port_serve_cells_at_the_same_time() {
    let fixture = Fixture::over_tcp(limits()).await;
    let _remote = fixture.agent();
    echo(&fixture.link.bulk, "over TCP").await;
    let cell = CellId::mint().unwrap();
    fixture.admission.expect(&cell, TOKEN);
    let link = fixture.gateway.link(&cell);
    let socket = fixture.dir.path().join("gateway.sock");
    let bootstrap =
        Bootstrap { gateway: GatewayAddress::Unix(socket), ..fixture.bootstrap_of(&cell) };
    let local = RunningAgent::start(bootstrap, fixture.dir.path().join("local"));
    echo(&link.bulk, "over the socket").await;
    drop(local);
}

/// Verifies L18.
#[tokio::test]
async fn boot_data_has_the_address_that_the_provider_needs() {
    let dir = tempfile::tempdir().unwrap();
    let mut endpoints = Endpoints::tcp(&dir);
    endpoints.tcp.as_mut().unwrap().advertise = Some("192.0.2.1:443".parse().unwrap());
    let cell = CellId::mint().unwrap();
    let admission = Arc::<TestAdmission>::default();
    let gateway = Gateway::start(config(endpoints.clone()), admission).await.unwrap();
    for (is_remote, expected) in [
        (true, GatewayAddress::Tcp("192.0.2.1:443".parse().unwrap())),
        (false, GatewayAddress::Unix(endpoints.socket.clone())),
    ] {
        assert_eq!(gateway.bootstrap(&cell, "token", is_remote).gateway, expected);
    }
    gateway.shutdown().await;
}

/// Verifies C11, X50.
#[tokio::test]
async fn port_in_use_delays_no_start_and_is_bound_once_free() {
    let dir = tempfile::tempdir().unwrap();
    let taken = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let listen = taken.local_addr().unwrap();
    let mut endpoints = Endpoints::tcp(&dir);
    endpoints.tcp.as_mut().unwrap().listen = listen;
    let admission = Arc::<TestAdmission>::default();
    let gateway = Gateway::start(config(endpoints.clone()), admission).await.unwrap();
    assert_eq!(gateway.tcp_address(), Some(listen));
    Stream::dial(&GatewayAddress::Unix(endpoints.socket.clone())).await.unwrap();
    drop(taken);
    wait_until("the gateway listens on the port", LIMIT, async || {
        TcpStream::connect(listen).await.ok()
    })
    .await;
    gateway.shutdown().await;
}

/// Verifies C11.
#[tokio::test]
async fn address_of_another_machine_fails_the_start_with_address_and_key() {
    let dir = tempfile::tempdir().unwrap();
    let mut endpoints = Endpoints::tcp(&dir);
    endpoints.tcp.as_mut().unwrap().listen = "192.0.2.1:7700".parse().unwrap();
    let started = Gateway::start(config(endpoints.clone()), Arc::<TestAdmission>::default());
    let error = started.await.unwrap_err();
    assert!(error.to_string().contains("gateway.listen = \"192.0.2.1:7700\""), "{error}");
    assert!(!endpoints.socket.exists(), "the socket is not created");
}

/// Verifies L19.
#[tokio::test]
async fn flood_from_an_address_blocks_no_cell_at_another_address() {
    const PER_PEER: usize = 4;
    let fixture =
        Fixture::over_tcp(Limits { unauthenticated_per_peer: PER_PEER, ..limits() }).await;
    let to = address(&fixture);
    let mut held = JoinSet::new();
    for _ in 0..PER_PEER * 5 {
        let mut stream = dial_from(STRANGER, to).await.unwrap();
        held.spawn(async move { closed(&mut stream).await });
    }
    while held.len() > PER_PEER {
        within("the end of a connection above the limit", held.join_next()).await;
    }
    // The flood continues while the cell enrols.
    let flood = tokio::spawn(async move {
        loop {
            if let Ok(mut stream) = dial_from(STRANGER, to).await {
                let _ = stream.write_all(b"GET / HTTP/1.1\r\n\r\n").await;
                closed(&mut stream).await;
            }
        }
    });
    let _agent = fixture.agent();
    echo(&fixture.link.bulk, "admitted").await;
    assert!(held.try_join_next().is_none(), "the stranger still holds its connections");
    assert!(!flood.is_finished());
    flood.abort();
}

/// Verifies L19.
#[tokio::test]
async fn flood_over_tcp_blocks_no_cell_of_the_node() {
    const UNAUTHENTICATED: usize = 8;
    let fixture = Fixture::over_tcp(Limits { unauthenticated: UNAUTHENTICATED, ..limits() }).await;
    let mut held = JoinSet::new();
    for host in 0..UNAUTHENTICATED as u8 * 2 {
        let from = Ipv4Addr::new(127, 0, 1, host);
        let mut stream = dial_from(from, address(&fixture)).await.unwrap();
        held.spawn(async move { closed(&mut stream).await });
    }
    while held.len() > UNAUTHENTICATED {
        within("the end of a connection above the limit", held.join_next()).await;
    }
    let bootstrap = Bootstrap {
        gateway: GatewayAddress::Unix(fixture.dir.path().join("gateway.sock")),
        ..fixture.bootstrap()
    };
    let _agent = fixture.agent_with(bootstrap);
    echo(&fixture.link.bulk, "admitted").await;
    assert!(held.try_join_next().is_none(), "the strangers still hold their connections");
}

/// Verifies L19.
#[tokio::test]
async fn peer_that_dials_again_and_again_is_slowed_down() {
    const PER_PEER: usize = 2;
    let fixture = Fixture::over_tcp(Limits {
        unauthenticated_per_peer: PER_PEER,
        cooldown: LIMIT,
        ..limits()
    })
    .await;
    // The gateway limits handshakes, because each costs a signature.
    let tls = tls::enrol_client(&fixture.bootstrap().ca_sha256).unwrap();
    let handshake = async || {
        let stream = dial_from(STRANGER, address(&fixture)).await.unwrap();
        let name = alpn::GATEWAY_NAME.try_into().unwrap();
        TlsConnector::from(Arc::new(tls.clone())).connect(name, stream).await
    };
    for _ in 0..PER_PEER {
        within("a handshake", handshake()).await.unwrap();
    }
    assert!(within("the refusal", handshake()).await.is_err());
}

/// Verifies L20.
#[tokio::test]
async fn connection_without_a_client_hello_is_closed() {
    let fixture = Fixture::over_tcp(limits()).await;
    for bytes in [
        &b"GET / HTTP/1.1\r\nHost: gateway\r\n\r\n"[..],
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        &[0; 4096],
        &[0xff; 4096],
        // A record of application data, and a handshake record that is longer than TLS allows.
        &[0x17, 3, 3, 0, 1, 0],
        &[0x16, 3, 1, 0xff, 0xff, 1, 0, 0xff, 0xff],
    ] {
        let mut stream = dial_from(STRANGER, address(&fixture)).await.unwrap();
        let _reset = stream.write_all(bytes).await;
        let received = closed(&mut stream).await;
        assert!(received.len() < 64, "an alert at most: {} bytes", received.len());
    }
}

/// The maximal length of a ClientHello, in bytes.
const MAX_HELLO: usize = 64 << 10;

/// Verifies L20.
#[tokio::test]
async fn client_hello_is_read_up_to_64_kib() {
    const PROTOCOL: usize = 255;
    let fixture = Fixture::over_tcp(limits()).await;
    let (received, _) = fixture.gateway.bytes();
    // The unknown protocols take 62 KiB.
    let mut tls = tls::enrol_client(&fixture.bootstrap().ca_sha256).unwrap();
    let unknown = vec![vec![b'x'; PROTOCOL]; (62 << 10) / (PROTOCOL + 1)];
    tls.alpn_protocols.extend(unknown);
    let stream = dial_from(STRANGER, address(&fixture)).await.unwrap();
    let name = alpn::GATEWAY_NAME.try_into().unwrap();
    let connected = TlsConnector::from(Arc::new(tls)).connect(name, stream);
    within("a handshake", connected).await.unwrap();
    assert!(received.get() > 62 << 10);

    // These ClientHellos are longer, by their length field or by their content, in records of 16
    // KiB or of one byte.
    for (length, in_record) in [
        ((16 << 20) - 1, 1 << 14),
        (MAX_HELLO, 1 << 14),
        (MAX_HELLO - 1, 1 << 14),
        (MAX_HELLO - 1, 1),
    ] {
        let before = received.get();
        let mut stream = dial_from(STRANGER, address(&fixture)).await.unwrap();
        let mut hello = vec![1];
        hello.extend_from_slice(&u32::try_from(length).unwrap().to_be_bytes()[1..]);
        hello.resize(2 * MAX_HELLO, 0);
        let records: Vec<u8> = hello
            .chunks(in_record)
            .flat_map(|part| {
                let [high, low] = u16::try_from(part.len()).unwrap().to_be_bytes();
                [&[0x16, 3, 1, high, low], part].concat()
            })
            .collect();
        let _reset = within("the end of the connection", stream.write_all(&records)).await;
        closed(&mut stream).await;
        let read = usize::try_from(received.get() - before).unwrap();
        let records = MAX_HELLO / in_record + 1;
        assert!(
            read <= MAX_HELLO + records * 5,
            "{read} bytes of a ClientHello of {length} were read, {in_record} in a record"
        );
    }
}

/// Verifies L20.
#[tokio::test]
async fn byte_by_byte_handshake_is_closed() {
    let fixture = Fixture::over_tcp(Limits { handshake: HANDSHAKE, ..limits() }).await;
    let mut stream = dial_from(STRANGER, address(&fixture)).await.unwrap();
    let slow = tokio::spawn(async move {
        let mut byte = [0x16, 3, 1, 0x02, 0].into_iter().chain(std::iter::repeat(1));
        // The write fails when the gateway has closed the connection.
        while stream.write_all(&[byte.next().unwrap()]).await.is_ok() {
            sleep(Duration::from_millis(20)).await;
        }
    });
    within("the end of the connection", slow).await.unwrap();
}

/// Verifies L20.
#[tokio::test]
async fn handshake_without_or_with_an_unknown_alpn_is_refused_over_tcp() {
    let fixture = Fixture::over_tcp(limits()).await;
    let mut tls = tls::enrol_client(&fixture.bootstrap().ca_sha256).unwrap();
    for protocols in [vec![], vec![b"h2".to_vec()], vec![vec![b'x'; 255]; 200]] {
        tls.alpn_protocols = protocols;
        let stream = dial_from(STRANGER, address(&fixture)).await.unwrap();
        let name = alpn::GATEWAY_NAME.try_into().unwrap();
        let connected = TlsConnector::from(Arc::new(tls.clone())).connect(name, stream);
        assert!(within("the handshake", connected).await.is_err());
    }
}

/// Verifies L18.
#[tokio::test]
async fn connection_that_is_reset_delays_no_other() {
    let fixture = Fixture::over_tcp(limits()).await;
    for _ in 0..100 {
        let stream = dial_from(STRANGER, address(&fixture)).await.unwrap();
        // The drop of the stream sends a reset instead of a FIN.
        rustix::net::sockopt::set_socket_linger(&stream, Some(Duration::ZERO)).unwrap();
    }
    let _agent = fixture.agent();
    echo(&fixture.link.bulk, "admitted").await;
}
