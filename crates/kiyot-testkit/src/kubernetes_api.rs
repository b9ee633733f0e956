//! A simulated Kubernetes API server with object versions, server-side apply with field owners,
//! garbage collection by owner references, lists in parts, watches that expire, and faults. It
//! serves HTTP on the loopback.
//!
//! The server follows the API's documentation, not kiyot's client.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use bytes::Bytes;
use http::{Request, Response, StatusCode, header};
use http_body_util::{BodyExt, StreamBody, combinators::UnsyncBoxBody};
use hyper::{body::Frame, body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::{net::TcpListener, sync::watch, task::JoinSet};

mod apply;
mod request;
mod schema;
mod service_account;
mod store;
mod table;
mod tls;

pub use request::{ApiRequest, Verb};
pub use service_account::ServiceAccount;
use store::{ApiRefusal, Objects};
pub use table::table;

type Body = UnsyncBoxBody<Bytes, std::io::Error>;

/// A fault of requests.
#[derive(Debug, Clone)]
pub enum ApiFault {
    /// A watch ends at once, without a change.
    Ended,
    /// No fault: the normal response, so that a later request has the fault.
    Passed,
    /// This status, with this header `Retry-After`.
    Status(u16, Option<u32>),
    /// A denial, as RBAC writes it.
    Denied,
    /// The client is unknown: its token has expired.
    Unknown,
    /// No response for this time.
    Slow(Duration),
    /// The connection is closed without a response.
    Closed,
    /// The connection is closed after the head of a response.
    Cut,
}

/// A fault and the requests that have it.
struct Rule {
    verb: Option<Verb>,
    resource: String,
    /// Namespace; "": any.
    namespace: String,
    times: usize,
    fault: ApiFault,
}

/// A received request.
#[derive(Debug, Clone)]
pub struct Recorded {
    /// The request.
    pub request: ApiRequest,
    /// The time of its arrival.
    pub at: Instant,
    /// The status of the response; 0: no response.
    pub status: u16,
}

#[derive(Default)]
struct ApiState {
    objects: Objects,
    rules: Vec<Rule>,
    /// The only accepted token; `None`: any token.
    token: Option<String>,
    recorded: Vec<Recorded>,
}

/// A running API server. Dropping it stops the server.
pub struct ApiServer {
    shared: Arc<Shared>,
    at: SocketAddr,
    tasks: Option<JoinSet<()>>,
    directory: tempfile::TempDir,
    tls: Option<tls::Authority>,
}

struct Shared {
    state: Mutex<ApiState>,
    /// Incremented at each change, for watches.
    changed: watch::Sender<u64>,
}

impl std::fmt::Debug for ApiServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ApiServer").field("at", &self.at).finish_non_exhaustive()
    }
}

impl ApiServer {
    /// Starts an API server with these CustomResourceDefinitions.
    pub async fn start(definitions: &[Value]) -> Self {
        Self::start_with(definitions, None).await
    }

    /// Starts an API server over TLS, with a certificate of its own authority.
    pub async fn start_tls(definitions: &[Value]) -> Self {
        Self::start_with(definitions, Some(tls::Authority::new())).await
    }

    async fn start_with(definitions: &[Value], tls: Option<tls::Authority>) -> Self {
        let mut objects = Objects::default();
        definitions.iter().for_each(|definition| objects.define(definition));
        let state = ApiState { objects, ..ApiState::default() };
        let shared = Arc::new(Shared { state: Mutex::new(state), changed: watch::Sender::new(0) });
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = listener.local_addr().unwrap();
        let directory = tempfile::tempdir().unwrap();
        let mut server = Self { shared, at, tasks: None, directory, tls };
        if let Some(tls) = &server.tls {
            std::fs::write(server.authority(), &tls.certificate).unwrap();
        }
        std::fs::write(server.kubeconfig(), server.kubeconfig_text()).unwrap();
        server.serve(listener);
        server
    }

    /// Adds a CustomResourceDefinition.
    pub fn define(&self, definition: &Value) {
        self.state().objects.define(definition);
    }

    /// Returns the path of a kubeconfig for the server.
    pub fn kubeconfig(&self) -> PathBuf {
        self.directory.path().join("kubeconfig")
    }

    fn authority(&self) -> PathBuf {
        self.directory.path().join("ca.crt")
    }

