//! The admin API on a unix socket, which milpactl calls.
//!
//! Its calls run on the main runtime beside CRI calls, and read the same state. A failure to open
//! the socket is only logged: pods need no operator.

use std::{convert::Infallible, sync::Arc, time::Duration};

use kiyot_config::Admin;
use kiyot_link::http2::{self, Profile};
use kiyot_proto::{ADMIN_REVISION, admin::admin_server::AdminServer};
use tokio::{
    net::{UnixListener, UnixStream},
    task::spawn_blocking,
    time::{sleep, timeout},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::{Code, Status, body::Body};
use tower::{Service, service_fn};

mod access;
mod connection_limits;
mod deadlines;
mod dump;
mod dumps;
mod idle;
mod lists;
mod node_log;
mod parts;
mod plan;
mod renderer;
mod service;
mod socket;
mod streaming;
mod versions;

use access::Access;
use connection_limits::{ConnectionLimits, Limits};
use idle::{Calls, HoldingBody};
pub use parts::Parts;
use service::AdminService;
use socket::Socket;

/// Limits on the connections of readers and of root. Readers can't keep root out, a reader can't
/// keep out other readers, and logs that root follows can't keep out its other calls. Further
/// connections get the reason of their refusal. Few requests with a manifest are read at a time,
/// because they take memory.
const LIMITS: Limits =
    Limits { readers: 48, reader: 16, root: 64, followed: 48, refused: 16, manifests: 2 };
/// Time after which a connection without calls is closed; clients connect again.
const IDLE_TIMEOUT: Duration = Duration::from_secs(60);
/// Time to send the reason of a refused connection.
const REFUSAL_TIMEOUT: Duration = Duration::from_secs(2);
/// Bounds the memory and the calls of a connection.
const PROFILE: Profile = Profile {
    stream_window: 64 * 1024,
    connection_window: 256 * 1024,
    send_buffer: 64 * 1024,
    max_streams: 8,
};
/// Longest path of an unknown method in a response, in bytes. Paths are ASCII.
const MAX_PATH_BYTES: usize = 128;
/// Bounds a request in bytes.
const MAX_REQUEST_BYTES: usize = 64 * 1024;
/// The method whose request has a manifest.
const WITH_MANIFEST: &str = "/kiyot.admin.v1.Admin/Plan";
/// Bounds the manifest of a request in bytes, the sum of all its files.
const MAX_MANIFEST_BYTES: usize = 1024 * 1024;
/// Bounds a request with a manifest in bytes.
const MAX_MANIFEST_REQUEST_BYTES: usize = MAX_MANIFEST_BYTES + MAX_REQUEST_BYTES;
/// Bounds a request with a manifest: the wait for its turn, its reading and its call. milpactl
/// waits 30 s for it.
const MANIFEST_TIMEOUT: Duration = Duration::from_secs(25);
/// Closes a connection whose calls with manifests do not end within this time: its client does not
/// read the responses.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(60);
/// Bounds the message of a status in bytes. The message is a header with up to three bytes a
/// character, and clients accept 16 KiB of headers.
const MAX_MESSAGE_BYTES: usize = 4 * 1024;
/// Pause after a failed accept, such as by EMFILE.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Time limit of the end of all tasks.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(5);

/// The running server of the admin API.
#[derive(Debug)]
pub struct AdminApi {
    stop: CancellationToken,
    tasks: TaskTracker,
}

impl AdminApi {
    /// Starts the server on the current runtime, which is the main runtime. A task opens the
    /// socket.
    pub fn start(config: &Admin, parts: Parts) -> Self {
        let api = Self { stop: CancellationToken::new(), tasks: TaskTracker::new() };
        let (config, stop, tasks) = (config.clone(), api.stop.clone(), api.tasks.clone());
        api.tasks.spawn(async move {
            match open(config).await {
                Ok((socket, listener)) => {
                    accept(socket, listener, Arc::new(parts), stop, tasks).await;
                }
                Err(error) => {
                    tracing::error!(
                        error = &*error as &dyn std::error::Error,
                        "admin API can't be served, pods are not affected"
                    );
                }
            }
        });
        api.tasks.close();
        api
    }

    /// Ends all connections and tasks.
    pub async fn shutdown(&self) {
        self.stop.cancel();
        if timeout(SHUTDOWN_TIMEOUT, self.tasks.wait()).await.is_err() {
            tracing::warn!(timeout = ?SHUTDOWN_TIMEOUT, "tasks of the admin API did not end");
        }
    }
}

impl Drop for AdminApi {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

async fn open(
    config: Admin,
) -> Result<(Socket, UnixListener), Box<dyn std::error::Error + Send + Sync>> {
    let link = config.listen.clone();
    let socket = spawn_blocking(move || Socket::open(&config)).await??;
    let listener = UnixListener::from_std(socket.listener.socket.try_clone()?)?;
    tracing::info!(socket = %link.display(), "listening for milpactl");
    Ok((socket, listener))
}

async fn accept(
    socket: Socket,
    listener: UnixListener,
    parts: Arc<Parts>,
    stop: CancellationToken,
    tasks: TaskTracker,
) {
    let limits = ConnectionLimits::new(LIMITS);
    loop {
        let Some(accepted) = stop.run_until_cancelled(listener.accept()).await else { break };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "connection to the admin API not accepted");
                stop.run_until_cancelled(sleep(ACCEPT_PAUSE)).await;
                continue;
            }
        };
        let access = match stream.peer_cred() {
            Ok(peer) => Access::of(peer.uid()),
            Err(error) => {
                tracing::warn!(%error, "caller of the admin API is unknown");
                continue;
            }
        };
        let admitted = match limits.admit(access) {
            Ok(admitted) => admitted,
            Err(reached) => {
                tracing::debug!(?access, "connection limit of the admin API reached");
                if let Some(permit) = limits.refuse() {
                    let refusing = refuse(stream, reached, stop.clone(), tasks.clone());
                    tasks.spawn(async move {
                        refusing.await;
                        drop(permit);
                    });
                }
                continue;
            }
        };
        let service =
            AdminService { parts: Arc::clone(&parts), access, limits: Arc::clone(&limits) };
        let serving = serve(stream, service, stop.clone(), tasks.clone());
        tasks.spawn(async move {
            serving.await;
            drop(admitted);
        });
    }
    drop((listener, socket));
}

