//! Downloads of the agent's program by cells whose image does not have the program.

use std::{path::PathBuf, time::Duration};

use base64::{Engine, prelude::BASE64_STANDARD};
use futures::future::join_all;
use kiyot::backends::milpa::gateway::{Limits, ca::Ca};
use kiyot_engine::id::CellId;
use kiyot_link::{
    alpn,
    bootstrap::{AgentPin, Bootstrap, GatewayAddress},
    certificate::sha256,
    stream::Stream,
    tls,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    time::sleep,
};
use tokio_rustls::client::TlsStream;

use crate::{
    calls::echo,
    kit::{Endpoints, Fixture, TOKEN, dial, limits, within},
};

/// Larger than the buffers between gateway and client: a client that does not read stops the
/// download.
const PROGRAM_BYTES: usize = 24 << 20;

fn program() -> Vec<u8> {
    (0..PROGRAM_BYTES).map(|at| (at % 253) as u8).collect()
}

async fn serving(limits: Limits) -> (Fixture, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("kiyot-cell");
    std::fs::write(&path, program()).unwrap();
    let endpoints = Endpoints { agent: Some(path.clone()), ..Endpoints::tcp(&dir) };
    (Fixture::with_ca(dir, endpoints, limits, Ca::new().unwrap()).await, path)
}

fn pin(bootstrap: &Bootstrap) -> &AgentPin {
    bootstrap.agent.as_ref().unwrap()
}

async fn connect(bootstrap: &Bootstrap) -> std::io::Result<TlsStream<Stream>> {
    let mut tls = tls::enrol_client(&bootstrap.ca_sha256).unwrap();
    // curl offers these protocols.
    tls.alpn_protocols = vec![b"h2".to_vec(), alpn::DOWNLOAD.to_vec()];
    dial(bootstrap, tls).await
}

fn get(path: &str, cell: &str, token: &str) -> String {
    let credentials = BASE64_STANDARD.encode(format!("{cell}:{token}"));
    format!(
        "GET {path} HTTP/1.1\r\nHost: gateway.kiyot.internal\r\n\
         Authorization: Basic {credentials}\r\n\r\n"
    )
}

/// Sends a request and reads the response to the end of the connection. Returns head and body.
async fn exchange(bootstrap: &Bootstrap, request: &str) -> (String, Vec<u8>) {
    let mut stream = connect(bootstrap).await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut response = Vec::new();
    let _cut = within("the response", stream.read_to_end(&mut response)).await;
    let end = response.windows(4).position(|window| window == b"\r\n\r\n");
    let body = response.split_off(end.map_or(response.len(), |end| end + 4));
    (String::from_utf8(response).unwrap(), body)
}

async fn download(bootstrap: &Bootstrap) -> (String, Vec<u8>) {
    exchange(bootstrap, &get("/agent", &bootstrap.cell, &bootstrap.token)).await
}

/// Starts a download and reads only the head of the response.
async fn begin(bootstrap: &Bootstrap) -> (TlsStream<Stream>, String) {
    let mut stream = connect(bootstrap).await.unwrap();
    let request = get("/agent", &bootstrap.cell, &bootstrap.token);
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut head = vec![0; 12];
    within("the head", stream.read_exact(&mut head)).await.unwrap();
    (stream, String::from_utf8(head).unwrap())
}

/// Verifies L24.
#[tokio::test]
async fn cell_downloads_the_pinned_program_and_its_token_is_not_spent() {
    let (fixture, _) = serving(limits()).await;
    let bootstrap = fixture.bootstrap();
    let (head, body) = download(&bootstrap).await;
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
    assert!(
        head.to_lowercase().contains(&format!("content-length: {PROGRAM_BYTES}\r\n")),
        "{head}"
    );
    assert_eq!(sha256(&body), pin(&bootstrap).sha256);
    assert_eq!(body.len() as u64, pin(&bootstrap).size_bytes);
    assert_eq!(fixture.admission.key_of(&fixture.cell), None);
    let _agent = fixture.agent();
    echo(&fixture.link.bulk, "enrolled").await;
    // The program is downloaded again if it was lost before its installation.
    assert_eq!(sha256(&download(&bootstrap).await.1), pin(&bootstrap).sha256);
    assert!(fixture.admission.alarms().is_empty());
}

/// Verifies L24.
#[tokio::test]
async fn replaced_file_does_not_change_the_program() {
    let (fixture, path) = serving(limits()).await;
    let bootstrap = fixture.bootstrap();
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, "another version").unwrap();
    assert_eq!(sha256(&download(&bootstrap).await.1), pin(&bootstrap).sha256);
    assert_eq!(fixture.bootstrap().agent, bootstrap.agent);
}

