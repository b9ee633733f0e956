//! The requests of this node's pods, kept current by a list and a watch.
//!
//! Memory has the sums of each pod alone. A pod that is looked up before its change has arrived is
//! waited for, within the bound that its caller names.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::BytesMut;
use http_body_util::BodyExt;
use serde::Deserialize;
use tokio::{
    sync::watch,
    time::{sleep, timeout},
};
use tokio_util::task::AbortOnDropHandle;

use crate::{
    call::{Call, WATCH_SECONDS},
    client::{Access, CALL_TIMEOUT, Connection},
    counter::Counter,
    failure::Failure,
    gate::{FIRST_PAUSE, Gate},
    requests::{Footprint, Pod, Requests},
};

/// Most pods that are remembered: many times what a node runs.
const MAX_PODS: usize = 4096;
/// Most parts of a list.
const MAX_PARTS: usize = 100;
/// Longest change of a watch, in bytes: etcd refuses objects beyond 1.5 MiB.
const MAX_CHANGE_BYTES: usize = 4 * 1024 * 1024;
/// Time without a byte, beyond the watch's own end, after which the connection counts as dead.
const WATCH_GRACE: Duration = Duration::from_secs(15);

/// The pods of the node that are known.
#[derive(Debug, Default)]
struct Known {
    /// False before the first list.
    is_listed: bool,
    pods: HashMap<String, KnownPod>,
}

#[derive(Debug, Clone, PartialEq)]
struct KnownPod {
    requests: Requests,
    footprint: Footprint,
}

impl KnownPod {
    fn of(pod: &Pod) -> Self {
        Self { requests: pod.spec.requests(), footprint: pod.footprint() }
    }
}

/// Sums the pods that the kubelet counts against the node; an informer keeps them current.
#[derive(Debug, Clone)]
pub struct Counted(watch::Receiver<Known>);

impl Counted {
    /// Returns the sum of the node's pods; `None` before the first list.
    pub fn sum(&self) -> Option<Footprint> {
        let known = self.0.borrow();
        known.is_listed.then(|| known.pods.values().map(|pod| &pod.footprint).sum())
    }
}

/// The running informer. Dropping it ends its task.
#[derive(Debug)]
pub struct PodInformer {
    known: watch::Receiver<Known>,
    _task: AbortOnDropHandle<()>,
}

impl PodInformer {
    /// Starts the task. Called on a runtime of tokio.
    pub fn start(
        access: Access,
        node: String,
        first_pause: Option<Duration>,
        counter: Arc<dyn Counter>,
    ) -> Self {
        let (sender, known) = watch::channel(Known::default());
        let task = Task {
            connection: Connection::new(access, counter, CALL_TIMEOUT),
            node,
            known: sender,
            gate: Gate::new(first_pause.unwrap_or(FIRST_PAUSE)),
            has_expired: false,
        };
        Self { known, _task: AbortOnDropHandle::new(tokio::spawn(task.run())) }
    }

    /// Returns the requests of a pod by its uid. An unknown pod is waited for, for `limit` at most;
    /// not before the first list, because then the API server may be out of reach.
    pub async fn requests(&self, uid: &str, limit: Duration) -> Option<Requests> {
        let mut known = self.known.clone();
        if !known.borrow().is_listed {
            return None;
        }
        let found = timeout(limit, known.wait_for(|known| known.pods.contains_key(uid))).await;
        Some(found.ok()?.ok()?.pods.get(uid)?.requests.clone())
    }

    /// Returns the requests of a pod by its uid, as far as they are known now.
    pub fn known(&self, uid: &str) -> Option<Requests> {
        Some(self.known.borrow().pods.get(uid)?.requests.clone())
    }

    /// Returns the pods that the kubelet counts against the node, current while this informer runs.
    pub fn counted(&self) -> Counted {
        Counted(self.known.clone())
    }
}

struct Task {
    connection: Connection,
    node: String,
    known: watch::Sender<Known>,
    gate: Gate,
    /// True after a watch whose position had expired, until a change or the end of another.
    has_expired: bool,
}

/// A change of a watch.
#[derive(Debug, Deserialize)]
struct Change {
    r#type: String,
    object: serde_json::Value,
}

/// A part of a list of pods.
#[derive(Debug, Deserialize)]
#[serde(default, rename_all = "camelCase")]
#[derive(Default)]
struct List {
    metadata: ListMetadata,
    items: Vec<Pod>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct ListMetadata {
    r#continue: String,
    resource_version: String,
}

impl Task {
    async fn run(mut self) {
        let mut position = String::new();
        // A server that ends each watch at once is not asked more often than this.
        let mut watch_at = Instant::now();
        let mut has_watch_failed = false;
        loop {
            let is_watch = !position.is_empty();
            if is_watch {
                sleep(watch_at.saturating_duration_since(Instant::now())).await;
                watch_at = Instant::now() + self.gate.first_pause();
            }
            let outcome = if is_watch {
                self.watch(&mut position).await
            } else {
                self.list().await.map(|listed| position = listed)
            };
            match outcome {
                // A list ends no row of failures of the watch.
                Ok(()) if has_watch_failed && !is_watch => {}
                Ok(()) => {
                    has_watch_failed = false;
                    self.has_expired &= !is_watch;
                    self.succeeded();
                }
                // The changes since the position are lost: the list has them. The position of a
                // list that has just been read does not expire.
                Err(Failure::Expired(_)) if is_watch && !self.has_expired => {
                    self.has_expired = true;
                    position.clear();
                }
                Err(failure) => {
                    has_watch_failed = is_watch;
                    self.connection.failed(&failure);
                    if self.gate.failed(&failure, Instant::now(), fastrand::f64()) {
                        tracing::warn!(
                            error = %failure,
                            "requests of pods are not read from the Kubernetes API, cells are \
                             sized by those of CRI"
                        );
                    }
                    sleep(self.gate.left(Instant::now())).await;
                }
            }
        }
    }

