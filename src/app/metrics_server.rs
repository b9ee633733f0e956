//! The HTTP server of `/metrics`, `/healthz` and `/readyz`.

use std::{convert::Infallible, net::SocketAddr, pin::pin, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::Full;
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpListener,
    sync::Semaphore,
    task::JoinSet,
    time::{sleep, timeout},
};
use tokio_util::task::AbortOnDropHandle;

use super::health::{Health, Unhealthy};
use crate::metrics::Exposition;

/// Bound on connections. Prometheus has one, and each probe one; further ones wait in the socket's
/// own queue.
const MAX_CONNECTIONS: usize = 16;
/// Time limit of a request's head, and of the time between two requests.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// Time limit of a connection, so that a peer that reads slowly does not keep its place. A response
/// that is being written then has as long as a head.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(60);
/// The most bytes of a request's head, which hyper bounds from below by the same.
const MAX_HEAD_BYTES: usize = 8 * 1024;
/// The most header fields of a request.
const MAX_HEADERS: usize = 64;
/// Pause between attempts to listen on an address that is taken, or not the node's yet.
const LISTEN_PAUSE: Duration = Duration::from_secs(2);
/// Pause after a failed accept, as for want of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
const OPENMETRICS: HeaderValue =
    HeaderValue::from_static("application/openmetrics-text; version=1.0.0; charset=utf-8");
const PLAIN_TEXT: HeaderValue = HeaderValue::from_static("text/plain; charset=utf-8");

/// The server. Dropping it ends its connections.
#[derive(Debug)]
pub(super) struct MetricsServer(#[allow(dead_code)] AbortOnDropHandle<()>);

/// The answers of the server.
#[derive(Debug)]
struct Pages {
    metrics: Exposition,
    health: Health,
}

impl MetricsServer {
    /// Starts the server. An address that can't be listened on is logged and tried again: pods are
    /// served without metrics.
    pub(super) fn start(listen: SocketAddr, metrics: Exposition, health: Health) -> Self {
        let pages = Arc::new(Pages { metrics, health });
        Self(AbortOnDropHandle::new(tokio::spawn(run(listen, pages))))
    }
}

async fn run(address: SocketAddr, pages: Arc<Pages>) {
    let listener = listen(address).await;
    let permits = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let mut connections = JoinSet::new();
    loop {
        // Ended tasks are collected: as many are left as there are permits.
        while connections.try_join_next().is_some() {}
        let Ok(permit) = Arc::clone(&permits).acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, _)) => {
                let pages = Arc::clone(&pages);
                connections.spawn(async move {
                    let _permit = permit;
                    serve(stream, move |request| {
                        let pages = Arc::clone(&pages);
                        async move { pages.respond(&request).await }
                    })
                    .await;
                });
            }
            Err(error) => {
                tracing::warn!(%error, "accept of a connection for metrics failed");
                sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// Listens on an address, and repeats it until it succeeds. Only the first failure is logged.
async fn listen(address: SocketAddr) -> TcpListener {
    let mut is_logged = false;
    loop {
        match TcpListener::bind(address).await {
            Ok(listener) => {
                let address = listener.local_addr().unwrap_or(address);
                tracing::info!(%address, "metrics served");
                return listener;
            }
            Err(error) if !is_logged => {
                is_logged = true;
                tracing::error!(
                    %address,
                    %error,
                    retry = ?LISTEN_PAUSE,
                    "metrics are not served, pods are: metrics.listen can't be listened on"
                );
            }
            Err(_) => {}
        }
        sleep(LISTEN_PAUSE).await;
    }
}

async fn serve<R>(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    respond: impl Fn(Request<Incoming>) -> R,
) where
    R: Future<Output = Response<Full<Bytes>>>,
{
    let service = service_fn(|request| {
        let response = respond(request);
        async move { Ok::<_, Infallible>(response.await) }
    });
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .max_buf_size(MAX_HEAD_BYTES)
        .max_headers(MAX_HEADERS)
        .serve_connection(TokioIo::new(stream), service);
    let mut served = pin!(served);
    let mut ended = timeout(CONNECTION_TIMEOUT, served.as_mut()).await;
    if ended.is_err() {
        served.as_mut().graceful_shutdown();
        ended = timeout(HEAD_TIMEOUT, served).await;
    }
    if let Ok(Err(error)) = ended {
        tracing::debug!(%error, "connection for metrics failed");
    }
}

impl Pages {
    async fn respond<B>(&self, request: &Request<B>) -> Response<Full<Bytes>> {
        if !matches!(*request.method(), Method::GET | Method::HEAD) {
            let mut response =
                text(StatusCode::METHOD_NOT_ALLOWED, "allowed methods: GET, HEAD".to_owned());
            response.headers_mut().insert(header::ALLOW, HeaderValue::from_static("GET, HEAD"));
            return response;
        }
        match request.uri().path() {
            "/metrics" => {
                let mut response = text(StatusCode::OK, self.metrics.text());
                response.headers_mut().insert(header::CONTENT_TYPE, OPENMETRICS);
                response
            }
            "/healthz" => checked(self.health.alive().await),
            "/readyz" => checked(self.health.ready().await),
            path => {
                let paths = "allowed paths: /metrics, /healthz, /readyz";
                text(StatusCode::NOT_FOUND, format!("{path:?} is not found; {paths}"))
            }
        }
    }
}

fn checked(outcome: Result<(), Unhealthy>) -> Response<Full<Bytes>> {
    match outcome {
        Ok(()) => text(StatusCode::OK, "ok".to_owned()),
        Err(error) => text(StatusCode::SERVICE_UNAVAILABLE, error.to_string()),
    }
}

fn text(status: StatusCode, body: String) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, PLAIN_TEXT);
    response
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};

    use super::*;

    /// The end of a page that is larger than what a connection holds.
    const END: &str = "# EOF";

    async fn request(client: &mut DuplexStream) {
        client.write_all(b"GET /metrics HTTP/1.1\r\nhost: node\r\n\r\n").await.unwrap();
    }

    /// Verifies O1.
    #[tokio::test(start_paused = true)]
    async fn page_that_is_being_read_at_the_end_of_its_connection_is_whole() {
        let (mut client, stream) = duplex(64);
        let page = format!("{}{END}", "x".repeat(1000));
        let respond = |_| {
            let page = page.clone();
            async move { text(StatusCode::OK, page) }
        };
        let scrapes = async {
            let interval = HEAD_TIMEOUT - Duration::from_secs(1);
            let mut age = Duration::ZERO;
            while age + interval < CONNECTION_TIMEOUT {
                request(&mut client).await;
                let (mut read, mut part) = (Vec::new(), [0; 64]);
                while !read.ends_with(END.as_bytes()) {
                    let length = client.read(&mut part).await.unwrap();
                    assert!(length > 0, "{}", String::from_utf8_lossy(&read));
                    read.extend_from_slice(&part[..length]);
                }
                sleep(interval).await;
                age += interval;
            }
            request(&mut client).await;
            sleep(CONNECTION_TIMEOUT - age + Duration::from_secs(1)).await;
            let mut read = String::new();
            client.read_to_string(&mut read).await.unwrap();
            assert!(read.ends_with(&page), "{} bytes", read.len());
        };
        tokio::join!(serve(stream, respond), scrapes);
    }
}
