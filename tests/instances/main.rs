//! Pods on instances of EC2, called as by a kubelet. The instances are namespaces of a test cloud
//! (crates/kiyot-testcloud), which run the user data of their launch.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "test code")]

mod cloud_routes;
mod ends;
#[path = "../vm/enrolment.rs"]
mod enrolment;
mod faults;
mod figures;
mod http_proxy;
mod images;
mod kills;
mod launches;
mod life;
#[path = "../vm/name_server.rs"]
mod name_server;
mod names;
mod network;
mod outages;
mod provider_set;
mod providers;
mod pulls;
mod refusals;
mod stock_debian;
mod strays;
mod terminations;
mod throttling;
mod tls_front;
mod tokens;

use std::{fs, time::Duration};

use kills::killed_at;
use kiyot_testcloud::{Cloud, Instance, State};
use kiyot_testkit::{
    Container, Kiyot, KiyotOptions, Kubelet, LIMIT, Node, Pod, RunningPod, allowed, cri, wait_until,
};
use tokio::time::timeout;
use tonic::Status;

/// Script of a container that runs until SIGTERM.
const WAIT: &str = "trap 'exit 0' TERM; while :; do sleep 0.5; done";

/// Configuration of a short period of lists, for tests of their effects.
const SHORT_LISTING_PERIOD: &str = "listing_period = \"1s\"\n";
/// Time limit of the node's answers for its own pods during an outage of the cloud: shorter than
/// the 20 s that the daemon waits for an API that hangs, and a hundred times what a busy machine
/// needs.
const LOCAL_LIMIT: Duration = Duration::from_secs(15);
/// Configuration of a short time for launches that can't succeed. A restarted daemon has it: the
/// kubelet's call joins the launch within this time, after some lists of the cloud, which take a
/// busy machine 3 s.
const SHORT_LAUNCH_TIMEOUT: &str = "launch_timeout = \"15s\"\n";

/// A cloud whose consoles are printed if the test panics.
struct TestCloud(Cloud);

impl std::ops::Deref for TestCloud {
    type Target = Cloud;

    fn deref(&self) -> &Cloud {
        &self.0
    }
}

impl Drop for TestCloud {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for instance in self.launched() {
                let (id, state) = (&instance.id, instance.state);
                eprintln!("console of {id} ({state:?}):\n{}", self.console(id));
            }
        }
    }
}

/// The machines of a test: a cloud, and the node in its VPC. The order of the fields is the order
/// of their ends.
struct World {
    node: Node,
    cloud: TestCloud,
}

impl std::ops::Deref for World {
    type Target = Cloud;

    fn deref(&self) -> &Cloud {
        &self.cloud
    }
}

impl World {
    /// Starts the cloud and the node.
    async fn start() -> Self {
        let cloud = TestCloud(Cloud::start_with_instances().await);
        Self { node: Node::start().await, cloud }
    }

    /// Returns the options of the daemon under test.
    fn options(&self) -> KiyotOptions {
        self.daemon_options(env!("CARGO_BIN_EXE_kiyot"))
    }

    /// Starts the daemon, and connects the node's kubelet to it.
    async fn daemon(&self, options: KiyotOptions) -> (Kiyot<'_>, Kubelet) {
        let kiyot = Kiyot::start(&self.node, options).await;
        let kubelet = kiyot.kubelet().await;
        (kiyot, kubelet)
    }

    /// Starts the daemon with a warm pool of one cell, and waits until the cell is warm. Returns
    /// its instance too.
    async fn warm_daemon(&self) -> (Kiyot<'_>, Kubelet, Instance) {
        let mut options = self.options();
        options.sections.push_str("[[backends.milpa.warm]]\ncount = 1\n");
        let (kiyot, kubelet) = self.daemon(options).await;
        wait_until("a cell is warm", LIMIT, async || {
            kiyot.log().contains("cell waits in its warm pool").then_some(())
        })
        .await;
        let warm = self.running().remove(0);
        (kiyot, kubelet, warm)
    }

    /// Makes the node take packets of cells to networks of the cluster.
    async fn route_cells(&self) {
        self.admit_cells("-1", "-1").await;
        let host = self.host().unwrap().id.as_str();
        let off = [("InstanceId", host), ("SourceDestCheck.Value", "false")];
        let reply = self.call("ModifyInstanceAttribute", &off).await.unwrap();
        assert_eq!(reply.status, 200, "{}", reply.body);
    }

    /// Makes the node's security group admit cells to a port.
    async fn admit_cells(&self, protocol: &str, port: &str) {
        let setup = self.setup();
        let permission = [
            ("GroupId", setup.node_group.as_str()),
            ("IpPermissions.1.Groups.1.GroupId", &setup.security_group),
            ("IpPermissions.1.IpProtocol", protocol),
            ("IpPermissions.1.FromPort", port),
            ("IpPermissions.1.ToPort", port),
        ];
        let reply = self.call("AuthorizeSecurityGroupIngress", &permission).await.unwrap();
        assert_eq!(reply.status, 200, "{}", reply.body);
    }

    /// Returns the only running instance with the tags of a pod.
    fn instance_of(&self, pod: &str) -> Instance {
        let mut of_pod = self.running();
        of_pod.retain(|instance| instance.tags.get("kiyot:pod").is_some_and(|name| name == pod));
        assert_eq!(of_pod.len(), 1, "{pod}: {of_pod:?}");
        of_pod.remove(0)
    }

