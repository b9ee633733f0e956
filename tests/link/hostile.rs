//! What others than agents do at the gateway's port.

use std::{
    io,
    os::unix::fs::PermissionsExt,
    path::Path,
    process::Stdio,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use kiyot::backends::milpa::gateway::Limits;
use kiyot_link::{
    alpn,
    bootstrap::GatewayAddress,
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
use tracing_subscriber::fmt::MakeWriter;

use crate::{
    calls::echo,
    kit::{Fake, Fixture, LIMIT, ManualAgent, dial, is_refused, limits, timed, within},
};

/// Verifies L2.
#[tokio::test]
async fn without_a_certificate_nobody_is_a_cell() {
    let fixture = Fixture::start().await;
    let bootstrap = fixture.bootstrap();
    let mut tls = tls::enrol_client(&bootstrap.ca_sha256).unwrap();
    tls.alpn_protocols = vec![alpn::CELL.to_vec()];
    is_refused(&bootstrap, tls.clone()).await;
    // Strict where both are offered.
    tls.alpn_protocols = vec![alpn::ENROL.to_vec(), alpn::CELL.to_vec()];
    is_refused(&bootstrap, tls).await;
}

#[tokio::test]
async fn another_protocol_or_none_is_refused() {
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
async fn enrolment_offers_nothing_else() {
    let fixture = Fixture::start().await;
    let bootstrap = fixture.bootstrap();
    let stream = dial(&bootstrap, tls::enrol_client(&bootstrap.ca_sha256).unwrap()).await.unwrap();
    let profile = kiyot_link::http2::Profile::ENROL;
    let connection = kiyot_link::connection::Connection::open(
        stream,
        profile,
        &CancellationToken::new(),
        &TaskTracker::new(),
    )
    .await
    .unwrap();
    let mut client = AgentClient::new(kiyot_link::channel::Channel::over(connection));
    assert_eq!(
        client.hello(timed(HelloRequest::default(), LIMIT)).await.unwrap_err().code(),
        Code::Unimplemented
    );
}

/// Verifies Y91.
#[tokio::test]
async fn who_says_nothing_or_nonsense_is_cut() {
    let fixture = Fixture::with(Limits { handshake: Duration::from_millis(100), ..limits() }).await;
    let mut heard = Vec::new();
    let mut silent = Stream::dial(fixture.gateway.address()).await.unwrap();
    within("the end of a silent one", silent.read_to_end(&mut heard)).await.unwrap();
    assert!(heard.is_empty());
    let mut slow = Stream::dial(fixture.gateway.address()).await.unwrap();
    // The begin of a record of TLS.
    // Whether it is cut before or after that.
    let _ = slow.write_all(&[0x16, 0x03, 0x01]).await;
    let _ = within("the end of a slow one", slow.read_to_end(&mut heard)).await;
    let mut nonsense = Stream::dial(fixture.gateway.address()).await.unwrap();
    let _ = nonsense.write_all(b"GET / HTTP/1.1\r\n\r\n").await;
    let _ = within("the end of nonsense", nonsense.read_to_end(&mut heard)).await;
}

#[tokio::test]
async fn an_enrolment_that_does_not_end_is_cut() {
    let fixture = Fixture::with(Limits { enrolment: Duration::from_millis(100), ..limits() }).await;
    let bootstrap = fixture.bootstrap();
    let mut stream =
        dial(&bootstrap, tls::enrol_client(&bootstrap.ca_sha256).unwrap()).await.unwrap();
    let mut heard = Vec::new();
    let _ = within("the end of the connection", stream.read_to_end(&mut heard)).await;
}

#[tokio::test]
async fn as_many_as_may_be_on_their_way_in_and_no_more() {
    let fixture = Fixture::with(Limits { unauthenticated: 2, ..limits() }).await;
    let GatewayAddress::Unix(path) = fixture.gateway.address() else { panic!("a unix socket") };
    assert_eq!(std::fs::metadata(path).unwrap().permissions().mode() & 0o777, 0o600);
    let waiting = [
        Stream::dial(fixture.gateway.address()).await.unwrap(),
        Stream::dial(fixture.gateway.address()).await.unwrap(),
    ];
    let mut third = Stream::dial(fixture.gateway.address()).await.unwrap();
    let mut heard = Vec::new();
    within("the end of the third", third.read_to_end(&mut heard)).await.unwrap();
    // The agent comes again, and is let in when there is room.
    let _agent = fixture.agent();
    drop(waiting);
    echo(&fixture.link.bulk, "at last").await;
    within("the end of the gateway", fixture.gateway.shutdown()).await;
}

/// Says to another process of this program where to dial.
const DIALS: &str = "KIYOT_TEST_DIALS";

/// Verifies L14.
#[tokio::test]
async fn one_peer_keeps_no_other_out() {
    const OF_A_PEER: usize = 4;
    if let Ok(socket) = std::env::var(DIALS) {
        return dial_much(Path::new(&socket), OF_A_PEER).await;
    }
    let fixture = Fixture::with(Limits {
        unauthenticated: 2 * OF_A_PEER,
        unauthenticated_per_peer: OF_A_PEER,
        ..limits()
    })
    .await;
    let GatewayAddress::Unix(path) = fixture.gateway.address() else { panic!("a unix socket") };
    let mut other = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "hostile::one_peer_keeps_no_other_out", "--nocapture"])
        .env(DIALS, path)
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut said = BufReader::new(other.stdout.take().unwrap()).lines();
    within("the other has as many as it may", async {
        while !said.next_line().await.unwrap().unwrap().contains("no more are taken") {}
    })
    .await;
    let _agent = fixture.agent();
    echo(&fixture.link.bulk, "let in").await;
    assert!(other.try_wait().unwrap().is_none(), "it holds them still");
}

/// Verifies L17.
#[tokio::test]
async fn peer_that_dials_without_end_writes_a_bounded_number_of_lines() {
    const OF_A_PEER: usize = 4;
    let usual = Limits::default();
    assert_eq!((usual.unauthenticated, usual.unauthenticated_per_peer), (512, 16));
    let log = Log::default();
    // This runtime has one thread: what the gateway's tasks say is heard here.
    let _heard = tracing::subscriber::set_default(
        tracing_subscriber::fmt()
            .with_max_level(tracing::Level::INFO)
            .with_ansi(false)
            .with_writer(log.clone())
            .finish(),
    );
    let began = Instant::now();
    let fixture = Fixture::with(Limits { unauthenticated_per_peer: OF_A_PEER, ..limits() }).await;
    let GatewayAddress::Unix(path) = fixture.gateway.address() else { panic!("a unix socket") };
    let mut held = JoinSet::new();
    for _ in 0..200 {
        let mut stream = UnixStream::connect(path).await.unwrap();
        held.spawn(async move { stream.read_to_end(&mut Vec::new()).await.map(drop) });
    }
    while held.len() > OF_A_PEER {
        within("the end of one that is too many", held.join_next()).await;
    }
    let lines = log.lines("connection limit reached");
    let periods = 1 + began.elapsed().as_secs() / PERIOD.as_secs();
    let allowed = u64::from(MAX_LINES) * periods;
    assert!((1..=allowed).contains(&(lines.len() as u64)), "{allowed} allowed: {lines:#?}");
}

/// Captured log output.
#[derive(Debug, Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    fn lines(&self, word: &str) -> Vec<String> {
        let text = String::from_utf8(self.0.lock().unwrap().clone()).unwrap();
        text.lines().filter(|line| line.contains(word)).map(str::to_owned).collect()
    }
}

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        io::Write::write(&mut *self.0.lock().unwrap(), bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl MakeWriter<'_> for Log {
    type Writer = Self;

    fn make_writer(&self) -> Self {
        self.clone()
    }
}

