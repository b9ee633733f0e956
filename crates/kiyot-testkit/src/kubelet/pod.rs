//! What to run: the part of a pod's spec that concerns CRI.

use std::{
    collections::BTreeMap,
    hash::{BuildHasher, RandomState},
    sync::{
        LazyLock,
        atomic::{AtomicU64, Ordering},
    },
};

use super::volumes::Source;
use crate::{cri, node::BUSYBOX_IMAGE};

/// A pod to run. Public fields: a test changes what it is about.
#[derive(Debug, Clone)]
pub struct Pod {
    /// Its name.
    pub name: String,
    /// Its namespace.
    pub namespace: String,
    /// Unique on this machine.
    pub uid: String,
    /// Which sandbox of this pod it is, from 0.
    pub attempt: u32,
    /// The pod's labels; the kubelet's own are added.
    pub labels: BTreeMap<String, String>,
    /// The pod's annotations; the kubelet's own are added.
    pub annotations: BTreeMap<String, String>,
    /// The runtime class's handler.
    pub runtime_handler: String,
    /// Is it on the node's network?
    pub host_network: bool,
    /// Is it in the node's PID namespace?
    pub host_pid: bool,
    /// Kernel parameters.
    pub sysctls: BTreeMap<String, String>,
    /// Host ports.
    pub ports: Vec<cri::PortMapping>,
    /// Seconds that a container has to stop.
    pub grace: i64,
    /// Its volumes.
    pub volumes: Vec<Volume>,
    /// Its containers, in order.
    pub containers: Vec<Container>,
}

impl Pod {
    /// A pod in the namespace `default`, without containers.
    pub fn new(name: &str) -> Self {
        static PODS: AtomicU64 = AtomicU64::new(1);
        // Control groups are named by it, and they are the whole machine's: an id of a process
        // would be that of another run in namespaces of its own.
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

    /// The same with an annotation.
    #[must_use]
    pub fn annotation(mut self, key: &str, value: &str) -> Self {
        self.annotations.insert(key.to_owned(), value.to_owned());
        self
    }

    /// The same, to run in a cell.
    #[must_use]
    pub fn in_cell(self) -> Self {
        self.annotation("kubernetes.io/target-runtime", "kiyot")
    }

    /// The same with a label.
    #[must_use]
    pub fn label(mut self, key: &str, value: &str) -> Self {
        self.labels.insert(key.to_owned(), value.to_owned());
        self
    }

    /// The same with one more container.
    #[must_use]
    pub fn container(mut self, container: Container) -> Self {
        self.containers.push(container);
        self
    }

    /// The same with one more volume.
    #[must_use]
    pub fn volume(mut self, name: &str, source: Source) -> Self {
        self.volumes.push(Volume { name: name.to_owned(), mode: 0o644, source });
        self
    }
}

/// A container to run.
#[derive(Debug, Clone)]
pub struct Container {
    /// Its name, unique in the pod.
    pub name: String,
    /// The image, as the pod's spec names it.
    pub image: String,
    /// Instead of the image's entry point; empty to keep it.
    pub command: Vec<String>,
    /// Instead of the image's arguments.
    pub args: Vec<String>,
    /// Its environment.
    pub env: BTreeMap<String, String>,
    /// Where it runs.
    pub working_dir: String,
    /// Volumes: name, path in the container, read only?
    pub mounts: Vec<(String, String, bool)>,
    /// Further mounts, as they are sent: subPaths, for one.
    pub more_mounts: Vec<cri::Mount>,
    /// Does it have a terminal?
    pub tty: bool,
    /// Does it have a standard input?
    pub stdin: bool,
    /// May it do all?
    pub privileged: bool,
    /// The limits of it.
    pub resources: cri::LinuxContainerResources,
}

impl Container {
    /// A container that runs a shell script in [`BUSYBOX_IMAGE`].
    pub fn script(name: &str, text: &str) -> Self {
        Self {
            command: ["sh", "-c", text].map(str::to_owned).to_vec(),
            ..Self::of_image(name, BUSYBOX_IMAGE)
        }
    }

    /// A container that runs what its image says.
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

    /// The same with a volume mounted.
    #[must_use]
    pub fn mount(mut self, volume: &str, path: &str) -> Self {
        self.mounts.push((volume.to_owned(), path.to_owned(), false));
        self
    }

    /// The same with a variable in its environment.
    #[must_use]
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.env.insert(name.to_owned(), value.to_owned());
        self
    }
}

/// A volume of a pod.
#[derive(Debug, Clone)]
pub struct Volume {
    /// Its name.
    pub name: String,
    /// The mode of its files.
    pub mode: u32,
    /// What is in it.
    pub source: Source,
}
