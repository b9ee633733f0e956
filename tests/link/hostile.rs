//! Hostile peers at the gateway's address, and hostile agents.

use std::{
    os::unix::fs::PermissionsExt,
    path::Path,
    process::Stdio,
    time::{Duration, Instant},
};

use kiyot::backends::milpa::gateway::Limits;
use kiyot_link::{
    alpn,
    bootstrap::{Bootstrap, GatewayAddress},
    channel::Channel,
    connection::Connection,
    http2::Profile,
    log_limit::{MAX_LINES, PERIOD},
    stream::Stream,
    tls,
};
use kiyot_proto::cell::{
    ConnectionKind, EnrolRequest, HelloReply, HelloRequest, agent_client::AgentClient,
    enrolment_client::EnrolmentClient,
};
use kiyot_testkit::log::CapturedLog;
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::UnixStream,
    process::Command,
    task::JoinSet,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::Code;

use crate::{
    calls::echo,
    kit::{FakeAgent, Fixture, LIMIT, ManualAgent, assert_refused, dial, limits, timed, within},
};

/// Verifies L2.
#[tokio::test]
async fn cell_protocol_without_a_certificate_is_refused() {
    let fixture = Fixture::start().await;
    let bootstrap = fixture.bootstrap();
    let mut tls = tls::enrol_client(&bootstrap.ca_sha256).unwrap();
    tls.alpn_protocols = vec![alpn::CELL.to_vec()];
    assert_refused(&bootstrap, tls.clone()).await;
    // If a client offers both protocols, the gateway selects the stricter one.
    tls.alpn_protocols = vec![alpn::ENROL.to_vec(), alpn::CELL.to_vec()];
    assert_refused(&bootstrap, tls).await;
}

#[tokio::test]
async fn unknown_or_missing_alpn_is_refused() {
    let fixture = Fixture::start().await;
    let bootstrap = fixture.bootstrap();
    let mut tls = tls::enrol_client(&bootstrap.ca_sha256).unwrap();
    for protocols in [vec![b"h2".to_vec()], vec![]] {
        tls.alpn_protocols = protocols;
        let refused = within("the handshake", dial(&bootstrap, tls.clone())).await;
        assert!(refused.is_err());
    }
}

#[tokio::test]
async fn enrolment_connection_offers_only_enrolment() {
    let fixture = Fixture::start().await;
    let bootstrap = fixture.bootstrap();
    let stream = dial(&bootstrap, tls::enrol_client(&bootstrap.ca_sha256).unwrap()).await.unwrap();
    let (end, tasks) = (CancellationToken::new(), TaskTracker::new());
    let connection = Connection::open(stream, Profile::ENROL, &end, &tasks).await.unwrap();
    let mut client = AgentClient::new(Channel::over(connection));
    assert_eq!(
        client.hello(timed(HelloRequest::default(), LIMIT)).await.unwrap_err().code(),
        Code::Unimplemented
    );
}

/// Verifies Y91.
#[tokio::test]
async fn silent_or_malformed_connection_is_closed() {
    assert_eq!(Limits::default().handshake, Duration::from_secs(5));
    let fixture =
        Fixture::with_limits(Limits { handshake: Duration::from_millis(100), ..limits() }).await;
    let mut received = Vec::new();
    let mut silent = Stream::dial(fixture.gateway.address()).await.unwrap();
    within("the end of a silent connection", silent.read_to_end(&mut received)).await.unwrap();
    assert!(received.is_empty());
    let mut slow = Stream::dial(fixture.gateway.address()).await.unwrap();
    // The bytes start a TLS record. The gateway may have closed the connection before the write.
    let _ = slow.write_all(&[0x16, 0x03, 0x01]).await;
    let _ = within("the end of a slow connection", slow.read_to_end(&mut received)).await;
    let mut malformed = Stream::dial(fixture.gateway.address()).await.unwrap();
    let _ = malformed.write_all(b"GET / HTTP/1.1\r\n\r\n").await;
    let _ = within("the end of a malformed connection", malformed.read_to_end(&mut received)).await;
}

