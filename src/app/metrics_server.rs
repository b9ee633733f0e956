//! The HTTP server of `/metrics`, `/healthz` and `/readyz`.

use std::{
    collections::VecDeque,
    convert::Infallible,
    io,
    net::SocketAddr,
    sync::{Arc, OnceLock},
    thread,
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::Full;
use hyper::{server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    net::{TcpListener, TcpStream},
    runtime::Builder,
    sync::{OwnedSemaphorePermit, Semaphore, oneshot},
    task::JoinSet,
    time::sleep,
};

use super::health::{Health, Unhealthy};
use crate::metrics::Exposition;

/// Name of the thread.
const THREAD: &str = "kiyot-metrics";
/// Limit of pages that are sent at the same time. Prometheus reads a single page; requests beyond
/// the limit get 503.
const MAX_PAGES: usize = 16;
/// Limit of requests that wait for the same kind of check. It is reached only if the check is slow.
const MAX_CHECKED: usize = 256;
/// Limit of connections without a request. Beyond the limit, a new connection ends the oldest.
/// Clients of health checks send their request at once, so that idle connections give way to them.
const MAX_OTHERS: usize = 512;
/// Time limit of a request's head.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// Time limit of a connection, so that a slow reader does not keep its permit.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(60);
/// Limit of a request's head in bytes, the lowest that hyper accepts.
const MAX_HEAD_BYTES: usize = 8 * 1024;
/// Limit of the header fields of a request.
const MAX_HEADERS: usize = 64;
/// Pause between attempts to listen, while the address is in use or not yet assigned to the node.
const LISTEN_PAUSE: Duration = Duration::from_secs(2);
/// Pause after a failed accept, such as by EMFILE.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
const OPENMETRICS: HeaderValue =
    HeaderValue::from_static("application/openmetrics-text; version=1.0.0; charset=utf-8");
const PLAIN_TEXT: HeaderValue = HeaderValue::from_static("text/plain; charset=utf-8");

/// The server. Dropping it ends its connections.
#[derive(Debug)]
pub(super) struct MetricsServer {
    _running: oneshot::Sender<Infallible>,
}

/// Responses of the server, with permits for their requests.
#[derive(Debug)]
struct Pages {
    metrics: Exposition,
    health: Health,
    /// Permits at `/metrics`, [`MAX_PAGES`] in all.
    sent: Arc<Semaphore>,
    /// Permits at `/healthz`, [`MAX_CHECKED`] in all.
    alive: Arc<Semaphore>,
    /// Permits at `/readyz`, [`MAX_CHECKED`] in all.
    ready: Arc<Semaphore>,
}

/// Permit of a connection's request; unset before the request.
type Place = OnceLock<OwnedSemaphorePermit>;

impl MetricsServer {
    /// Starts the server on a thread of its own, so that a flood of requests takes no time from
    /// cells. A failure to listen is logged and retried; pods are served meanwhile.
    pub(super) fn start(listen: SocketAddr, metrics: Exposition, health: Health) -> Self {
        let [sent, alive, ready] =
            [MAX_PAGES, MAX_CHECKED, MAX_CHECKED].map(|places| Arc::new(Semaphore::new(places)));
        let pages = Pages { metrics, health, sent, alive, ready };
        let (running, stopped) = oneshot::channel();
        let serve = move || {
            let runtime = Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(async {
                tokio::select! {
                    () = run(listen, Arc::new(pages)) => {}
                    // Completes with an error when the sender is dropped: nothing is ever sent.
                    _ = stopped => {}
                }
            });
            Ok(())
        };
        let failed = |error: io::Error| {
            tracing::error!(%error, "metrics are not served, pods go on: their thread failed");
        };
        let spawned = thread::Builder::new()
            .name(THREAD.to_owned())
            .spawn(move || serve().unwrap_or_else(failed));
        if let Err(error) = spawned {
            failed(error);
        }
        Self { _running: running }
    }
}

async fn run(address: SocketAddr, pages: Arc<Pages>) {
    let listener = listen(address).await;
    let mut connections = JoinSet::new();
    // Connections without a request, oldest first. Dropping a sender ends its connection.
    let mut others: VecDeque<oneshot::Sender<Infallible>> = VecDeque::new();
    loop {
        // Frees ended tasks.
        while connections.try_join_next().is_some() {}
        match listener.accept().await {
            Ok((stream, _)) => {
                others.retain(|other| !other.is_closed());
                if others.len() >= MAX_OTHERS {
                    others.pop_front();
                }
                let (other, replaced) = oneshot::channel();
                others.push_back(other);
                connections.spawn(serve(stream, Arc::clone(&pages), replaced));
            }
            Err(error) => {
                tracing::warn!(%error, "accept of a connection for metrics failed");
                sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// Listens on an address, and retries until it succeeds. Only the first failure is logged.
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
                    "metrics are not served, pods go on: metrics.listen can't be listened on"
                );
            }
            Err(_) => {}
        }
        sleep(LISTEN_PAUSE).await;
    }
}

