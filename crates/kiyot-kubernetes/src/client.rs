//! The client of the API server, the only module that names the crate `kube`.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use http::{HeaderValue, Request, Response, header};
use http_body_util::{BodyExt, Limited};
use hyper_util::{
    client::legacy::{self, connect::HttpConnector},
    rt::TokioExecutor,
};
use kube::{
    Config,
    client::{Body, ConfigExt},
    config::{KubeConfigOptions, Kubeconfig},
};
use serde::de::DeserializeOwned;
use tokio::time::timeout;
use tokio_util::task::AbortOnDropHandle;
use tower::{BoxError, ServiceBuilder};

use crate::{
    call::Call,
    counter::Counter,
    failure::{Failure, shown},
};

/// Time limit of a call, unless the client has its own.
pub(crate) const CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// Time limit of reading credentials. A kubeconfig may name a program that prints them.
pub(crate) const LOAD_TIMEOUT: Duration = Duration::from_secs(30);
/// Time limit of a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Bounds a response, in bytes.
const MAX_RESPONSE_BYTES: usize = 16 * 1024 * 1024;

/// Source of the API server's address and credentials.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Access {
    /// A kubeconfig file.
    Kubeconfig(PathBuf),
    /// The service account of the daemon's pod.
    InCluster,
}

/// An error of making a client.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The kubeconfig can't be read.
    #[error("kubeconfig {path:?} can't be used: {reason}")]
    Kubeconfig {
        /// The path.
        path: PathBuf,
        /// The reason.
        reason: String,
    },
    /// The pod has no service account.
    #[error(
        "in-cluster credentials can't be used: {0}; allowed: those of a pod with a service account \
         (KUBERNETES_SERVICE_HOST, KUBERNETES_SERVICE_PORT, and token, ca.crt and namespace in \
         /var/run/secrets/kubernetes.io/serviceaccount)"
    )]
    InCluster(String),
    /// The certificates can't be used.
    #[error("client of the API server can't be made: {0}")]
    Client(String),
}

/// A client of the API server. Its callers retry.
#[derive(Clone)]
pub struct Client {
    api: kube::Client,
    counter: Arc<dyn Counter>,
    call_timeout: Duration,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Client")
    }
}

impl Client {
    /// Reads the credentials, and returns a client. Does not connect.
    pub async fn new(access: &Access, counter: Arc<dyn Counter>) -> Result<Self, ClientError> {
        let mut config = match access {
            Access::Kubeconfig(path) => of_kubeconfig(path).await?,
            Access::InCluster => {
                Config::incluster().map_err(|error| ClientError::InCluster(chain(&error)))?
            }
        };
        // Callers repeat calls, because they know the other waiting calls.
        config.default_retry = false;
        // A program for credentials blocks, and kube runs it without a time limit.
        let made = tokio::task::spawn_blocking(move || connected(&config)).await;
        let made = made.map_err(|error| ClientError::Client(error.to_string()))?;
        let made = made.map_err(|error| ClientError::Client(chain(&error)));
        made.map(|api| Self { api, counter, call_timeout: CALL_TIMEOUT })
    }

    /// Makes a call, and returns the body of its response.
    pub async fn call(&self, call: &Call) -> Result<Bytes, Failure> {
        let begun = Instant::now();
        let answered = self.answer(call).await;
        self.count(call, begun, &answered);
        answered
    }

    fn count<T>(&self, call: &Call, begun: Instant, answered: &Result<T, Failure>) {
        let outcome = answered.as_ref().err().map_or("ok", Failure::class);
        self.counter.called(call.operation, outcome, begun.elapsed());
    }

    async fn answer(&self, call: &Call) -> Result<Bytes, Failure> {
        let answered = timeout(self.call_timeout, async {
            let response = self.send(call).await?;
            read(response).await
        });
        answered.await.unwrap_or(Err(Failure::TimedOut(self.call_timeout)))
    }

    /// Makes a call, and returns the object of its response.
    pub async fn object<T: DeserializeOwned>(&self, call: &Call) -> Result<T, Failure> {
        let body = self.call(call).await?;
        serde_json::from_slice(&body).map_err(|error| Failure::Server {
            status: 200,
            message: format!("response is not understood: {error}"),
        })
    }

    /// Begins a call whose response streams, and returns its body.
    pub(crate) async fn stream(&self, call: &Call, limit: Duration) -> Result<Body, Failure> {
        let begun = Instant::now();
        let answered = timeout(limit, async {
            let response = self.send(call).await?;
            if response.status().is_success() {
                return Ok(response.into_body());
            }
            // The body of a refusal has the reason.
            read(response).await.map(Body::from)
        });
        let answered = answered.await.unwrap_or(Err(Failure::TimedOut(limit)));
        self.count(call, begun, &answered);
        answered
    }

    /// Sends a call, and returns the response with its body unread.
    async fn send(&self, call: &Call) -> Result<Response<Body>, Failure> {
        let body = call.body.as_ref().map(|body| body.to_string().into_bytes());
        let request = Request::builder()
            .method(call.method.clone())
            .uri(&call.path)
            .header(header::CONTENT_TYPE, HeaderValue::from_static(call.content_type))
            .header(header::ACCEPT, HeaderValue::from_static("application/json"))
            .body(Body::from(body.unwrap_or_default()))
            .map_err(|error| Failure::Invalid(error.to_string()))?;
        let sent = self.api.send(request).await;
        sent.map_err(|error| Failure::Unreachable(shown(&chain(&error))))
    }
}