/// Dials until no more than so many connections are left, and holds those for ever.
async fn dial_much(socket: &Path, most: usize) {
    let mut ends = JoinSet::new();
    for _ in 0..most * 5 {
        let mut stream = UnixStream::connect(socket).await.unwrap();
        ends.spawn(async move { stream.read_to_end(&mut Vec::new()).await.map(drop) });
    }
    while ends.len() > most {
        within("the end of one that is too many", ends.join_next()).await;
    }
    println!("no more are taken");
    within("the end of the test", std::future::pending()).await
}

/// Verifies L10, Y74.
#[tokio::test]
async fn a_cell_that_says_nonsense_is_cut_and_another_connection_of_it_is_let_in() {
    let fixture = Fixture::start().await;
    let (bootstrap, key) = (fixture.bootstrap(), ManualAgent::new());
    let identity = key.enrol(&bootstrap).await.unwrap();
    // No message at all, one that is longer than any, and one that is none.
    for said in [&b""[..], &[0xff; 64][..], &[0, 0, 0, 2, 0xff, 0xff][..]] {
        let mut stream =
            dial(&bootstrap, tls::cell_client(&bootstrap.ca_sha256, identity.clone()).unwrap())
                .await
                .unwrap();
        stream.write_all(said).await.unwrap();
        stream.shutdown().await.unwrap();
        let mut heard = Vec::new();
        let _ = within("the end of the connection", stream.read_to_end(&mut heard)).await;
    }
    assert!(fixture.admission.news().is_empty());
    // The begin of one that is longer than a word about oneself, and may come later: nothing of it
    // is waited for.
    let mut stream =
        dial(&bootstrap, tls::cell_client(&bootstrap.ca_sha256, identity.clone()).unwrap())
            .await
            .unwrap();
    stream.write_all(&(1_u32 << 20).to_be_bytes()).await.unwrap();
    let mut heard = Vec::new();
    let _ = within("the end of the connection", stream.read_to_end(&mut heard)).await;
    let hello = HelloReply {
        cell: fixture.cell.to_string(),
        kind: ConnectionKind::Control.into(),
        generation: 1,
        ..HelloReply::default()
    };
    let _fake = Fake::connect(&bootstrap, &identity, hello).await;
    fixture.linked().await;
}

