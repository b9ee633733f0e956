//! A CRI client that calls as a kubelet does: the same order, labels, annotations, mounts and paths
//! (kubelet 1.3x, kuberuntime).

use std::{
    collections::BTreeMap,
    fmt, fs,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::{
    Status,
    transport::{Channel, Endpoint, Uri},
};
use tower::service_fn;

use crate::{
    command,
    cri::{
        self, image_service_client::ImageServiceClient,
        runtime_service_client::RuntimeServiceClient,
    },
    wait_until,
};

mod calls;
mod cgroups;
mod configs;
mod pod;
pub mod volumes;

pub use calls::{ExecOutput, LogLine};
pub use cgroups::CgroupDriver;
pub use pod::{Container, Pod, Volume};

/// The largest message of the kubelet's client (cri-client/pkg/remote_runtime.go, maxMsgSize).
const MAX_MESSAGE: usize = 16 * 1024 * 1024;

/// Where a kubelet keeps what is its own.
#[derive(Debug, Clone)]
pub struct Directories {
    /// /var/lib/kubelet.
    pub root: PathBuf,
    /// /var/log/pods.
    pub logs: PathBuf,
    /// The name of the control group of all pods.
    pub cgroup: String,
    /// How control groups are made.
    pub driver: CgroupDriver,
}

/// A kubelet's connection to CRI.
#[derive(Debug, Clone)]
pub struct Kubelet {
    /// The runtime service, for calls that have no helper here.
    pub runtime: RuntimeServiceClient<Channel>,
    /// The image service.
    pub image: ImageServiceClient<Channel>,
    directories: Directories,
    /// How often it was restarted. Clones are the same kubelet.
    restarts: Arc<AtomicU32>,
}

/// A pod that runs.
#[derive(Debug, Clone)]
pub struct RunningPod {
    /// What it was made of.
    pub spec: Pod,
    /// Its sandbox's id.
    pub sandbox: String,
    /// The config with which the sandbox was run.
    pub config: cri::PodSandboxConfig,
    /// Its containers by name.
    pub containers: BTreeMap<String, RunningContainer>,
}

impl RunningPod {
    /// One of its containers.
    ///
    /// # Panics
    /// When it has none of this name.
    pub fn container(&self, name: &str) -> &RunningContainer {
        self.containers
            .get(name)
            .unwrap_or_else(|| panic!("the pod {} has no container {name}", self.spec.name))
    }
}

/// A container that was created.
#[derive(Debug, Clone)]
pub struct RunningContainer {
    /// Its id.
    pub id: String,
    /// Its log file on the node.
    pub log: PathBuf,
    /// Its termination message's file on the node.
    pub termination: PathBuf,
    /// The config with which it was created.
    pub config: cri::ContainerConfig,
}

impl Kubelet {
    /// Connects to a CRI socket.
    pub async fn connect(
        socket: &Path,
        directories: Directories,
    ) -> Result<Self, tonic::transport::Error> {
        let socket = socket.to_owned();
        // The name of the host is what grpc-go sends for a unix socket.
        let connector = service_fn(move |_: Uri| {
            let socket = socket.clone();
            async move { UnixStream::connect(socket).await.map(TokioIo::new) }
        });
        let channel =
            Endpoint::from_static("http://localhost").connect_with_connector(connector).await?;
        let runtime = RuntimeServiceClient::new(channel.clone())
            .max_decoding_message_size(MAX_MESSAGE)
            .max_encoding_message_size(MAX_MESSAGE);
        let image = ImageServiceClient::new(channel)
            .max_decoding_message_size(MAX_MESSAGE)
            .max_encoding_message_size(MAX_MESSAGE);
        Ok(Self { runtime, image, directories, restarts: Arc::default() })
    }

    /// Restarts the kubelet: from now on each pod has another `kubernetes.io/config.seen`, the time
    /// at which this run of the kubelet saw it first. All else that a kubelet sends of a pod stays.
    pub fn restart(&self) {
        self.restarts.fetch_add(1, Ordering::Relaxed);
    }

    /// The kubelet's directory of one pod.
    pub fn pod_directory(&self, uid: &str) -> PathBuf {
        self.directories.root.join("pods").join(uid)
    }

    /// Makes what a kubelet makes before the sandbox: the pod's directories, volumes and hosts
    /// file. Gives the sandbox's config.
    pub fn prepare(&self, pod: &Pod) -> cri::PodSandboxConfig {
        let config = self.sandbox_config(pod, &self.directories);
        let directory = self.pod_directory(&pod.uid);
        fs::create_dir_all(directory.join("containers")).expect("the pod's directory can be made");
        fs::create_dir_all(&config.log_directory).expect("the log directory can be made");
        fs::write(
            directory.join("etc-hosts"),
            format!("# Kubernetes-managed hosts file.\n127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost\n# {}\n", pod.name),
        )
        .expect("the hosts file can be written");
        for volume in &pod.volumes {
            volumes::make(&directory, volume);
        }
        cgroups::make(&self.directories, pod);
        config
    }

    /// Runs a whole pod: volumes, sandbox, images, and every container created and started in turn.
    pub async fn run_pod(&mut self, pod: &Pod) -> Result<RunningPod, Status> {
        let config = self.prepare(pod);
        let sandbox = self.run_sandbox(&config, &pod.runtime_handler).await?;
        let mut running = self.running(pod, config, sandbox);
        // As the kubelet does, to learn the pod's addresses.
        self.sandbox_status(&running.sandbox).await?;
        for container in &pod.containers {
            let created = self.create_container(&running, container, 0).await?;
            self.start_container(&created.id).await?;
            running.containers.insert(container.name.clone(), created);
        }
        Ok(running)
    }

    /// A pod whose sandbox was run without [`run_pod`](Self::run_pod), still without containers.
    pub fn running(&self, pod: &Pod, config: cri::PodSandboxConfig, sandbox: String) -> RunningPod {
        RunningPod { spec: pod.clone(), sandbox, config, containers: BTreeMap::new() }
    }

    /// Stops all of a pod and removes it, its volumes, logs and control groups, as a kubelet and
    /// its garbage collection do.
    pub async fn stop_and_remove(&mut self, pod: &RunningPod) -> Result<(), Status> {
        self.stop_pod(pod).await?;
        self.remove_pod(pod).await
    }

    /// Stops the containers and the sandbox.
    pub async fn stop_pod(&mut self, pod: &RunningPod) -> Result<(), Status> {
        for container in pod.containers.values() {
            self.stop_container(&container.id, pod.spec.grace).await?;
        }
        self.runtime
            .stop_pod_sandbox(cri::StopPodSandboxRequest { pod_sandbox_id: pod.sandbox.clone() })
            .await?;
        Ok(())
    }

    /// Removes a stopped pod and all that [`prepare`](Self::prepare) made.
    pub async fn remove_pod(&mut self, pod: &RunningPod) -> Result<(), Status> {
        for container in pod.containers.values() {
            self.runtime
                .remove_container(cri::RemoveContainerRequest {
                    container_id: container.id.clone(),
                })
                .await?;
        }
        self.runtime
            .remove_pod_sandbox(cri::RemovePodSandboxRequest {
                pod_sandbox_id: pod.sandbox.clone(),
            })
            .await?;
        self.forget(&pod.spec);
        Ok(())
    }

    /// Removes what is the kubelet's own of a pod.
    pub fn forget(&self, pod: &Pod) {
        let directory = self.pod_directory(&pod.uid);
        for volume in &pod.volumes {
            volumes::unmake(&directory, volume);
        }
        let _ = kiyot_tree::remove_path(&directory);
        let _ = kiyot_tree::remove_path(&self.log_directory(pod));
        cgroups::remove(&self.directories, pod);
    }

    /// Writes a ConfigMap, Secret or projected volume anew, as the kubelet's AtomicWriter does.
    ///
    /// # Panics
    /// When the pod has no such volume.
    pub fn update_volume(&self, pod: &Pod, name: &str, files: &BTreeMap<String, Vec<u8>>) {
        let volume = pod
            .volumes
            .iter()
            .find(|volume| volume.name == name)
            .unwrap_or_else(|| panic!("the pod {} has no volume {name}", pod.name));
        volumes::write_atomically(
            &volumes::path(&self.pod_directory(&pod.uid), volume),
            files,
            volume.mode,
        )
        .expect("a volume can be written");
    }

    /// Where the kubelet wants the logs of a pod.
    pub fn log_directory(&self, pod: &Pod) -> PathBuf {
        self.directories.logs.join(format!("{}_{}_{}", pod.namespace, pod.name, pod.uid))
    }

    /// The lines in a container's log so far; none while there is no file.
    pub fn log_lines(&self, container: &RunningContainer) -> Vec<LogLine> {
        LogLine::parse_all(&fs::read(&container.log).unwrap_or_default())
    }

    /// Waits until a container's log has a line with this text.
    pub async fn logged(&self, container: &RunningContainer, text: &str) -> LogLine {
        let log = &container.log;
        let what = fmt::from_fn(|f| {
            write!(
                f,
                "the log {} has a line with {text:?}; its last part is\n{}",
                log.display(),
                command::tail(log)
            )
        });
        wait_until(what, crate::LIMIT, async || {
            self.log_lines(container).into_iter().find(|line| line.text.contains(text))
        })
        .await
    }
}
