//! Standalone pods: pods that an operator creates, and that the daemon runs without a kubelet.
//!
//! A pod is recorded with its manifest before anything is made of it. Its task compares what the
//! manifest wants with what runs, and takes a step at a time, by the calls of CRI that a kubelet
//! would send. The calls are idempotent, so that a restarted daemon goes on where the previous run
//! ended. No list of CRI has the pods: a kubelet would end them.
//!
//! The daemon does not probe the containers, and runs no lifecycle hooks.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use kiyot_proto::store::{StandaloneEnd, StandalonePod};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::Status;

use super::{
    cells::{Cells, Subject},
    clock,
    cri::CriService,
    id::{NoRandomness, random_uid},
    store::{Batch, Store, StoreError, Table},
    tasks::Tasks,
};
use crate::{
    blocking::blocking,
    error_chain::error_chain,
    manifest::{self, Dns, File, Node, Pod, RestartPolicy, Volume},
};

mod end;
mod failures;
mod log_rotation;
mod mounts;
mod node;
mod observed;
mod plan;
mod runner;

use runner::Runner;

/// Time limit of the tasks when the daemon stops.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(5);
/// Bounds the standalone pods of a node.
const MAX_PODS: usize = 256;
/// Bounds the manifest of a request in bytes, all its files in sum.
pub const MAX_MANIFEST_BYTES: usize = 1024 * 1024;
/// Bounds the records of a request in bytes.
const MAX_STORED_BYTES: usize = 8 * 1024 * 1024;
/// The grace period of a pod whose manifest can't be read, as Kubernetes has it by default.
const DEFAULT_GRACE_SECONDS: i64 = 30;
/// Bounds the files of a request.
const MAX_FILES: usize = 64;

/// A pod that was created.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Created {
    /// The namespace.
    pub namespace: String,
    /// The name.
    pub name: String,
    /// The uid, which the daemon chooses.
    pub uid: String,
    /// The fields of its manifest without an effect.
    pub warnings: Vec<String>,
}

/// A pod as operators see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct View {
    /// The namespace.
    pub(crate) namespace: String,
    /// The name.
    pub(crate) name: String,
    /// The uid.
    pub(crate) uid: String,
    /// The time of its creation, in nanoseconds since 1970.
    pub(crate) created_unix_nanos: i64,
    /// The error of its last step; empty after a step that succeeded.
    pub(crate) error: String,
    /// True once its end was requested.
    pub(crate) is_ending: bool,
    /// True once its `activeDeadlineSeconds` have passed.
    pub(crate) is_expired: bool,
}

/// The parts of a pod's spec that lists show.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Shape {
    /// The labels.
    pub(crate) labels: HashMap<String, String>,
    /// The restart policy.
    pub(crate) restart_policy: &'static str,
    /// Its containers, init containers first.
    pub(crate) containers: Vec<ContainerShape>,
    /// The number of its init containers.
    pub(crate) init_containers: usize,
    /// The names of the Secrets with the credentials of its images.
    pub(crate) pull_secrets: Vec<String>,
}

/// A container of a pod's spec.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct ContainerShape {
    /// The name.
    pub(crate) name: String,
    /// The image, as the manifest names it.
    pub(crate) image: String,
}

impl Shape {
    fn of(pod: &Pod) -> Self {
        let container = |container: &manifest::Container| ContainerShape {
            name: container.name.clone(),
            image: container.image.clone(),
        };
        Self {
            labels: pod.metadata.labels.clone().into_iter().collect(),
            restart_policy: match pod.restart_policy {
                RestartPolicy::Always => "Always",
                RestartPolicy::OnFailure => "OnFailure",
                RestartPolicy::Never => "Never",
            },
            containers: pod.all_containers().map(container).collect(),
            init_containers: pod.init_containers.len(),
            pull_secrets: pod.pull_secrets.names().to_vec(),
        }
    }
}

/// The parts that standalone pods need.
#[derive(Debug)]
pub(crate) struct Parts {
    /// The store of records.
    pub(crate) store: Store,
    /// The service of CRI.
    pub(crate) cri: Arc<CriService>,
    /// The cells.
    pub(crate) cells: Arc<Cells>,
    /// The directory of volumes and logs.
    pub(crate) dir: PathBuf,
}

/// The standalone pods of a backend.
#[derive(Debug)]
pub(crate) struct Standalone {
    parts: Parts,
    pods: Mutex<BTreeMap<String, Arc<Entry>>>,
    /// Held during a creation, so that names stay unique.
    creating: tokio::sync::Mutex<()>,
    tasks: Tasks,
}

/// The errors of a pod's last steps.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct Errors {
    /// All of them.
    text: String,
    /// Those of its containers, by name.
    containers: BTreeMap<String, String>,
}