/// Verifies L17.
#[tokio::test]
async fn refused_attempts_write_a_bounded_number_of_log_lines() {
    const ENROLMENTS: usize = 1_000;
    const CONNECTIONS: usize = 100;
    // Of enrolments, forgeries, certificates, connections and those that are too many.
    const KINDS: usize = 5;
    let (log, began) = (CapturedLog::start(), Instant::now());
    let fixture =
        Fixture::with(Limits { unauthenticated: 8, unauthenticated_per_peer: 8, ..limits() }).await;
    let (bootstrap, own, other) = (fixture.bootstrap(), ManualAgent::new(), ManualAgent::new());
    let identity = own.enrol(&bootstrap).await.unwrap();
    // Enrolments of cells that are not known, with wrong tokens, and with a token of another key.
    let stream = dial(&bootstrap, tls::enrol_client(&bootstrap.ca_sha256).unwrap()).await.unwrap();
    let profile = kiyot_link::http2::Profile::ENROL;
    let tasks = TaskTracker::new();
    let connection = kiyot_link::connection::Connection::open(
        stream,
        profile,
        &CancellationToken::new(),
        &tasks,
    )
    .await
    .unwrap();
    let channel = kiyot_link::channel::Channel::over(connection);
    let mut client = EnrolmentClient::new(channel);
    for n in 0..ENROLMENTS {
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
    // Connections with a certificate that say that they are another cell's, and the cell's own
    // certificates, again and again.
    for generation in 0..CONNECTIONS {
        let hello = HelloReply {
            cell: format!("cell-{generation}"),
            kind: ConnectionKind::Control.into(),
            ..HelloReply::default()
        };
        Fake::connect(&bootstrap, &identity, hello).await.ended().await;
        own.enrol(&bootstrap).await.unwrap();
    }
    // Connections without TLS, and more of them than may be.
    let mut stuck = Vec::new();
    for _ in 0..CONNECTIONS {
        let mut nonsense = Stream::dial(fixture.gateway.address()).await.unwrap();
        let _ = nonsense.write_all(b"GET / HTTP/1.1\r\n\r\n").await;
        let _ = within("the end of nonsense", nonsense.read_to_end(&mut Vec::new())).await;
        stuck.push(Stream::dial(fixture.gateway.address()).await.unwrap());
    }
    drop(stuck);
    let lines = log.lines();
    // However long it took here.
    let periods = began.elapsed().as_secs().div_ceil(PERIOD.as_secs()) as usize + 1;
    let of_a_kind = MAX_LINES as usize * periods;
    assert!(lines.len() <= 1 + KINDS * of_a_kind, "{} lines: {lines:#?}", lines.len());
    let of = |kind: &str| lines.iter().filter(|line| line.contains(kind)).count();
    for kind in [
        "An enrolment was refused",
        "A token that was spent was shown with another key",
        "A connection with a certificate was not let in",
    ] {
        assert!((1..=of_a_kind).contains(&of(kind)), "{kind}: {lines:#?}");
    }
    assert!(lines.iter().all(|line| line.len() < 600), "{lines:#?}");
}