/// Reads the body of a response.
async fn read(response: Response<Body>) -> Result<Bytes, Failure> {
    let status = response.status();
    let retry_after = response.headers().get(header::RETRY_AFTER);
    let retry_after = retry_after.and_then(|value| value.to_str().ok()).map(str::to_owned);
    let body = Limited::new(response.into_body(), MAX_RESPONSE_BYTES).collect().await;
    let body = body.map_err(|error| Failure::Unreachable(shown(&error.to_string())))?.to_bytes();
    match Failure::of_response(status, retry_after.as_deref(), &body) {
        Some(failure) => Err(failure),
        None => Ok(body),
    }
}

/// Returns a client with the address, the credentials and the certificates of a configuration.
///
/// kube's default client also logs every failed call as an error; here a failure is logged once.
fn connected(config: &Config) -> Result<kube::Client, kube::Error> {
    let mut http = HttpConnector::new();
    http.enforce_http(false);
    http.set_connect_timeout(Some(CONNECT_TIMEOUT));
    let https = config.rustls_https_connector_with_connector(http)?;
    let service = ServiceBuilder::new()
        .layer(config.base_uri_layer())
        .option_layer(config.auth_layer()?)
        .layer(config.extra_headers_layer()?)
        .map_err(BoxError::from)
        .service(legacy::Client::builder(TokioExecutor::new()).build::<_, Body>(https));
    Ok(kube::Client::new(service, config.default_namespace.clone()))
}

async fn of_kubeconfig(path: &Path) -> Result<Config, ClientError> {
    let refused = |reason: String| ClientError::Kubeconfig { path: path.to_owned(), reason };
    let file = path.to_owned();
    let read = tokio::task::spawn_blocking(move || Kubeconfig::read_from(file));
    let read = read.await.map_err(|error| refused(error.to_string()))?;
    let kubeconfig = read.map_err(|error| refused(chain(&error)))?;
    if has_proxy(&kubeconfig) {
        // Without the value, which may contain a password.
        let reason = "its cluster has a proxy-url; allowed: a cluster that needs no proxy";
        return Err(refused(reason.to_owned()));
    }
    let options = KubeConfigOptions::default();
    let loaded = Config::from_custom_kubeconfig(kubeconfig, &options).await;
    loaded.map_err(|error| refused(chain(&error)))
}

/// Returns whether the cluster of the current context has a proxy.
fn has_proxy(kubeconfig: &Kubeconfig) -> bool {
    let contexts = kubeconfig.contexts.iter();
    let mut current = contexts.filter(|own| Some(&own.name) == kubeconfig.current_context.as_ref());
    let context = current.next().and_then(|own| own.context.as_ref());
    let clusters = kubeconfig.clusters.iter();
    let mut named =
        clusters.filter(|own| context.is_some_and(|context| context.cluster == own.name));
    let cluster = named.next().and_then(|own| own.cluster.as_ref());
    let proxy = cluster.and_then(|cluster| cluster.proxy_url.as_deref());
    proxy.is_some_and(|proxy| !proxy.is_empty())
}

/// Returns the text of an error and of its causes.
fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    let mut texts: Vec<String> = causes.map(ToString::to_string).collect();
    // Many errors of libraries already have the text of their cause.
    for at in (1..texts.len()).rev() {
        if texts[at - 1].ends_with(&texts[at]) {
            texts.remove(at);
        }
    }
    shown(&texts.join(": "))
}

/// Makes a client at the first use, and again after failures, because credentials change.
#[derive(Debug)]
pub(crate) struct Connection {
    access: Access,
    counter: Arc<dyn Counter>,
    call_timeout: Duration,
    client: Option<Arc<Client>>,
    /// The client that is being made: a single one, however long its credentials take.
    making: Option<AbortOnDropHandle<Result<Client, ClientError>>>,
}

impl Connection {
    pub(crate) fn new(access: Access, counter: Arc<dyn Counter>, call_timeout: Duration) -> Self {
        Self { access, counter, call_timeout, client: None, making: None }
    }

    /// Returns the client, which is made if absent.
    pub(crate) async fn client(&mut self) -> Result<Arc<Client>, Failure> {
        if let Some(client) = &self.client {
            return Ok(Arc::clone(client));
        }
        let (access, counter) = (self.access.clone(), Arc::clone(&self.counter));
        let making = self.making.get_or_insert_with(|| {
            AbortOnDropHandle::new(tokio::spawn(async move { Client::new(&access, counter).await }))
        });
        let made = timeout(LOAD_TIMEOUT, making).await;
        let made = made.map_err(|_| Failure::TimedOut(LOAD_TIMEOUT))?;
        self.making = None;
        let made = made.map_err(|error| Failure::Unreachable(error.to_string()))?;
        let made = made.map_err(|error| Failure::Unreachable(error.to_string()))?;
        let made = Arc::new(Client { call_timeout: self.call_timeout, ..made });
        self.client = Some(Arc::clone(&made));
        Ok(made)
    }

    /// Drops the client if its credentials may be the reason of a failure, so that they are read
    /// again.
    pub(crate) fn failed(&mut self, failure: &Failure) {
        if matches!(
            failure,
            Failure::Denied(_)
                | Failure::Unauthenticated(_)
                | Failure::Unreachable(_)
                | Failure::TimedOut(_)
        ) {
            self.client = None;
        }
    }
}