async fn serve(
    stream: UnixStream,
    service: AdminService,
    stop: CancellationToken,
    tasks: TaskTracker,
) {
    let (access, limits) = (service.access, Arc::clone(&service.limits));
    let with_manifest =
        AdminServer::new(service.clone()).max_decoding_message_size(MAX_MANIFEST_REQUEST_BYTES);
    let service = AdminServer::new(service).max_decoding_message_size(MAX_REQUEST_BYTES);
    let (calls, manifests) = (Calls::new(), Calls::new());
    let (idle, busy) = (calls.clone(), manifests.clone());
    let service = service_fn(move |request: http::Request<Body>| {
        let (mut service, mut with_manifest) = (service.clone(), with_manifest.clone());
        let (limits, call) = (Arc::clone(&limits), calls.begin());
        let manifests = manifests.clone();
        async move {
            let path = request.uri().path().to_owned();
            let (response, turn) = if path == WITH_MANIFEST {
                // The request is not read before its turn.
                let called = timeout(MANIFEST_TIMEOUT, async {
                    let turn = (limits.manifest(access).await, manifests.begin());
                    Ok::<_, Infallible>((with_manifest.call(request).await?, Some(turn)))
                });
                called.await.unwrap_or_else(|_| Ok((late_manifest().into_http(), None)))?
            } else {
                (service.call(request).await?, None)
            };
            let response = match response {
                response if is_unknown_method(&response) => unknown_method(&path).into_http(),
                response => with_short_message(response),
            };
            Ok::<_, Infallible>(
                response.map(|body| Body::new(HoldingBody::new(body, (call, turn)))),
            )
        }
    });
    let serving = Box::pin(http2::serve(stream, PROFILE, service, stop, tasks));
    tokio::select! {
        served = serving => {
            if let Err(error) = served {
                tracing::debug!(%error, "connection to the admin API ended");
            }
        }
        () = idle.idle_for(IDLE_TIMEOUT) => {
            tracing::debug!(timeout = ?IDLE_TIMEOUT, "idle connection to the admin API closed");
        }
        () = busy.busy_for(RESPONSE_TIMEOUT) => {
            tracing::debug!(
                timeout = ?RESPONSE_TIMEOUT,
                "connection to the admin API closed, the response to a manifest is not read"
            );
        }
    }
}

/// Returns the status of a call with a manifest that takes too long.
fn late_manifest() -> Status {
    let (seconds, at_once) = (MANIFEST_TIMEOUT.as_secs(), LIMITS.manifests);
    Status::deadline_exceeded(format!(
        "the manifest was not read within {seconds} s; {at_once} are read at a time"
    ))
}

/// Shortens the error message of a response to a length that clients accept: the message may quote
/// the request.
fn with_short_message(response: http::Response<Body>) -> http::Response<Body> {
    match Status::from_header_map(response.headers()) {
        Some(status) if status.message().len() > MAX_MESSAGE_BYTES => {
            let message =
                &status.message()[..status.message().floor_char_boundary(MAX_MESSAGE_BYTES)];
            Status::new(status.code(), format!("{message}…")).into_http()
        }
        _ => response,
    }
}

/// Returns whether the generated code has refused an unknown method: its response has no message.
fn is_unknown_method(response: &http::Response<Body>) -> bool {
    let headers = response.headers();
    let status = headers.get(Status::GRPC_STATUS).map(|code| Code::from_bytes(code.as_bytes()));
    status == Some(Code::Unimplemented) && !headers.contains_key(Status::GRPC_MESSAGE)
}

/// Returns the status of a call of a method that the daemon lacks, such as by a later milpactl.
fn unknown_method(path: &str) -> Status {
    let (own, path) = (env!("CARGO_PKG_VERSION"), path.get(..MAX_PATH_BYTES).unwrap_or(path));
    Status::unimplemented(format!(
        "kiyot {own} has no method {path}, only those of revision {ADMIN_REVISION}: upgrade the \
         daemon"
    ))
}

/// Answers all calls of a connection with a reason.
async fn refuse(stream: UnixStream, reason: Status, stop: CancellationToken, tasks: TaskTracker) {
    let service = service_fn(move |_: http::Request<Body>| {
        let reason = reason.clone();
        async move { Ok::<_, Infallible>(reason.into_http::<Body>()) }
    });
    let serving = Box::pin(http2::serve(stream, PROFILE, service, stop, tasks));
    // The client closes the connection once it has the reason.
    let _ = timeout(REFUSAL_TIMEOUT, serving).await;
}