    fn kubeconfig_text(&self) -> String {
        let cluster = match &self.tls {
            None => json!({ "server": format!("http://{}", self.at) }),
            Some(_) => json!({
                "server": format!("https://{}", self.at),
                "certificate-authority": self.authority(),
            }),
        };
        let text = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "played",
            "clusters": [{ "name": "played", "cluster": cluster }],
            "users": [{ "name": "node", "user": { "token": "played-token" } }],
            "contexts": [{ "name": "played", "context": { "cluster": "played", "user": "node" } }],
        });
        text.to_string()
    }

    /// Returns the directory of the server's files.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    fn serve(&mut self, listener: TcpListener) {
        let mut tasks = JoinSet::new();
        let shared = Arc::clone(&self.shared);
        let acceptor = self.tls.as_ref().map(tls::Authority::acceptor);
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                let Ok((stream, _)) = listener.accept().await else { return };
                let (shared, acceptor) = (Arc::clone(&shared), acceptor.clone());
                connections.spawn(async move {
                    match acceptor {
                        None => serve(shared, stream).await,
                        Some(acceptor) => {
                            if let Ok(stream) = acceptor.accept(stream).await {
                                serve(shared, stream).await;
                            }
                        }
                    }
                });
                while connections.try_join_next().is_some() {}
            }
        });
        self.tasks = Some(tasks);
    }

    /// Stops the server: breaks its connections and refuses new ones. Keeps the objects.
    pub async fn stop(&mut self) {
        if let Some(mut tasks) = self.tasks.take() {
            tasks.shutdown().await;
        }
    }

    /// Starts a stopped server at the same address.
    pub async fn restart(&mut self) {
        let bind = async || TcpListener::bind(self.at).await.ok();
        let listener = crate::wait_until("the address is free", crate::LIMIT, bind).await;
        self.serve(listener);
    }

    /// Sets a fault of the next `times` requests of a verb and resource; `None` and "" mean any.
    pub fn fail(&self, verb: Option<Verb>, resource: &str, times: usize, fault: ApiFault) {
        let (resource, namespace) = (resource.to_owned(), String::new());
        self.state().rules.push(Rule { verb, resource, namespace, times, fault });
    }

    /// Sets a fault of all requests of a resource in a namespace.
    pub fn fail_in(&self, namespace: &str, resource: &str, fault: ApiFault) {
        let (resource, namespace) = (resource.to_owned(), namespace.to_owned());
        let (verb, times) = (None, usize::MAX);
        self.state().rules.push(Rule { verb, resource, namespace, times, fault });
    }

    /// Makes the server accept only this bearer token.
    pub fn accept_only(&self, token: &str) {
        self.state().token = Some(token.to_owned());
    }

    /// Returns the service account of a pod whose daemon calls the server. The server must have
    /// TLS.
    pub fn service_account(&self) -> ServiceAccount {
        let tls = self.tls.as_ref().expect("the server has TLS");
        ServiceAccount::new(self.at, tls.certificate.clone())
    }

    /// Ends all faults.
    pub fn heal(&self) {
        self.state().rules.clear();
    }

    /// Returns all received requests.
    pub fn recorded(&self) -> Vec<Recorded> {
        self.state().recorded.clone()
    }

    /// Returns the objects of a resource by "namespace/name", or by the name without a namespace.
    pub fn objects(&self, resource: &str) -> BTreeMap<String, Value> {
        self.state().objects.all(resource)
    }

    /// Creates or replaces an object, as another client would.
    pub fn put(&self, resource: &str, object: Value) {
        self.state().objects.put(resource, object);
        self.state().objects.collect();
        self.shared.changed.send_modify(|version| *version += 1);
    }

    /// Deletes an object and the objects that it owns, as another client would.
    pub fn delete(&self, resource: &str, key: &str) {
        self.state().objects.remove(resource, key);
        self.state().objects.collect();
        self.shared.changed.send_modify(|version| *version += 1);
    }

    /// Drops all changes until now, as etcd does by compaction: older positions have expired.
    pub fn compact(&self) {
        self.state().objects.compact();
        self.shared.changed.send_modify(|version| *version += 1);
    }

    fn state(&self) -> MutexGuard<'_, ApiState> {
        self.shared.state()
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, ApiState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn serve(
    shared: Arc<Shared>,
    stream: impl tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
) {
    let service = service_fn(|request| answer(Arc::clone(&shared), request));
    let _ended = http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
}

