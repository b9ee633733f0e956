//! The requests of this node's pods, kept current by a list and a watch.
//!
//! Memory holds only the sums of each pod. A lookup of an unknown pod waits for the pod's change,
//! within the caller's limit.

use std::{collections::HashMap, sync::Arc, time::Duration};

use tokio::{sync::watch, time::timeout};
use tokio_util::task::AbortOnDropHandle;

use crate::{
    call::Call,
    client::Access,
    counter::Counter,
    failure::Failure,
    reflector::{Reflector, Watched},
    requests::{Footprint, Pod, Requests},
};

/// Bounds the remembered pods. A node runs far fewer.
const MAX_PODS: usize = 4096;

/// The known pods of the node.
#[derive(Debug, Default)]
struct KnownPods {
    /// False until the first list.
    is_listed: bool,
    pods: HashMap<String, KnownPod>,
}

#[derive(Debug, Clone, PartialEq)]
struct KnownPod {
    requests: Requests,
    footprint: Footprint,
    /// The pod's uid in CRI, once it has a sandbox.
    runs_as: Option<String>,
}

impl KnownPod {
    fn of(pod: &Pod) -> Self {
        let runs_as = pod.has_sandbox().then(|| pod.cri_uid().to_owned());
        Self { requests: pod.spec.requests(), footprint: pod.footprint(), runs_as }
    }
}

/// Sums the pods that the kubelet counts against the node. An informer keeps them current.
#[derive(Debug, Clone)]
pub struct Counted(watch::Receiver<KnownPods>);

impl Counted {
    /// Returns the sum of the node's pods; `None` until the first list.
    pub fn sum(&self) -> Option<Footprint> {
        let known = self.0.borrow();
        known.is_listed.then(|| known.pods.values().map(|pod| &pod.footprint).sum())
    }

    /// Returns the sum of the pods that have a sandbox and are not in cells, by their uids in CRI;
    /// `None` until the first list.
    pub fn outside_cells(&self, is_in_cell: impl Fn(&str) -> bool) -> Option<Footprint> {
        let known = self.0.borrow();
        let is_outside = |pod: &&KnownPod| pod.runs_as.as_ref().is_some_and(|uid| !is_in_cell(uid));
        let outside = known.pods.values().filter(is_outside);
        known.is_listed.then(|| outside.map(|pod| &pod.footprint).sum())
    }

    /// Waits until a pod changes. Returns whether the informer still runs.
    pub async fn changed(&mut self) -> bool {
        self.0.changed().await.is_ok()
    }
}

/// The running informer. Dropping it ends its task.
#[derive(Debug)]
pub struct PodInformer {
    known: watch::Receiver<KnownPods>,
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
        let (sender, known) = watch::channel(KnownPods::default());
        let pods = Pods { node, known: sender, listed: HashMap::new() };
        let task = Reflector::new(access, pods, first_pause, counter);
        Self { known, _task: AbortOnDropHandle::new(tokio::spawn(task.run())) }
    }

    /// Returns the requests of a pod by its uid. Waits up to `limit` for an unknown pod. Before the
    /// first list it does not wait, because the API server may be unreachable.
    pub async fn requests(&self, uid: &str, limit: Duration) -> Option<Requests> {
        let mut known = self.known.clone();
        if !known.borrow().is_listed {
            return None;
        }
        let found = timeout(limit, known.wait_for(|known| known.pods.contains_key(uid))).await;
        Some(found.ok()?.ok()?.pods.get(uid)?.requests.clone())
    }

    /// Returns the currently known requests of a pod by its uid.
    pub fn known(&self, uid: &str) -> Option<Requests> {
        Some(self.known.borrow().pods.get(uid)?.requests.clone())
    }

    /// Returns the pods that the kubelet counts against the node, current while this informer runs.
    pub fn counted(&self) -> Counted {
        Counted(self.known.clone())
    }
}

/// The pods of a node.
struct Pods {
    node: String,
    known: watch::Sender<KnownPods>,
    /// The pods of the list so far.
    listed: HashMap<String, KnownPod>,
}

impl Watched for Pods {
    type Object = Pod;

    fn list_call(&self, position: Option<&str>) -> Call {
        Call::list_pods(&self.node, position)
    }

    fn watch_call(&self, position: &str) -> Call {
        Call::watch_pods(&self.node, position)
    }