    /// Notes that requests are read.
    fn succeeded(&mut self) {
        if self.gate.succeeded() {
            tracing::info!("requests of pods are read from the Kubernetes API again");
        }
    }

    /// Lists the pods, and returns the position of the list.
    async fn list(&mut self) -> Result<String, Failure> {
        let client = self.connection.client().await?;
        let (mut pods, mut position) = (HashMap::new(), String::new());
        for _ in 0..MAX_PARTS {
            let part: List = client.object(&Call::list_pods(&self.node, &position)).await?;
            let items = part.items.into_iter().take(MAX_PODS.saturating_sub(pods.len()));
            pods.extend(items.map(|pod| (pod.metadata.uid.clone(), KnownPod::of(&pod))));
            position = part.metadata.r#continue;
            if position.is_empty() {
                self.known.send_replace(Known { is_listed: true, pods });
                return Ok(part.metadata.resource_version);
            }
        }
        let message = format!("list has more than {MAX_PARTS} parts");
        Err(Failure::Server { status: 200, message })
    }

    /// Follows the changes from a position until the watch ends. After a failure without a change
    /// the position is empty: it may be the reason.
    async fn watch(&mut self, position: &mut String) -> Result<(), Failure> {
        let mut has_change = false;
        match self.follow(position, &mut has_change).await {
            // Proxies cut connections. The position has everything until then.
            Err(Failure::Unreachable(_) | Failure::TimedOut(_)) if has_change => Ok(()),
            Err(failure) => {
                if !has_change {
                    position.clear();
                }
                Err(failure)
            }
            Ok(()) => Ok(()),
        }
    }

    async fn follow(
        &mut self,
        position: &mut String,
        has_change: &mut bool,
    ) -> Result<(), Failure> {
        let client = self.connection.client().await?;
        let limit = Duration::from_secs(WATCH_SECONDS) + WATCH_GRACE;
        let call = Call::watch_pods(&self.node, position);
        let mut body = client.stream(&call, WATCH_GRACE).await?;
        let mut read = BytesMut::new();
        loop {
            let frame = timeout(limit, body.frame()).await.map_err(|_| Failure::TimedOut(limit))?;
            let Some(frame) = frame else { return Ok(()) };
            let frame = frame.map_err(|error| Failure::Unreachable(error.to_string()))?;
            let Ok(data) = frame.into_data() else { continue };
            if read.len() + data.len() > MAX_CHANGE_BYTES {
                let message = format!("change of a watch has more than {MAX_CHANGE_BYTES} bytes");
                position.clear();
                return Err(Failure::Server { status: 200, message });
            }
            read.extend_from_slice(&data);
            while let Some(end) = read.iter().position(|byte| *byte == b'\n') {
                let line = read.split_to(end + 1);
                self.changed(&line, position)?;
                *has_change = true;
                self.has_expired = false;
                self.succeeded();
            }
        }
    }

    fn changed(&self, line: &[u8], position: &mut String) -> Result<(), Failure> {
        let not_understood = |error: serde_json::Error| Failure::Server {
            status: 200,
            message: format!("change of a watch is not understood: {error}"),
        };
        let change: Change = serde_json::from_slice(line).map_err(not_understood)?;
        if change.r#type == "ERROR" {
            let message = crate::failure::shown(change.object["message"].as_str().unwrap_or(""));
            return Err(match change.object["code"].as_u64() {
                Some(410) => Failure::Expired(message),
                code => {
                    let status = code.and_then(|code| u16::try_from(code).ok());
                    Failure::Server { status: status.unwrap_or(500), message }
                }
            });
        }
        // A bookmark has the position alone; its other fields are not those of a pod.
        if change.r#type == "BOOKMARK" {
            let version = change.object["metadata"]["resourceVersion"].as_str();
            version.unwrap_or_default().clone_into(position);
            return Ok(());
        }
        let pod: Pod = serde_json::from_value(change.object).map_err(not_understood)?;
        pod.metadata.resource_version.clone_into(position);
        let (own, uid) = (KnownPod::of(&pod), pod.metadata.uid);
        match change.r#type.as_str() {
            "ADDED" | "MODIFIED" => {
                self.known.send_if_modified(|known| {
                    let has_place = known.pods.len() < MAX_PODS || known.pods.contains_key(&uid);
                    has_place && known.pods.insert(uid, own.clone()) != Some(own)
                });
            }
            "DELETED" => {
                self.known.send_if_modified(|known| known.pods.remove(&uid).is_some());
            }
            _ => {}
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    /// Verifies K10.
    #[tokio::test(start_paused = true)]
    async fn lookup_of_an_unknown_pod_ends_after_its_bound() {
        let requests = Requests::default();
        let pod = KnownPod { requests: requests.clone(), footprint: Footprint::default() };
        let known = Known { is_listed: true, pods: [("known".to_owned(), pod)].into() };
        let (_sender, known) = watch::channel(known);
        let _task = AbortOnDropHandle::new(tokio::spawn(std::future::pending()));
        let informer = PodInformer { known, _task };
        let (limit, begun) = (Duration::from_millis(100), Instant::now());
        assert_eq!(informer.requests("known", limit).await, Some(requests));
        assert_eq!(begun.elapsed(), Duration::ZERO);
        assert_eq!(informer.requests("unknown", limit).await, None);
        // The clock stands still but for the wait, whose timer has a resolution of 1 ms.
        assert!((limit..limit * 2).contains(&begun.elapsed()), "{:?}", begun.elapsed());
    }
}