#[tokio::test]
async fn enrolment_that_does_not_end_is_closed() {
    let fixture =
        Fixture::with_limits(Limits { enrolment: Duration::from_millis(100), ..limits() }).await;
    let bootstrap = fixture.bootstrap();
    let mut stream =
        dial(&bootstrap, tls::enrol_client(&bootstrap.ca_sha256).unwrap()).await.unwrap();
    let mut received = Vec::new();
    let _ = within("the end of the connection", stream.read_to_end(&mut received)).await;
}

#[tokio::test]
async fn connection_above_the_unauthenticated_limit_is_closed() {
    let fixture = Fixture::with_limits(Limits { unauthenticated: 2, ..limits() }).await;
    let GatewayAddress::Unix(path) = fixture.gateway.address() else { panic!("not a unix socket") };
    assert_eq!(std::fs::metadata(path).unwrap().permissions().mode() & 0o777, 0o600);
    let waiting = [
        Stream::dial(fixture.gateway.address()).await.unwrap(),
        Stream::dial(fixture.gateway.address()).await.unwrap(),
    ];
    let mut third = Stream::dial(fixture.gateway.address()).await.unwrap();
    let mut received = Vec::new();
    within("the end of the third connection", third.read_to_end(&mut received)).await.unwrap();
    // The agent retries, and is admitted when the limit allows it.
    let _agent = fixture.agent();
    drop(waiting);
    echo(&fixture.link.bulk, "at last").await;
    within("the end of the gateway", fixture.gateway.shutdown()).await;
}

/// The environment variable with the path of the socket that a child process dials.
const CHILD_SOCKET: &str = "KIYOT_TEST_SOCKET";
/// The line that the child process prints when it holds its connections.
const HOLDING: &str = "holding connections";

/// Verifies L14.
#[tokio::test]
async fn peer_at_its_limit_blocks_no_other_peer() {
    const PER_PEER: usize = 4;
    if let Ok(socket) = std::env::var(CHILD_SOCKET) {
        return hold_connections(Path::new(&socket), PER_PEER).await;
    }
    let fixture = Fixture::with_limits(Limits {
        unauthenticated: 2 * PER_PEER,
        unauthenticated_per_peer: PER_PEER,
        ..limits()
    })
    .await;
    let GatewayAddress::Unix(path) = fixture.gateway.address() else { panic!("not a unix socket") };
    let mut other = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "hostile::peer_at_its_limit_blocks_no_other_peer", "--nocapture"])
        .env(CHILD_SOCKET, path)
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut output = BufReader::new(other.stdout.take().unwrap()).lines();
    within("the other process holds as many connections as allowed", async {
        while !output.next_line().await.unwrap().unwrap().contains(HOLDING) {}
    })
    .await;
    let _agent = fixture.agent();
    echo(&fixture.link.bulk, "admitted").await;
    assert!(other.try_wait().unwrap().is_none(), "the other process still holds its connections");
}

/// Verifies L17.
#[tokio::test]
async fn peer_that_keeps_dialling_writes_a_bounded_number_of_log_lines() {
    const PER_PEER: usize = 4;
    let defaults = Limits::default();
    assert_eq!((defaults.unauthenticated, defaults.unauthenticated_per_peer), (512, 16));
    let (log, began) = (CapturedLog::start(), Instant::now());
    let fixture =
        Fixture::with_limits(Limits { unauthenticated_per_peer: PER_PEER, ..limits() }).await;
    let GatewayAddress::Unix(path) = fixture.gateway.address() else { panic!("not a unix socket") };
    let mut held = JoinSet::new();
    for _ in 0..200 {
        let mut stream = UnixStream::connect(path).await.unwrap();
        held.spawn(async move { stream.read_to_end(&mut Vec::new()).await.map(drop) });
    }
    while held.len() > PER_PEER {
        within("the end of a connection above the limit", held.join_next()).await;
    }
    let mut lines = log.lines();
    lines.retain(|line| line.contains("connection limit reached"));
    let periods = 1 + began.elapsed().as_secs() / PERIOD.as_secs();
    let allowed = u64::from(MAX_LINES) * periods;
    assert!((1..=allowed).contains(&(lines.len() as u64)), "{allowed} allowed: {lines:#?}");
}