async fn answer(
    shared: Arc<Shared>,
    request: Request<Incoming>,
) -> Result<Response<Body>, std::io::Error> {
    let (head, body) = request.into_parts();
    let body = body.collect().await.map_err(std::io::Error::other)?.to_bytes();
    let parsed = ApiRequest::parse(&head);
    let Some(parsed) = parsed else {
        return Ok(refusal(&ApiRefusal::not_found(head.uri.path()), None));
    };
    let fault = {
        let mut state = shared.state();
        let meets = |rule: &Rule| {
            rule.times > 0
                && rule.verb.is_none_or(|verb| verb == parsed.verb)
                && (rule.resource.is_empty() || rule.resource == parsed.resource)
                && (rule.namespace.is_empty() || rule.namespace == parsed.namespace)
        };
        let rule = state.rules.iter_mut().find(|rule| meets(rule));
        rule.map(|rule| {
            rule.times = rule.times.saturating_sub(1);
            rule.fault.clone()
        })
    };
    let index = {
        let mut state = shared.state();
        state.recorded.push(Recorded { request: parsed.clone(), at: Instant::now(), status: 0 });
        state.recorded.len() - 1
    };
    let fault = if is_known(&shared, &head) { fault } else { Some(ApiFault::Unknown) };
    let response = match fault {
        Some(ApiFault::Closed) => return Err(std::io::Error::other("closed by a fault")),
        Some(ApiFault::Status(code, retry_after)) => {
            refusal(&ApiRefusal::of(code, "InternalError", "played failure"), retry_after)
        }
        Some(ApiFault::Cut) => cut(),
        Some(ApiFault::Ended) => response(StatusCode::OK, String::new()),
        Some(ApiFault::Denied) => refusal(&ApiRefusal::forbidden(&parsed), None),
        Some(ApiFault::Unknown) => {
            refusal(&ApiRefusal::of(401, "Unauthorized", "Unauthorized"), None)
        }
        Some(ApiFault::Slow(pause)) => {
            tokio::time::sleep(pause).await;
            respond(&shared, &parsed, &head, &body)
        }
        Some(ApiFault::Passed) | None => respond(&shared, &parsed, &head, &body),
    };
    shared.state().recorded[index].status = response.status().as_u16();
    Ok(response)
}

/// Returns whether the server accepts the token of a request.
fn is_known(shared: &Shared, head: &http::request::Parts) -> bool {
    let state = shared.state();
    let given = head.headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let given = given.and_then(|value| value.strip_prefix("Bearer "));
    state.token.as_deref().is_none_or(|accepted| given == Some(accepted))
}

fn respond(
    shared: &Arc<Shared>,
    request: &ApiRequest,
    head: &http::request::Parts,
    body: &Bytes,
) -> Response<Body> {
    if request.verb == Verb::Watch {
        return watch(shared, request);
    }
    let media = head.headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let outcome = {
        let mut state = shared.state();
        let outcome = state.objects.handle(request, media.unwrap_or_default(), body);
        state.objects.collect();
        outcome
    };
    match outcome {
        Ok((status, object)) => {
            shared.changed.send_modify(|version| *version += 1);
            let status = StatusCode::from_u16(status).unwrap();
            response(status, object.to_string())
        }
        Err(refused) => refusal(&refused, None),
    }
}

/// Streams the changes since a position, until the watch expires.
fn watch(shared: &Arc<Shared>, request: &ApiRequest) -> Response<Body> {
    let position = request.query("resourceVersion").parse().unwrap_or(0);
    if shared.state().objects.is_expired(position) {
        return refusal(&ApiRefusal::of(410, "Expired", "too old resource version"), None);
    }
    let changed = shared.changed.subscribe();
    let begin = (Arc::clone(shared), request.clone(), changed, position, false);
    let lines = futures::stream::unfold(
        begin,
        |(shared, request, mut changed, position, is_over)| async move {
            if is_over {
                return None;
            }
            loop {
                changed.mark_unchanged();
                let (lines, next, is_over) = {
                    let state = shared.state();
                    state.objects.changes(&request, position)
                };
                if !lines.is_empty() {
                    let frame = Ok::<_, std::io::Error>(Frame::data(Bytes::from(lines)));
                    return Some((frame, (shared, request, changed, next, is_over)));
                }
                changed.changed().await.ok()?;
            }
        },
    );
    let mut response = Response::new(StreamBody::new(lines).boxed_unsync());
    response.headers_mut().insert(header::CONTENT_TYPE, "application/json".parse().unwrap());
    response
}

/// Returns a response whose body breaks after its head was sent.
fn cut() -> Response<Body> {
    let broken = futures::stream::once(async {
        // The head is written while the body has no data.
        tokio::task::yield_now().await;
        Err::<Frame<Bytes>, _>(std::io::Error::other("cut by a fault"))
    });
    Response::new(StreamBody::new(broken).boxed_unsync())
}

fn response(status: StatusCode, text: String) -> Response<Body> {
    let body = http_body_util::Full::new(Bytes::from(text));
    let mut response = Response::new(body.map_err(|never| match never {}).boxed_unsync());
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, "application/json".parse().unwrap());
    response
}

fn refusal(refused: &ApiRefusal, retry_after: Option<u32>) -> Response<Body> {
    let status = StatusCode::from_u16(refused.code).unwrap();
    let mut response = response(status, refused.status().to_string());
    if let Some(seconds) = retry_after {
        response.headers_mut().insert(header::RETRY_AFTER, seconds.into());
    }
    response
}