/// A pod and its task.
#[derive(Debug)]
struct Entry {
    uid: String,
    namespace: String,
    name: String,
    created_unix_nanos: i64,
    /// The seconds that its containers have to end, unless the request says otherwise.
    grace_seconds: i64,
    /// `None` if its manifest can't be read.
    shape: Option<Arc<Shape>>,
    errors: Mutex<Errors>,
    /// True once its `activeDeadlineSeconds` have passed.
    is_expired: AtomicBool,
    /// The seconds that its containers have to end, once its end is requested.
    end: watch::Sender<Option<i64>>,
    /// Held while its end is recorded.
    recording: tokio::sync::Mutex<()>,
    /// Cancelled once nothing is left of it.
    ended: CancellationToken,
}

impl Entry {
    fn new(
        uid: String,
        record: &StandalonePod,
        pod: Option<&Pod>,
        end: Option<StandaloneEnd>,
    ) -> Arc<Self> {
        Arc::new(Self {
            uid,
            namespace: record.namespace.clone(),
            name: record.name.clone(),
            created_unix_nanos: record.created_unix_nanos,
            grace_seconds: pod.map_or(DEFAULT_GRACE_SECONDS, |pod| pod.grace_secs),
            shape: pod.map(|pod| Arc::new(Shape::of(pod))),
            errors: Mutex::default(),
            is_expired: AtomicBool::new(false),
            end: watch::Sender::new(end.map(|end| end.grace_seconds)),
            recording: tokio::sync::Mutex::default(),
            ended: CancellationToken::new(),
        })
    }

    fn errors(&self) -> MutexGuard<'_, Errors> {
        self.errors.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the error of the pod, which is none of its containers.
    fn set_error(&self, text: impl Into<String>) {
        *self.errors() = Errors { text: text.into(), ..Errors::default() };
    }

    /// Returns its name in events and logs.
    fn pod(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }
}

impl Standalone {
    /// Makes the directory of volumes and logs. Called before cells connect, because their logs are
    /// opened then. Returns its path without links, as the paths of the table of mounts.
    pub(crate) async fn prepare(dir: PathBuf) -> PathBuf {
        let path = dir.clone();
        let prepared = blocking(move || {
            runner::private_dir(&path)?;
            let path = std::fs::canonicalize(path)?;
            log_rotation::recover(&path.join(node::LOGS));
            Ok(path)
        });
        prepared.await.unwrap_or_else(|error| {
            tracing::error!(
                path = %dir.display(),
                %error,
                "directory of standalone pods not prepared"
            );
            dir
        })
    }