    fn version(pod: &Pod) -> &str {
        &pod.metadata.resource_version
    }

    fn take_part(&mut self, is_first: bool, pods: Vec<Pod>) {
        if is_first {
            self.listed.clear();
        }
        let pods = pods.into_iter().take(MAX_PODS.saturating_sub(self.listed.len()));
        self.listed.extend(pods.map(|pod| (pod.metadata.uid.clone(), KnownPod::of(&pod))));
    }

    fn end_list(&mut self) {
        let pods = std::mem::take(&mut self.listed);
        self.known.send_replace(KnownPods { is_listed: true, pods });
    }

    fn changed(&mut self, change: &str, pod: Pod) {
        let (own, uid) = (KnownPod::of(&pod), pod.metadata.uid);
        match change {
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
    }

    fn log_failed(failure: &Failure) {
        tracing::warn!(
            error = %failure,
            "requests of pods are not read from the Kubernetes API, cells are sized by CRI alone"
        );
    }

    fn log_recovered() {
        tracing::info!("requests of pods are read from the Kubernetes API again");
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use tokio::time::Instant;

    use super::*;

    /// Verifies K10.
    #[tokio::test(start_paused = true)]
    async fn lookup_of_an_unknown_pod_ends_after_its_bound() {
        let requests = Requests::default();
        let pod = KnownPod::of(&Pod::default());
        let known = KnownPods { is_listed: true, pods: [("known".to_owned(), pod)].into() };
        let (_sender, known) = watch::channel(known);
        let _task = AbortOnDropHandle::new(tokio::spawn(std::future::pending()));
        let informer = PodInformer { known, _task };
        let (limit, begun) = (Duration::from_millis(100), Instant::now());
        assert_eq!(informer.requests("known", limit).await, Some(requests));
        assert_eq!(begun.elapsed(), Duration::ZERO);
        assert_eq!(informer.requests("unknown", limit).await, None);
        // The clock advances only during the wait. Its timer has a resolution of 1 ms.
        assert!((limit..limit * 2).contains(&begun.elapsed()), "{:?}", begun.elapsed());
    }

    /// Returns a pod with a request of 1 CPU and an overhead of 1 GiB.
    fn pod(uid: &str, annotations: Value, status: Value) -> (String, KnownPod) {
        let containers = json!([{ "resources": { "requests": { "cpu": "1" } } }]);
        let pod = json!({
            "metadata": { "uid": uid, "annotations": annotations },
            "spec": { "containers": containers, "overhead": { "memory": "1Gi" } },
            "status": status,
        });
        (uid.to_owned(), KnownPod::of(&serde_json::from_value(pod).unwrap()))
    }

    /// Verifies A39.
    #[test]
    fn pods_outside_cells_count_from_their_sandbox_until_their_end() {
        let phase = |phase: &str| json!({ "phase": phase });
        let with_sandbox = |status: &str| {
            let ready = json!({ "type": "PodReadyToStartContainers", "status": status });
            json!({ "phase": "Pending", "conditions": [ready] })
        };
        let mirror = |uid: &str| json!({ "kubernetes.io/config.mirror": uid });
        let none = || json!({});
        let claimed = json!({ "kubernetes.io/target-runtime": "kiyot" });
        let pods = [
            pod("running", none(), phase("Running")),
            pod("kept on the node", claimed, phase("Running")),
            pod("initializing", none(), with_sandbox("True")),
            pod("static", mirror("hash-1"), phase("Running")),
            pod("new", none(), phase("Pending")),
            pod("without a status", none(), none()),
            pod("waiting", none(), with_sandbox("False")),
            pod("done", none(), phase("Succeeded")),
            pod("failed", none(), phase("Failed")),
            pod("cell", none(), phase("Running")),
            pod("static cell", mirror("hash-2"), phase("Running")),
        ];
        let sum = |is_listed| {
            let (_sender, known) =
                watch::channel(KnownPods { is_listed, pods: pods.clone().into() });
            let is_in_cell = |uid: &str| ["cell", "hash-2"].contains(&uid);
            let sum = Counted(known).outside_cells(is_in_cell)?;
            Some(["cpu", "memory"].map(|name| sum.amount(name)))
        };
        assert_eq!(sum(true), Some([4000, 4 << 30]));
        assert_eq!(sum(false), None);
    }
}