/// Verifies L24.
#[tokio::test]
async fn request_without_a_valid_token_gets_nothing() {
    let (fixture, _) = serving(limits()).await;
    let bootstrap = fixture.bootstrap();
    let cell = bootstrap.cell.as_str();
    let ended = CellId::mint().unwrap();
    for (request, status) in [
        ("GET /agent HTTP/1.1\r\nHost: x\r\n\r\n".to_owned(), "401"),
        (get("/agent", cell, "guess"), "401"),
        (get("/agent", ended.as_str(), TOKEN), "401"),
        (get("/agent", &"x".repeat(4000), TOKEN), "401"),
        // A stranger does not learn which paths exist.
        (get("/", cell, "guess"), "401"),
        (get("/", cell, TOKEN), "404"),
        (get("/agent/../../etc/passwd", cell, TOKEN), "404"),
        (get("/agent", cell, TOKEN).replace("GET", "HEAD"), "405"),
        (get("/agent", cell, TOKEN).replace("GET", "POST"), "405"),
    ] {
        let (head, body) = exchange(&bootstrap, &request).await;
        assert!(head.starts_with(&format!("HTTP/1.1 {status} ")), "{request}: {head}");
        assert!(body.is_empty(), "{request}");
    }
    fixture.admission.expire(&fixture.cell);
    assert!(download(&bootstrap).await.0.starts_with("HTTP/1.1 401 "));
}

/// Verifies L24.
#[tokio::test]
async fn malformed_oversized_or_unfinished_head_closes_the_connection() {
    let (fixture, _) = serving(Limits { handshake: Duration::from_secs(2), ..limits() }).await;
    let bootstrap = fixture.bootstrap();
    let large = format!("GET /agent HTTP/1.1\r\nX: {}\r\n\r\n", "x".repeat(64 << 10));
    let many = format!("GET /agent HTTP/1.1\r\n{}\r\n", "X: x\r\n".repeat(1000));
    for request in [large.as_str(), &many, "GET /agent HTTP/1.1\r\nHost", "\x16\x03\x01", ""] {
        let (head, body) = exchange(&bootstrap, request).await;
        assert!(head.is_empty() || head.starts_with("HTTP/1.1 4"), "{head}");
        assert!(body.is_empty());
    }
}

/// Verifies L25.
#[tokio::test]
async fn downloads_of_a_cell_are_limited_and_limit_no_other_cell() {
    const PER_CELL: usize = 2;
    let (fixture, _) = serving(limits()).await;
    let bootstrap = fixture.bootstrap();
    let other = CellId::mint().unwrap();
    fixture.admission.expect(&other, TOKEN);
    let mut held = Vec::new();
    for _ in 0..PER_CELL {
        let (stream, head) = begin(&bootstrap).await;
        assert_eq!(head, "HTTP/1.1 200");
        held.push(stream);
    }
    let (head, body) = download(&bootstrap).await;
    assert!(head.starts_with("HTTP/1.1 503 ") && head.contains("retry-after: 5\r\n"), "{head}");
    assert!(body.is_empty());
    let (stream, head) = begin(&fixture.bootstrap_of(&other)).await;
    assert_eq!(head, "HTTP/1.1 200");
    held.push(stream);
    // The held downloads continue. All are read concurrently, because the kernel closes connections
    // without progress.
    let rests = held.into_iter().map(async |mut stream| {
        let mut rest = Vec::new();
        within("the rest", stream.read_to_end(&mut rest)).await.unwrap();
        rest
    });
    for mut rest in join_all(rests).await {
        let program = rest.split_off(rest.len() - PROGRAM_BYTES);
        assert_eq!(sha256(&program), pin(&bootstrap).sha256);
    }
}

/// Verifies L25.
#[tokio::test]
async fn download_does_not_count_as_unauthenticated_connection() {
    let (fixture, _) =
        serving(Limits { unauthenticated: 1, unauthenticated_per_peer: 1, ..limits() }).await;
    let (mut stream, head) = begin(&fixture.bootstrap()).await;
    assert_eq!(head, "HTTP/1.1 200");
    // The client reads slowly, so that the download lasts. It does not pause longer, because the
    // kernel closes connections without progress.
    let download = tokio::spawn(async move {
        let mut part = vec![0; 64 << 10];
        while let Ok(1..) = stream.read(&mut part).await {
            sleep(Duration::from_millis(100)).await;
        }
    });
    let _agent = fixture.agent();
    echo(&fixture.link.bulk, "enrolled").await;
    assert!(!download.is_finished(), "the download ended before the cell was linked");
    download.abort();
}

/// Verifies L24.
#[tokio::test]
async fn socket_and_gateway_without_a_program_serve_no_download() {
    let (fixture, _) = serving(limits()).await;
    let socket = fixture.dir.path().join("gateway.sock");
    let local = Bootstrap { gateway: GatewayAddress::Unix(socket), ..fixture.bootstrap() };
    assert!(within("the handshake", connect(&local)).await.is_err());
    let without = Fixture::over_tcp(limits()).await;
    assert_eq!(without.bootstrap().agent, None);
    assert!(within("the handshake", connect(&without.bootstrap())).await.is_err());
}