/// Dials until the gateway has closed all connections but `limit`, and holds these until the test
/// ends.
async fn hold_connections(socket: &Path, limit: usize) {
    let mut ends = JoinSet::new();
    for _ in 0..limit * 5 {
        let mut stream = UnixStream::connect(socket).await.unwrap();
        ends.spawn(async move { stream.read_to_end(&mut Vec::new()).await.map(drop) });
    }
    while ends.len() > limit {
        within("the end of a connection above the limit", ends.join_next()).await;
    }
    println!("{HOLDING}");
    within("the end of the test", std::future::pending()).await
}

/// Verifies L10, Y74.
#[tokio::test]
async fn malformed_message_closes_the_connection_and_the_cell_may_reconnect() {
    let fixture = Fixture::start().await;
    let (bootstrap, key) = (fixture.bootstrap(), ManualAgent::new());
    let identity = key.enrol(&bootstrap).await.unwrap();
    // Sends no message, a message above the limit, and a malformed message.
    for sent in [&b""[..], &[0xff; 64][..], &[0, 0, 0, 2, 0xff, 0xff][..]] {
        let mut stream =
            dial(&bootstrap, tls::cell_client(&bootstrap.ca_sha256, identity.clone()).unwrap())
                .await
                .unwrap();
        stream.write_all(sent).await.unwrap();
        stream.shutdown().await.unwrap();
        let mut received = Vec::new();
        let _ = within("the end of the connection", stream.read_to_end(&mut received)).await;
    }
    assert!(fixture.admission.linked_events().is_empty());
    // The length is too large for Hello, although later messages may be as long. The gateway closes
    // the connection without waiting for the content.
    let mut stream =
        dial(&bootstrap, tls::cell_client(&bootstrap.ca_sha256, identity.clone()).unwrap())
            .await
            .unwrap();
    stream.write_all(&(1_u32 << 20).to_be_bytes()).await.unwrap();
    let mut received = Vec::new();
    let _ = within("the end of the connection", stream.read_to_end(&mut received)).await;
    let hello = HelloReply {
        cell: fixture.cell.to_string(),
        kind: ConnectionKind::Control.into(),
        generation: 1,
        ..HelloReply::default()
    };
    let _fake = FakeAgent::connect(&bootstrap, &identity, hello).await;
    fixture.wait_linked().await;
}

/// The maximal number of enrolments on a connection.
const MAX_ENROLMENTS: usize = 16;

async fn enrolment_connection(bootstrap: &Bootstrap) -> Connection {
    let stream = dial(bootstrap, tls::enrol_client(&bootstrap.ca_sha256).unwrap()).await.unwrap();
    let (end, tasks) = (CancellationToken::new(), TaskTracker::new());
    Connection::open(stream, Profile::ENROL, &end, &tasks).await.unwrap()
}

async fn enrolment_client(bootstrap: &Bootstrap) -> EnrolmentClient<Channel> {
    EnrolmentClient::new(Channel::over(enrolment_connection(bootstrap).await))
}

