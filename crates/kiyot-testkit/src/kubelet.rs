//! A CRI client that behaves as a kubelet: the same order of calls, labels, annotations, mounts and
//! paths (kubelet 1.3x, kuberuntime).

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
mod manifest;
mod pod;
mod static_pods;
pub mod volumes;

pub use calls::{ExecOutput, LogLine};
pub use cgroups::CgroupDriver;
pub use manifest::pods_of;
pub use pod::{Container, Pod};
pub use static_pods::StaticPods;
pub use volumes::Volume;

/// The largest message of the kubelet's client (cri-client/pkg/remote_runtime.go, maxMsgSize).
const MAX_MESSAGE: usize = 16 * 1024 * 1024;

/// Directories and cgroup settings of a kubelet.
#[derive(Debug, Clone)]
pub struct Directories {
    /// The kubelet's `--root-dir`, by default /var/lib/kubelet.
    pub root: PathBuf,
    /// The kubelet's `podLogsDir`, by default /var/log/pods.
    pub logs: PathBuf,
    /// Name of the cgroup of all pods.
    pub cgroup: String,
    /// The cgroup driver.
    pub driver: CgroupDriver,
}

/// A kubelet's connection to a CRI socket.
#[derive(Debug, Clone)]
pub struct Kubelet {
    /// Client of the runtime service, for calls without a method of this type.
    pub runtime: RuntimeServiceClient<Channel>,
    /// Client of the image service.
    pub image: ImageServiceClient<Channel>,
    directories: Directories,
    /// Number of restarts. Clones are the same kubelet.
    restarts: Arc<AtomicU32>,
}

/// A running pod.
#[derive(Debug, Clone)]
pub struct RunningPod {
    /// The pod's spec.
    pub spec: Pod,
    /// Id of its sandbox.
    pub sandbox: String,
    /// The sandbox's config.
    pub config: cri::PodSandboxConfig,
    /// Containers by name.
    pub containers: BTreeMap<String, RunningContainer>,
}

impl RunningPod {
    /// Returns a container by name.
    ///
    /// # Panics
    /// If the pod has no container with this name.
    pub fn container(&self, name: &str) -> &RunningContainer {
        self.containers
            .get(name)
            .unwrap_or_else(|| panic!("the pod {} has no container {name}", self.spec.name))
    }
}

/// A created container.
#[derive(Debug, Clone)]
pub struct RunningContainer {
    /// Container id.
    pub id: String,
    /// Log file on the node.
    pub log: PathBuf,
    /// Termination message file on the node.
    pub termination: PathBuf,
    /// The container's config.
    pub config: cri::ContainerConfig,
}

impl Kubelet {
    /// Connects to a CRI socket.
    pub async fn connect(
        socket: &Path,
        directories: Directories,
    ) -> Result<Self, tonic::transport::Error> {
        let socket = socket.to_owned();
        // grpc-go sends this authority over a unix socket.
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

    /// Restarts the kubelet: each pod gets a new `kubernetes.io/config.seen`, the time at which
    /// this run of the kubelet first saw the pod. The kubelet sends everything else unchanged.
    pub fn restart(&self) {
        self.restarts.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the kubelet's directory for a pod.
    pub fn pod_directory(&self, uid: &str) -> PathBuf {
        self.directories.root.join("pods").join(uid)
    }

    /// Creates a pod's directories, volumes and hosts file, as a kubelet does before RunPodSandbox.
    /// Returns the sandbox's config.
    pub fn prepare(&self, pod: &Pod) -> cri::PodSandboxConfig {
        let config = self.sandbox_config(pod, &self.directories);
        let directory = self.pod_directory(&pod.uid);
        fs::create_dir_all(directory.join("containers")).expect("the pod's directory can be made");
        fs::create_dir_all(&config.log_directory).expect("the log directory can be made");
        fs::write(
            directory.join("etc-hosts"),
            format!(
                "# Kubernetes-managed hosts file.\n\
                 127.0.0.1\tlocalhost\n\
                 ::1\tlocalhost ip6-localhost\n\
                 # {}\n",
                pod.name
            ),
        )
        .expect("the hosts file can be written");
        for volume in &pod.volumes {
            volumes::create(&directory, volume);
        }
        cgroups::create(&self.directories, pod);
        config
    }

    /// Runs a pod: creates its volumes and sandbox, pulls its images, and starts its containers in
    /// turn.
    pub async fn run_pod(&mut self, pod: &Pod) -> Result<RunningPod, Status> {
        let config = self.prepare(pod);
        let sandbox = self.run_sandbox(&config, &pod.runtime_handler).await?;
        let mut running = self.running(pod, config, sandbox);
        // The kubelet makes this call to learn the pod's addresses.
        self.sandbox_status(&running.sandbox).await?;
        for container in &pod.containers {
            let created = self.create_container(&running, container, 0).await?;
            self.start_container(&created.id).await?;
            running.containers.insert(container.name.clone(), created);
        }
        Ok(running)
    }

    /// Returns a pod without containers. Its sandbox was run without [`run_pod`](Self::run_pod).
    pub fn running(&self, pod: &Pod, config: cri::PodSandboxConfig, sandbox: String) -> RunningPod {
        RunningPod { spec: pod.clone(), sandbox, config, containers: BTreeMap::new() }
    }

    /// Stops and removes a pod with its volumes, logs and cgroups, as a kubelet and its garbage
    /// collection do.
    pub async fn stop_and_remove(&mut self, pod: &RunningPod) -> Result<(), Status> {
        self.stop_pod(pod).await?;
        self.remove_pod(pod).await
    }

    /// Stops a pod's containers and its sandbox.
    pub async fn stop_pod(&mut self, pod: &RunningPod) -> Result<(), Status> {
        for container in pod.containers.values() {
            self.stop_container(&container.id, pod.spec.grace).await?;
        }
        self.runtime
            .stop_pod_sandbox(cri::StopPodSandboxRequest { pod_sandbox_id: pod.sandbox.clone() })
            .await?;
        Ok(())
    }

    /// Removes a stopped pod, and the files that [`prepare`](Self::prepare) created.
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

    /// Removes the kubelet's own files, mounts and cgroups of a pod.
    pub fn forget(&self, pod: &Pod) {
        let directory = self.pod_directory(&pod.uid);
        for volume in &pod.volumes {
            volumes::remove(&directory, volume);
        }
        let _ = kiyot_linux::tree::remove_path(&directory);
        let _ = kiyot_linux::tree::remove_path(&self.log_directory(pod));
        cgroups::remove(&self.directories, pod);
    }

    /// Updates a ConfigMap, Secret or projected volume, as the kubelet's AtomicWriter does.
    ///
    /// # Panics
    /// If the pod has no volume with this name.
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

    /// Returns the log directory of a pod.
    pub fn log_directory(&self, pod: &Pod) -> PathBuf {
        self.directories.logs.join(format!("{}_{}_{}", pod.namespace, pod.name, pod.uid))
    }

    /// Returns the complete lines of a container's log, or no lines if the file does not exist.
    pub fn log_lines(&self, container: &RunningContainer) -> Vec<LogLine> {
        LogLine::parse_all(&fs::read(&container.log).unwrap_or_default())
    }

    /// Waits until a container's log has a line with this text, and returns the line.
    pub async fn logged(&self, container: &RunningContainer, text: &str) -> LogLine {
        let log = &container.log;
        let what = fmt::from_fn(|f| {
            write!(
                f,
                "the log {} has a line with {text:?}; it ends:\n{}",
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
