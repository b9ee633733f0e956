//! The kubelet of the demo. It also runs static pods while the shell runs.

use std::time::Duration;

use kiyot_testkit::{Kubelet, LIMIT, Node, Pod, RunningPod, kubelet::StaticPods, wait_until};

/// Pause between two scans of the directory of static pods.
const LOOK_PAUSE: Duration = Duration::from_millis(200);

/// A running pod of the demo.
#[derive(Debug)]
pub(crate) struct DemoPod {
    pod: RunningPod,
    /// Pod address.
    pub(crate) address: String,
}

impl DemoPod {
    /// Returns the id of the sandbox.
    pub(crate) fn sandbox(&self) -> &str {
        &self.pod.sandbox
    }

    fn container(&self) -> &str {
        &self.pod.container(&self.pod.spec.containers[0].name).id
    }
}

/// A kubelet that runs pods from manifests.
#[derive(Debug)]
pub(crate) struct DemoKubelet {
    kubelet: Kubelet,
}

impl DemoKubelet {
    pub(crate) fn new(kubelet: Kubelet) -> Self {
        Self { kubelet }
    }

    /// Runs a pod.
    pub(crate) async fn run(&mut self, pod: &Pod) -> DemoPod {
        let pod = Box::pin(self.kubelet.run_pod(pod))
            .await
            .unwrap_or_else(|status| panic!("the pod can't be run: {status}"));
        let status = self.kubelet.sandbox_status(&pod.sandbox).await;
        let network = status.expect("a sandbox has a status").network;
        DemoPod { pod, address: network.map(|network| network.ip).unwrap_or_default() }
    }

    /// Waits for the first log line of a pod's first container.
    pub(crate) async fn first_line(&self, pod: &DemoPod) -> String {
        let container = &pod.pod.container(&pod.pod.spec.containers[0].name);
        wait_until(format!("{} has logged a line", pod.pod.spec.name), LIMIT, async || {
            self.kubelet.log_lines(container).into_iter().next().map(|line| line.text)
        })
        .await
    }

    /// Returns the account of the pod's cell, as `crictl inspectp` shows it; `None` on the node.
    pub(crate) async fn cell(&mut self, started: &DemoPod) -> Option<serde_json::Value> {
        let account = self.kubelet.cell_account(started.sandbox()).await;
        account.unwrap_or_else(|status| panic!("PodSandboxStatus: {status}"))
    }

    /// Runs a command in the first container, and returns its output.
    pub(crate) async fn exec(&mut self, started: &DemoPod, command: &[&str]) -> String {
        self.kubelet
            .exec_sync(started.container(), command)
            .await
            .unwrap_or_else(|status| panic!("ExecSync: {status}"))
            .stdout
    }

    /// Runs the static pods of the node's directory until `work` has ended, and then ends the pods.
    pub(crate) async fn with_static_pods<T>(
        &self,
        node: &Node,
        work: impl Future<Output = T>,
    ) -> T {
        let directory = node.static_pods();
        std::fs::create_dir_all(&directory).expect("the directory of static pods can be made");
        let mut pods = StaticPods::new(self.kubelet.clone(), directory.clone(), "demo");
        let mut work = std::pin::pin!(work);
        let output = loop {
            Box::pin(pods.sync()).await;
            if let Ok(output) = tokio::time::timeout(LOOK_PAUSE, &mut work).await {
                break output;
            }
        };
        std::fs::remove_dir_all(&directory).expect("the static pods can be removed");
        std::fs::create_dir_all(&directory).expect("the directory of static pods can be made");
        Box::pin(pods.sync()).await;
        output
    }

    /// Stops and removes a pod.
    pub(crate) async fn stop_and_remove(&mut self, started: &DemoPod) {
        self.kubelet
            .stop_and_remove(&started.pod)
            .await
            .unwrap_or_else(|status| panic!("the pod can't be ended: {status}"));
    }
}