/// Serves one request of a connection, until a newer connection replaces it.
async fn serve(stream: TcpStream, pages: Arc<Pages>, replaced: oneshot::Receiver<Infallible>) {
    let place = Place::new();
    let service = service_fn(|request| {
        let response = pages.respond(request, &place);
        async move { Ok::<_, Infallible>(response.await) }
    });
    let mut served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .keep_alive(false)
        .max_buf_size(MAX_HEAD_BYTES)
        .max_headers(MAX_HEADERS)
        .serve_connection(TokioIo::new(stream), service);
    let replaced = async {
        let _ = replaced.await;
        if place.get().is_some() {
            std::future::pending().await
        }
    };
    tokio::select! {
        // A received request is read before its connection is replaced.
        biased;
        ended = &mut served => match ended {
            Ok(()) => return,
            Err(error) => tracing::debug!(%error, "connection for metrics failed"),
        },
        () = replaced => {}
        () = sleep(CONNECTION_TIMEOUT) => {}
    }
    // A reset frees the local port, which clients of health checks may need, even if the peer keeps
    // the connection open.
    let _ = served.into_parts().io.inner().set_zero_linger();
}

impl Pages {
    async fn respond<B>(&self, request: Request<B>, place: &Place) -> Response<Full<Bytes>> {
        if !matches!(*request.method(), Method::GET | Method::HEAD) {
            let mut response =
                text(StatusCode::METHOD_NOT_ALLOWED, "allowed methods: GET, HEAD".to_owned());
            response.headers_mut().insert(header::ALLOW, HeaderValue::from_static("GET, HEAD"));
            return response;
        }
        let places = match request.uri().path() {
            "/metrics" => &self.sent,
            "/healthz" => &self.alive,
            "/readyz" => &self.ready,
            path => {
                let paths = "allowed paths: /metrics, /healthz, /readyz";
                return text(StatusCode::NOT_FOUND, format!("{path:?} is not found; {paths}"));
            }
        };
        if !take(places, place) {
            let reason = "too many requests of this path at the same time; try again later";
            return text(StatusCode::SERVICE_UNAVAILABLE, reason.to_owned());
        }
        match request.uri().path() {
            "/healthz" => checked(self.health.alive().await),
            "/readyz" => checked(self.health.ready().await),
            _ => {
                let mut response = text(StatusCode::OK, self.metrics.text());
                response.headers_mut().insert(header::CONTENT_TYPE, OPENMETRICS);
                response
            }
        }
    }
}

/// Takes a permit for a connection's request. Returns whether a permit was available.
fn take(places: &Arc<Semaphore>, place: &Place) -> bool {
    Arc::clone(places).try_acquire_owned().is_ok_and(|permit| place.set(permit).is_ok())
}

fn checked(outcome: Result<(), Arc<Unhealthy>>) -> Response<Full<Bytes>> {
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
    use super::*;

    /// Verifies O9.
    #[test]
    fn request_above_the_limit_is_refused_until_another_request_ends() {
        let places = Arc::new(Semaphore::new(2));
        let requests = [Place::new(), Place::new(), Place::new()];
        assert_eq!(requests.each_ref().map(|place| take(&places, place)), [true, true, false]);
        drop(requests);
        assert!(take(&places, &Place::new()));
    }
}
