//! Specs of pods and containers, with the fields that affect CRI.

use std::{
    collections::BTreeMap,
    hash::{BuildHasher, RandomState},
    sync::{
        LazyLock,
        atomic::{AtomicU64, Ordering},
    },
};

use super::volumes::{Source, Volume};
use crate::{cri, image::BUSYBOX_IMAGE};

/// Spec of a pod. The fields are public, so that a test can change any of them.
#[derive(Debug, Clone)]
pub struct Pod {
    /// Pod name.
    pub name: String,
    /// Pod namespace.
    pub namespace: String,
    /// Uid, unique on this machine.
    pub uid: String,
    /// Attempt of the sandbox, from 0.
    pub attempt: u32,
    /// Labels, without those that the kubelet adds.
    pub labels: BTreeMap<String, String>,
    /// Annotations, without those that the kubelet adds.
    pub annotations: BTreeMap<String, String>,
    /// Handler of the RuntimeClass.
    pub runtime_handler: String,
    /// `hostNetwork`.
    pub host_network: bool,
    /// `hostPID`.
    pub host_pid: bool,
    /// Sysctls.
    pub sysctls: BTreeMap<String, String>,
    /// Port mappings.
    pub ports: Vec<cri::PortMapping>,
    /// Termination grace period in seconds.
    pub grace: i64,
    /// Volumes.
    pub volumes: Vec<Volume>,
    /// Containers, in order.
    pub containers: Vec<Container>,
}

impl Pod {
    /// Creates a pod in the namespace `default`, without containers.
    pub fn new(name: &str) -> Self {
        static PODS: AtomicU64 = AtomicU64::new(1);
        // The whole machine shares cgroups, whose names contain the uid. Another run in its own PID
        // namespace may have the same process id.
        static RUN: LazyLock<u64> = LazyLock::new(|| RandomState::new().hash_one("a run"));
        let uid = format!(
            "{:08x}-0000-4000-8000-{:012x}",
            *RUN & 0xffff_ffff,
            PODS.fetch_add(1, Ordering::Relaxed)
        );
        Self {
            name: name.to_owned(),
            namespace: "default".to_owned(),
            uid,
            attempt: 0,
            labels: BTreeMap::new(),
            annotations: BTreeMap::new(),
            runtime_handler: String::new(),
            host_network: false,
            host_pid: false,
            sysctls: BTreeMap::new(),
            ports: Vec::new(),
            grace: 2,
            volumes: Vec::new(),
            containers: Vec::new(),
        }
    }

    /// Adds an annotation.
    #[must_use]
    pub fn annotation(mut self, key: &str, value: &str) -> Self {
        self.annotations.insert(key.to_owned(), value.to_owned());
        self
    }

    /// Adds the annotation that makes the pod run in a cell.
    #[must_use]
    pub fn in_cell(self) -> Self {
        self.annotation("kubernetes.io/target-runtime", "kiyot")
    }

    /// Adds a label.
    #[must_use]
    pub fn label(mut self, key: &str, value: &str) -> Self {
        self.labels.insert(key.to_owned(), value.to_owned());
        self
    }

    /// Adds a container.
    #[must_use]
    pub fn container(mut self, container: Container) -> Self {
        self.containers.push(container);
        self
    }

    /// Adds a volume.
    #[must_use]
    pub fn volume(mut self, name: &str, source: Source) -> Self {
        self.volumes.push(Volume { name: name.to_owned(), mode: 0o644, source });
        self
    }
}

/// Spec of a container.
#[derive(Debug, Clone)]
pub struct Container {
    /// Container name, unique in the pod.
    pub name: String,
    /// Image, as the pod's spec names it.
    pub image: String,
    /// Replaces the image's entry point, unless empty.
    pub command: Vec<String>,
    /// Replaces the image's arguments, unless empty.
    pub args: Vec<String>,
    /// Environment variables.
    pub env: BTreeMap<String, String>,
    /// Working directory.
    pub working_dir: String,
    /// Volume mounts: name, path in the container, read-only.
    pub mounts: Vec<(String, String, bool)>,
    /// Additional mounts, such as subPaths, which are sent unchanged.
    pub more_mounts: Vec<cri::Mount>,
    /// Allocates a terminal.
    pub tty: bool,
    /// Keeps standard input open.
    pub stdin: bool,
    /// `privileged`.
    pub privileged: bool,
    /// Resource limits.
    pub resources: cri::LinuxContainerResources,
}

impl Container {
    /// Creates a container that runs a shell script in [`BUSYBOX_IMAGE`].
    pub fn script(name: &str, text: &str) -> Self {
        Self {
            command: ["sh", "-c", text].map(str::to_owned).to_vec(),
            ..Self::of_image(name, BUSYBOX_IMAGE)
        }
    }

    /// Creates a container that runs the command of its image.
    pub fn of_image(name: &str, image: &str) -> Self {
        Self {
            name: name.to_owned(),
            image: image.to_owned(),
            command: Vec::new(),
            args: Vec::new(),
            env: BTreeMap::new(),
            working_dir: String::new(),
            mounts: Vec::new(),
            more_mounts: Vec::new(),
            tty: false,
            stdin: false,
            privileged: false,
            resources: cri::LinuxContainerResources {
                cpu_shares: 2,
                oom_score_adj: 1000,
                ..Default::default()
            },
        }
    }

    /// Adds a volume mount.
    #[must_use]
    pub fn mount(mut self, volume: &str, path: &str) -> Self {
        self.mounts.push((volume.to_owned(), path.to_owned(), false));
        self
    }

    /// Adds an environment variable.
    #[must_use]
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.env.insert(name.to_owned(), value.to_owned());
        self
    }
}