/// Verifies L20.
#[tokio::test]
async fn connection_with_many_enrolments_is_closed() {
    let fixture = Fixture::start().await;
    let (bootstrap, key) = (fixture.bootstrap(), ManualAgent::new());
    let connection = enrolment_connection(&bootstrap).await;
    let mut client = EnrolmentClient::new(Channel::over(connection.clone()));
    let mut enrol = async || {
        let request = EnrolRequest {
            cell: fixture.cell.to_string(),
            token: "guess".to_owned(),
            csr_der: key.request().into(),
            build_id: String::new(),
        };
        client.enrol(timed(request, LIMIT)).await.unwrap_err().code()
    };
    for _ in 0..MAX_ENROLMENTS {
        assert_eq!(enrol().await, Code::PermissionDenied);
    }
    // The client may see the end of the connection before the response.
    assert!(matches!(enrol().await, Code::ResourceExhausted | Code::Unavailable));
    within("the end of the connection", connection.ended()).await;
    key.enrol(&bootstrap).await.unwrap();
}

/// Verifies L17.
#[tokio::test]
async fn refused_attempts_write_a_bounded_number_of_log_lines() {
    const ENROLMENTS: usize = 1_000;
    const CONNECTIONS: usize = 100;
    // Kinds: enrolments, reused tokens, certificates, connections, and the connection limit.
    const KINDS: usize = 5;
    let (log, began) = (CapturedLog::start(), Instant::now());
    let fixture = Fixture::with_limits(Limits {
        unauthenticated: 8,
        unauthenticated_per_peer: 8,
        ..limits()
    })
    .await;
    let (bootstrap, own, other) = (fixture.bootstrap(), ManualAgent::new(), ManualAgent::new());
    let identity = own.enrol(&bootstrap).await.unwrap();
    // Enrolments of unknown cells, with wrong tokens, and with a token that another key has spent.
    let mut client = enrolment_client(&bootstrap).await;
    for n in 0..ENROLMENTS {
        if n % MAX_ENROLMENTS == 0 {
            client = enrolment_client(&bootstrap).await;
        }
        let (cell, token) = match n % 3 {
            0 => (format!("cell-{n}-{}", "x".repeat(4_000)), "token".to_owned()),
            1 => (fixture.cell.to_string(), format!("token-{n}")),
            _ => (fixture.cell.to_string(), bootstrap.token.clone()),
        };
        let request =
            EnrolRequest { cell, token, csr_der: other.request().into(), build_id: String::new() };
        let refused = client.enrol(timed(request, LIMIT)).await.unwrap_err();
        assert_eq!(refused.code(), Code::PermissionDenied);
    }
    // Connections whose Hello names another cell than the certificate does, and renewals.
    for generation in 0..CONNECTIONS {
        let hello = HelloReply {
            cell: format!("cell-{generation}"),
            kind: ConnectionKind::Control.into(),
            ..HelloReply::default()
        };
        FakeAgent::connect(&bootstrap, &identity, hello).await.ended().await;
        own.enrol(&bootstrap).await.unwrap();
    }
    // Connections without TLS, and more connections than the limit allows.
    let mut stuck = Vec::new();
    for _ in 0..CONNECTIONS {
        let mut malformed = Stream::dial(fixture.gateway.address()).await.unwrap();
        let _ = malformed.write_all(b"GET / HTTP/1.1\r\n\r\n").await;
        let _ = within("the end of a malformed connection", malformed.read_to_end(&mut Vec::new()))
            .await;
        stuck.push(Stream::dial(fixture.gateway.address()).await.unwrap());
    }
    drop(stuck);
    let lines = log.lines();
    // The bound does not depend on the duration of the test.
    let periods = began.elapsed().as_secs().div_ceil(PERIOD.as_secs()) as usize + 1;
    let of_a_kind = MAX_LINES as usize * periods;
    assert!(lines.len() <= 1 + KINDS * of_a_kind, "{} lines: {lines:#?}", lines.len());
    let of = |kind: &str| lines.iter().filter(|line| line.contains(kind)).count();
    for kind in [
        "enrolment refused",
        "spent token presented with a second key",
        "connection with a certificate not admitted",
    ] {
        assert!((1..=of_a_kind).contains(&of(kind)), "{kind}: {lines:#?}");
    }
    assert!(lines.iter().all(|line| line.len() < 600), "{lines:#?}");
}