    /// Starts the tasks of the recorded pods.
    pub(crate) async fn start(parts: Parts) -> Result<Arc<Self>, StoreError> {
        let records: Vec<(String, StandalonePod)> = parts.store.load(Table::StandalonePods).await?;
        let ends: Vec<(String, StandaloneEnd)> = parts.store.load(Table::StandaloneEnds).await?;
        let mut ends: HashMap<_, _> = ends.into_iter().collect();
        let standalone = Arc::new(Self {
            parts,
            pods: Mutex::default(),
            creating: tokio::sync::Mutex::default(),
            tasks: Tasks::default(),
        });
        let dns = node::dns();
        for (uid, record) in records {
            let pod = pod_of(&uid, &record);
            if let Err(error) = &pod {
                tracing::error!(
                    pod = format!("{}/{}", record.namespace, record.name),
                    error,
                    "manifest of a standalone pod can't be read, it is only ended"
                );
            }
            let end = ends.remove(&uid);
            let node = standalone.node(&dns, &record);
            standalone.run(Entry::new(uid, &record, pod.as_ref().ok(), end), pod, node);
        }
        // An end that was requested just when its pod had ended.
        let mut batch = Batch::default();
        for uid in ends.keys() {
            batch.remove(Table::StandaloneEnds, uid);
        }
        standalone.parts.store.commit(batch).await?;
        Ok(standalone)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Entry>>> {
        self.pods.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records the pods of a manifest, all of them or none, and starts their tasks.
    pub(crate) async fn create(self: &Arc<Self>, files: Vec<File>) -> Result<Vec<Created>, Status> {
        let bytes: usize = files.iter().map(|file| file.text.len()).sum();
        if bytes > MAX_MANIFEST_BYTES || files.len() > MAX_FILES {
            return Err(Status::invalid_argument(format!(
                "the manifest has {bytes} bytes in {} files; allowed: {MAX_MANIFEST_BYTES} bytes \
                 in {MAX_FILES} files",
                files.len()
            )));
        }
        let manifest = manifest::parse_files(&files, manifest::Purpose::Run)
            .map_err(|problems| Status::invalid_argument(problems.to_string()))?;
        let stored = bytes.saturating_mul(manifest.pods.len());
        if stored > MAX_STORED_BYTES {
            return Err(Status::invalid_argument(format!(
                "the manifest has {} pods in {bytes} bytes, each recorded with all of it: {stored} \
                 bytes; allowed: {MAX_STORED_BYTES}; create the pods in several steps",
                manifest.pods.len()
            )));
        }
        let texts: Vec<String> = files.into_iter().map(|file| file.text).collect();
        let _creating = self.creating.lock().await;
        self.check_room(&manifest.pods)?;
        let (mut batch, mut created) = (Batch::default(), Vec::new());
        // Annotations have the time, by which the pod of an ImageStatus is found.
        let mut latest = 0;
        let dns = node::dns();
        for pod in manifest.pods {
            let uid = random_uid()
                .map_err(|error: NoRandomness| Status::internal(error_chain(&error)))?;
            let record = StandalonePod {
                namespace: pod.metadata.namespace.clone(),
                name: pod.metadata.name.clone(),
                manifest: texts.clone(),
                created_unix_nanos: clock::now_after(latest),
            };
            latest = record.created_unix_nanos;
            let pod = with_uid(pod, &uid);
            let node = self.node(&dns, &record);
            self.parts.cri.check_standalone(&runner::sandbox_config(&pod, &node, 0)).map_err(
                |status| {
                    let message = status.message();
                    Status::new(status.code(), format!("pod {}: {message}", record.name))
                },
            )?;
            batch.put(Table::StandalonePods, &uid, &record);
            created.push((Entry::new(uid, &record, Some(&pod), None), pod, node));
        }
        self.parts.store.commit(batch).await.map_err(|error| {
            Status::internal(format!("the pods are not recorded: {}", error_chain(&error)))
        })?;
        let mut answer = Vec::new();
        for (entry, pod, node) in created {
            answer.push(Created {
                namespace: entry.namespace.clone(),
                name: entry.name.clone(),
                uid: entry.uid.clone(),
                warnings: pod.volumes.iter().filter_map(Volume::limit_without_effect).collect(),
            });
            self.event(&entry, "Created", "by an operator, without a kubelet");
            self.run(entry, Ok(pod), node);
        }
        Ok(answer)
    }

    /// Returns an error if the node has no room for pods, or has pods of these names.
    fn check_room(&self, pods: &[Pod]) -> Result<(), Status> {
        let known = self.lock().len();
        if known + pods.len() > MAX_PODS {
            return Err(Status::resource_exhausted(format!(
                "{known} standalone pods and {} more; allowed: {MAX_PODS} on a node",
                pods.len()
            )));
        }
        let mut names: HashSet<String> = self.lock().values().map(|entry| entry.pod()).collect();
        let sandboxes = self.parts.cri.pods().latest_sandboxes().into_iter();
        names.extend(sandboxes.map(|(_, name, ..)| name.to_string()));
        let orders = self.parts.cells.orders().into_iter();
        names.extend(orders.map(|order| format!("{}/{}", order.namespace, order.name)));
        let mut own = HashSet::new();
        for pod in pods {
            let name = format!("{}/{}", pod.metadata.namespace, pod.metadata.name);
            if names.contains(&name) {
                return Err(Status::already_exists(format!("pod {name} exists on this node")));
            }
            if !own.insert(name.clone()) {
                return Err(Status::invalid_argument(format!(
                    "the manifest has two pods {name}; allowed: a pod of each name"
                )));
            }
        }
        Ok(())
    }

    /// Returns the node as a pod sees it.
    fn node(&self, dns: &Dns, record: &StandalonePod) -> Node {
        node::node(&self.parts.dir, dns.clone(), record.created_unix_nanos)
    }

    fn run(self: &Arc<Self>, entry: Arc<Entry>, pod: Result<Pod, String>, node: Node) {
        self.lock().insert(entry.uid.clone(), Arc::clone(&entry));
        let standalone = Arc::clone(self);
        self.tasks.spawn(async move {
            let runner = Runner::new(Arc::clone(&standalone), Arc::clone(&entry), pod, node);
            Box::pin(runner.run()).await;
            standalone.lock().remove(&entry.uid);
            entry.ended.cancel();
        });
    }

    /// Ends a pod: its containers have the given seconds, by default those of its manifest. Returns
    /// once nothing is left of it; a caller that leaves does not stop the end. A later call may
    /// only shorten the time, as in Kubernetes.
    pub(crate) async fn delete(&self, uid: &str, grace: Option<i64>) -> Result<(), Status> {
        let entry = self.lock().get(uid).cloned().ok_or_else(|| {
            Status::failed_precondition(
                "it is the kubelet's pod; allowed: kubectl delete, or milpactl drain for its cell",
            )
        })?;
        let grace = grace.unwrap_or(entry.grace_seconds);
        // A call at a time, or else an earlier record replaces that of a shorter time.
        let recording = entry.recording.lock().await;
        let grace_seconds = entry.end.borrow().map_or(grace, |requested| requested.min(grace));
        let mut batch = Batch::default();
        batch.put(Table::StandaloneEnds, uid, &StandaloneEnd { grace_seconds });
        // Recorded first: what was answered outlives the daemon.
        self.parts.store.commit(batch).await.map_err(|error| {
            Status::internal(format!("the end is not recorded: {}", error_chain(&error)))
        })?;
        let message = format!("by an operator, grace period {grace_seconds} s");
        self.event(&entry, "Deleted", &message);
        entry.end.send_replace(Some(grace_seconds));
        drop(recording);
        entry.ended.cancelled().await;
        Ok(())
    }

    /// Returns all standalone pods.
    pub(crate) fn views(&self) -> Vec<View> {
        let view = |entry: &Arc<Entry>| View {
            namespace: entry.namespace.clone(),
            name: entry.name.clone(),
            uid: entry.uid.clone(),
            created_unix_nanos: entry.created_unix_nanos,
            error: entry.errors().text.clone(),
            is_ending: entry.end.borrow().is_some(),
            is_expired: entry.is_expired.load(Ordering::Relaxed),
        };
        self.lock().values().map(view).collect()
    }

    /// Returns true for the uid of a standalone pod.
    pub(crate) fn has(&self, uid: &str) -> bool {
        self.lock().contains_key(uid)
    }

    /// Returns the parts of a pod's spec that lists show.
    pub(crate) fn shape_of(&self, uid: &str) -> Option<Arc<Shape>> {
        self.lock().get(uid).and_then(|entry| entry.shape.clone())
    }

    /// Returns true once the `activeDeadlineSeconds` of a pod have passed.
    pub(crate) fn is_expired(&self, uid: &str) -> bool {
        self.lock().get(uid).is_some_and(|entry| entry.is_expired.load(Ordering::Relaxed))
    }

    /// Returns the error of a pod's last step; empty without one.
    pub(crate) fn error_of(&self, uid: &str) -> String {
        self.lock().get(uid).map(|entry| entry.errors().text.clone()).unwrap_or_default()
    }

    /// Returns the errors of the last steps of a pod's containers, by name.
    pub(crate) fn container_errors(&self, uid: &str) -> BTreeMap<String, String> {
        let errors = |entry: &Arc<Entry>| entry.errors().containers.clone();
        self.lock().get(uid).map(errors).unwrap_or_default()
    }

    /// Ends all tasks. Pods go on.
    pub(crate) async fn shutdown(&self) {
        if let Err(tasks) = self.tasks.shutdown(SHUTDOWN_TIMEOUT).await {
            tracing::warn!(tasks, "tasks of standalone pods did not end in time");
        }
    }

    fn event(&self, entry: &Entry, status: &'static str, message: &str) {
        let (name, uid) = (entry.pod(), entry.uid.clone());
        let pod = Subject::Pod { name, uid, is_standalone: true };
        self.parts.cells.history().add(pod, status, message);
    }

    fn dir(&self) -> &Path {
        &self.parts.dir
    }
}

/// Returns the pod of a record.
fn pod_of(uid: &str, record: &StandalonePod) -> Result<Pod, String> {
    let file = |text: &String| File { name: "manifest".to_owned(), text: text.clone() };
    let files: Vec<File> = record.manifest.iter().map(file).collect();
    let manifest = manifest::parse_files(&files, manifest::Purpose::Run)
        .map_err(|problems| problems.to_string())?;
    let is_it =
        |pod: &Pod| pod.metadata.namespace == record.namespace && pod.metadata.name == record.name;
    let pod = manifest.pods.into_iter().find(is_it);
    Ok(with_uid(pod.ok_or("its manifest has no pod of its name")?, uid))
}

/// Gives a pod the uid that the daemon chose, and the node's name servers: a node without a
/// kubelet has no cluster.
fn with_uid(mut pod: Pod, uid: &str) -> Pod {
    use manifest::DnsPolicy;
    uid.clone_into(&mut pod.metadata.uid);
    if pod.dns_policy != DnsPolicy::None {
        pod.dns_policy = DnsPolicy::Default;
    }
    pod
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[tokio::test]
    async fn directory_is_private() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("standalone");
        // A later start does the same.
        for _ in 0..2 {
            assert_eq!(Standalone::prepare(path.clone()).await, path);
            assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o700);
        }
    }
}
