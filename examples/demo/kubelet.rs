//! A kubelet for pods from YAML: it makes what the manifest plans, and sends the messages that the
//! manifest gives.

use std::{
    fs,
    net::IpAddr,
    os::unix::fs::{PermissionsExt, symlink},
    path::PathBuf,
};

use kiyot::manifest::{CgroupDriver, Entry, Node as NodeFacts, Pod};
use kiyot_testkit::{
    Kubelet, LIMIT, Node, cri,
    kubelet::{self, LogLine},
    wait_until,
};

/// A pod of the demo, running.
#[derive(Debug)]
pub(crate) struct Demonstrated {
    /// Its sandbox's id.
    pub(crate) sandbox: String,
    /// Its address.
    pub(crate) address: String,
    containers: Vec<String>,
    log: PathBuf,
}

impl Demonstrated {
    /// The first line that its first container has logged.
    pub(crate) async fn first_line(&self, name: &str) -> String {
        wait_until(format!("{name} has logged a line"), LIMIT, async || {
            LogLine::parse_all(&fs::read(&self.log).unwrap_or_default())
                .into_iter()
                .next()
                .map(|line| line.text)
        })
        .await
    }
}

/// Plays the kubelet.
#[derive(Debug)]
pub(crate) struct Player {
    kubelet: Kubelet,
    facts: NodeFacts,
    name: String,
}

impl Player {
    pub(crate) fn new(node: &Node, kubelet: Kubelet) -> Self {
        let facts = NodeFacts {
            kubelet_dir: node.kubelet_directory(),
            pod_logs_dir: node.pod_logs(),
            cgroup_driver: match kubelet::CgroupDriver::of_machine() {
                kubelet::CgroupDriver::Cgroupfs => CgroupDriver::Cgroupfs,
                kubelet::CgroupDriver::Systemd => CgroupDriver::Systemd,
            },
            ..NodeFacts::default()
        };
        Self { kubelet, facts, name: node.name() }
    }

    /// Runs a pod: its files, its sandbox, and each of its containers.
    pub(crate) async fn run(&mut self, pod: &Pod) -> Demonstrated {
        pod.files(&self.facts, 1).iter().for_each(make);
        // Each pod was seen at a time of its own.
        let facts = NodeFacts {
            seen: format!("{} {}", self.facts.seen, pod.metadata.uid),
            ..self.facts.clone()
        };
        let mut request = pod.run_pod_sandbox(&facts, 0);
        let config = request.config.as_mut().expect("a request has a config");
        if let Some(linux) = &mut config.linux {
            // Control groups of this demo's own, so that they can be told from others.
            linux.cgroup_parent =
                linux.cgroup_parent.replacen("/kubepods", &format!("/kubepods-{}", self.name), 1);
        }
        let config = config.clone();
        let sandbox = self
            .kubelet
            .run_sandbox(&config, &request.runtime_handler)
            .await
            .unwrap_or_else(|status| panic!("RunPodSandbox: {status}"));
        let address = self
            .kubelet
            .sandbox_status(&sandbox)
            .await
            .expect("a sandbox has a status")
            .network
            .map(|network| network.ip)
            .unwrap_or_default();
        let mut containers = Vec::new();
        for container in &pod.containers {
            pod.container_files(container, &facts, address.parse::<IpAddr>().ok(), 0)
                .iter()
                .for_each(make);
            let image = self.image(&container.image, &config).await;
            let request = pod.create_container(container, &facts, &sandbox, &config, &image, 0);
            let created = self
                .kubelet
                .runtime
                .create_container(request)
                .await
                .unwrap_or_else(|status| panic!("CreateContainer: {status}"));
            let id = created.into_inner().container_id;
            self.kubelet
                .start_container(&id)
                .await
                .unwrap_or_else(|status| panic!("StartContainer: {status}"));
            containers.push(id);
        }
        let log = self.facts.log_dir(pod).join(&pod.containers[0].name).join("0.log");
        Demonstrated { sandbox, address, containers, log }
    }

    /// The image's id, pulled if it isn't there.
    async fn image(&mut self, image: &str, config: &cri::PodSandboxConfig) -> String {
        let image = cri::ImageSpec {
            image: image.to_owned(),
            annotations: config.annotations.clone(),
            ..Default::default()
        };
        let request = cri::ImageStatusRequest { image: Some(image.clone()), verbose: false };
        let status = self
            .kubelet
            .image
            .image_status(request)
            .await
            .unwrap_or_else(|status| panic!("ImageStatus: {status}"));
        if let Some(found) = status.into_inner().image {
            return found.id;
        }
        let request = cri::PullImageRequest {
            image: Some(image),
            auth: None,
            sandbox_config: Some(config.clone()),
        };
        self.kubelet
            .image
            .pull_image(request)
            .await
            .unwrap_or_else(|status| panic!("PullImage: {status}"))
            .into_inner()
            .image_ref
    }

    /// What a command prints in the first container.
    pub(crate) async fn exec(&mut self, shown: &Demonstrated, command: &[&str]) -> String {
        self.kubelet
            .exec_sync(&shown.containers[0], command)
            .await
            .unwrap_or_else(|status| panic!("ExecSync: {status}"))
            .stdout
    }

    /// Stops and removes a pod.
    pub(crate) async fn end(&mut self, pod: &Pod, shown: &Demonstrated) {
        for container in &shown.containers {
            self.kubelet
                .stop_container(container, pod.grace_secs)
                .await
                .unwrap_or_else(|status| panic!("StopContainer: {status}"));
        }
        let pod_sandbox_id = shown.sandbox.clone();
        let runtime = &mut self.kubelet.runtime;
        runtime
            .stop_pod_sandbox(cri::StopPodSandboxRequest { pod_sandbox_id: pod_sandbox_id.clone() })
            .await
            .expect("StopPodSandbox is answered");
        for container_id in shown.containers.clone() {
            runtime
                .remove_container(cri::RemoveContainerRequest { container_id })
                .await
                .expect("RemoveContainer is answered");
        }
        runtime
            .remove_pod_sandbox(cri::RemovePodSandboxRequest { pod_sandbox_id })
            .await
            .expect("RemovePodSandbox is answered");
    }
}

/// Makes one entry of a plan.
fn make(entry: &Entry) {
    let mode = |path: &PathBuf, mode: u32| {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("a mode can be set")
    };
    match entry {
        Entry::Directory { path, mode: bits } => {
            fs::create_dir_all(path).expect("a directory can be made");
            mode(path, *bits);
        }
        Entry::File { path, mode: bits, content } => {
            fs::write(path, &content.0).expect("a file can be written");
            mode(path, *bits);
        }
        Entry::Link { path, target } => {
            let beside = path.with_added_extension("beside");
            symlink(target, &beside)
                .unwrap_or_else(|error| panic!("{} can't be made: {error}", beside.display()));
            fs::rename(beside, path).expect("a link can be renamed");
        }
    }
}
