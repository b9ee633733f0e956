//! A kubelet for pods from YAML: it creates the files that the manifest plans, and sends the
//! messages that the manifest generates.

use std::{fs, net::IpAddr, path::PathBuf};

use kiyot::manifest::{CgroupDriver, Entry, Node as NodeFacts, Pod};
use kiyot_testkit::{
    Kubelet, LIMIT, Node, cri,
    kubelet::{self, LogLine},
    wait_until,
};

/// A running pod of the demo.
#[derive(Debug)]
pub(crate) struct DemoPod {
    /// Sandbox id.
    pub(crate) sandbox: String,
    /// Pod address.
    pub(crate) address: String,
    containers: Vec<String>,
    log: PathBuf,
}

impl DemoPod {
    /// Waits for the first log line of its first container.
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

/// A kubelet that runs pods from manifests.
#[derive(Debug)]
pub(crate) struct DemoKubelet {
    kubelet: Kubelet,
    facts: NodeFacts,
    name: String,
}

impl DemoKubelet {
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

    /// Runs a pod: files, sandbox, containers.
    pub(crate) async fn run(&mut self, pod: &Pod) -> DemoPod {
        pod.files(&self.facts, 1).iter().for_each(make);
        // Pods differ in the time at which the kubelet saw them.
        let facts = NodeFacts {
            seen: format!("{} {}", self.facts.seen, pod.metadata.uid),
            ..self.facts.clone()
        };
        let mut request = pod.run_pod_sandbox(&facts, 0);
        let config = request.config.as_mut().expect("a request has a config");
        if let Some(linux) = &mut config.linux {
            // Cgroups with the node's name, so that the node removes them.
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
        DemoPod { sandbox, address, containers, log }
    }

    /// Makes an image present, and returns its id.
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

    /// Returns the account of the pod's cell, as `crictl inspectp` shows it; `None` on the node.
    pub(crate) async fn cell(&mut self, started: &DemoPod) -> Option<serde_json::Value> {
        let account = self.kubelet.cell_account(&started.sandbox).await;
        account.unwrap_or_else(|status| panic!("PodSandboxStatus: {status}"))
    }

    /// Runs a command in the first container, and returns its output.
    pub(crate) async fn exec(&mut self, started: &DemoPod, command: &[&str]) -> String {
        self.kubelet
            .exec_sync(&started.containers[0], command)
            .await
            .unwrap_or_else(|status| panic!("ExecSync: {status}"))
            .stdout
    }

    /// Stops and removes a pod.
    pub(crate) async fn stop_and_remove(&mut self, pod: &Pod, started: &DemoPod) {
        for container in &started.containers {
            self.kubelet
                .stop_container(container, pod.grace_secs)
                .await
                .unwrap_or_else(|status| panic!("StopContainer: {status}"));
        }
        let pod_sandbox_id = started.sandbox.clone();
        let runtime = &mut self.kubelet.runtime;
        runtime
            .stop_pod_sandbox(cri::StopPodSandboxRequest { pod_sandbox_id: pod_sandbox_id.clone() })
            .await
            .expect("StopPodSandbox is answered");
        for container_id in started.containers.clone() {
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

fn make(entry: &Entry) {
    entry
        .make()
        .unwrap_or_else(|error| panic!("{} can't be made: {error}", entry.path().display()));
}