    /// Adds or removes a `curl` that never ends on instances that are launched from now on, so that
    /// their agent is not installed.
    fn set_installing_for_ever(&self, does: bool) {
        let mode = if does { 0o755 } else { 0o644 };
        self.add_to_images("/usr/local/sbin/curl", b"#!/bin/sh\nexec sleep 1000000\n", mode);
    }

    /// Waits for the first instance to run, without its agent.
    async fn first_runs_without_agent(&self) -> Instance {
        let launched =
            wait_until("an instance is launched", LIMIT, async || self.launched().pop()).await;
        self.reaches(&launched.id, State::Running).await;
        self.set_installing_for_ever(false);
        launched
    }

    /// Launches a cell for a pod. When the console of the instance has a text, restarts the daemon
    /// with a short time for launches: however slow the machine is, that time passes after the
    /// text. Returns the error of the kubelet's call.
    async fn error_of_launch_that_says(
        &self,
        kiyot: &mut Kiyot<'_>,
        spec: &Pod,
        text: &str,
    ) -> Status {
        killed_at(kiyot, spec, async |_| {
            wait_until(format!("a console has {text:?}"), LIMIT, async || {
                self.console(&self.launched().pop()?.id).contains(text).then_some(())
            })
            .await;
        })
        .await;
        let configuration = fs::read_to_string(kiyot.configuration()).unwrap();
        let key = "type = \"milpa\"\n";
        let shortened = configuration.replace(key, &format!("{key}{SHORT_LAUNCH_TIMEOUT}"));
        fs::write(kiyot.configuration(), shortened).unwrap();
        kiyot.start_again().await;
        kiyot.kubelet().await.run_pod(spec).await.unwrap_err()
    }

    /// Returns the instances that are not terminated.
    fn left(&self) -> Vec<Instance> {
        let mut left = self.launched();
        left.retain(|instance| instance.state != State::Terminated);
        left
    }

    /// Makes a call for an instance, as from the console of EC2.
    async fn change(&self, action: &str, id: &str) {
        let reply = self.call(action, &[("InstanceId.1", id)]).await.unwrap();
        assert_eq!(reply.status, 200, "{}", reply.body);
    }

    async fn reaches(&self, id: &str, state: State) {
        wait_until(format!("{id} is {state:?}"), LIMIT, async || {
            (self.instance(id)?.state == state).then_some(())
        })
        .await;
    }

    /// Stops and removes pods, and waits until no instance is left.
    async fn ends(&self, kubelet: &mut Kubelet, pods: &[&RunningPod]) {
        for running in pods {
            kubelet.stop_and_remove(running).await.unwrap();
        }
        self.has_no_cells().await;
    }

    /// Waits until all launched instances are terminated.
    async fn has_no_cells(&self) {
        wait_until("no instance is left", LIMIT, async || self.running().is_empty().then_some(()))
            .await;
    }
}

/// Returns a pod in a cell with one container, `main`.
fn pod(name: &str, script: &str) -> Pod {
    Pod::new(name).in_cell().container(Container::script("main", script))
}

/// Runs a script in a container, which must succeed, and returns its standard output.
async fn run(kubelet: &mut Kubelet, container: &str, script: &str) -> String {
    let output = kubelet.exec_sync(container, &["sh", "-c", script]).await.unwrap();
    assert_eq!(output.code, 0, "{script}: {}{}", output.stdout, output.stderr);
    output.stdout
}

/// Returns a pod on the node with one container, `main`.
fn local_pod() -> Pod {
    Pod::new("local").container(Container::script("main", WAIT))
}

/// Runs a pod by the retries of a kubelet.
async fn run_in_the_end(kubelet: &mut Kubelet, spec: &Pod) -> RunningPod {
    wait_until(format!("the pod {} runs", spec.name), LIMIT, async || {
        kubelet.run_pod(spec).await.ok()
    })
    .await
}

/// Checks that the containers of pods are the same and run, and that the node answers within
/// [`LOCAL_LIMIT`].
async fn are_unharmed(kubelet: &mut Kubelet, pods: &[&RunningPod]) {
    let listed = timeout(allowed(LOCAL_LIMIT), kubelet.containers()).await;
    let listed = listed.expect("the node lists containers at once").unwrap();
    for pod in pods {
        let status = timeout(allowed(LOCAL_LIMIT), kubelet.sandbox_status(&pod.sandbox)).await;
        let status = status.expect("the node answers at once").unwrap();
        assert_eq!(status.state(), cri::PodSandboxState::SandboxReady, "{}", pod.spec.name);
        let main = &pod.container("main").id;
        let of_pod = listed.iter().filter(|container| container.pod_sandbox_id == pod.sandbox);
        let of_pod: Vec<_> = of_pod.map(|container| (&container.id, container.state())).collect();
        assert_eq!(of_pod, [(main, cri::ContainerState::ContainerRunning)], "{}", pod.spec.name);
        run(kubelet, main, "true").await;
    }
}

/// Waits until a sandbox is not ready.
async fn sandbox_ends(kubelet: &mut Kubelet, sandbox: &str) {
    wait_until("the sandbox has ended", LIMIT, async || {
        let status = kubelet.sandbox_status(sandbox).await.ok()?;
        (status.state() == cri::PodSandboxState::SandboxNotready).then_some(())
    })
    .await;
}
