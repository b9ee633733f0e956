//! Daemons killed at each step of a launch and of an end. Afterwards the pod has at most one
//! instance, and a pod in a cell on the node is unharmed.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    time::Duration,
};

use kiyot_testcloud::{Hold, Outcome};
use kiyot_testkit::{
    Kiyot, KiyotOptions, Kubelet, LIMIT, Pod, Provider, RunningPod, command, cri, poll_until,
    wait_for, wait_until,
};

use super::{WAIT, World, are_unharmed, run_in_the_end};

/// Polling period for the log, shorter than the time between two steps.
const LOG_POLL_PERIOD: Duration = Duration::from_millis(1);

/// Begins the launch of a pod, waits until `step` is reached, and kills the daemon.
pub(crate) async fn killed_at(kiyot: &mut Kiyot<'_>, spec: &Pod, step: impl AsyncFn(&Kiyot<'_>)) {
    let mut kubelet = kiyot.kubelet().await;
    let config = kubelet.prepare(spec);
    let calling = tokio::spawn(async move { kubelet.run_sandbox(&config, "").await });
    step(kiyot).await;
    kiyot.kill9();
    calling.await.unwrap().unwrap_err();
}

/// Returns a pod in a cell of a provider.
fn pod(name: &str, provider: &str) -> Pod {
    super::pod(name, WAIT).annotation("pod.elotl.co/provider", provider)
}

/// A pod in a cell on the node, which runs through the kills of the daemon.
struct Beside {
    pod: RunningPod,
    /// The length of the log when the pod had started.
    log_bytes: usize,
}

impl Beside {
    /// Starts a daemon with the providers netns and ec2, and the pod.
    async fn start(world: &World, options: KiyotOptions) -> (Kiyot<'_>, Self) {
        let preferred = Some((Provider::Netns, String::new()));
        let (kiyot, mut kubelet) = world.daemon(KiyotOptions { preferred, ..options }).await;
        let pod = run_in_the_end(&mut kubelet, &pod("beside", "netns")).await;
        let log_bytes = kiyot.log().len();
        (kiyot, Self { pod, log_bytes })
    }

    /// Returns whether the log has a text after the start of the pod.
    fn has_log(&self, kiyot: &Kiyot<'_>, text: &str) -> bool {
        kiyot.log()[self.log_bytes..].contains(text)
    }

    /// Waits until the log has a text after the start of the pod.
    async fn logged(&self, kiyot: &Kiyot<'_>, text: &str) {
        poll_until(format!("the log has {text:?}"), LIMIT, LOG_POLL_PERIOD, async || {
            self.has_log(kiyot, text).then_some(())
        })
        .await;
    }

    /// Checks that the pod is unharmed, removes it together with pods on instances, and checks that
    /// nothing is left.
    async fn ends(&self, world: &World, kiyot: &Kiyot<'_>, others: &[&RunningPod]) {
        let mut kubelet = kiyot.kubelet().await;
        assert_eq!(kiyot.cells().len(), 1, "{:?}", kiyot.cells());
        are_unharmed(&mut kubelet, &[&self.pod]).await;
        world.ends(&mut kubelet, &[&[&self.pod], others].concat()).await;
        assert_eq!(kiyot.cells(), Vec::<String>::new());
        assert_eq!(kubelet.sandboxes().await.unwrap(), []);
    }
}

/// Makes a directory with programs `iptables` and `iptables-restore` that wait while it has a file
/// `closed`.
fn gate_of_firewall(of: &Path) -> PathBuf {
    let gate = of.join("gate");
    fs::create_dir(&gate).unwrap();
    let at = gate.display();
    for program in ["iptables", "iptables-restore"] {
        let script = format!(
            "#!/bin/sh\n: > {at}/waits\nwhile [ -e {at}/closed ]; do sleep 0.05; done\n\
             PATH={} exec {program} \"$@\"\n",
            command::PATH
        );
        fs::write(gate.join(program), script).unwrap();
        fs::set_permissions(gate.join(program), fs::Permissions::from_mode(0o755)).unwrap();
    }
    gate
}

/// Waits until this many calls of an action are held.
async fn is_held(world: &World, action: &str, calls: usize) {
    wait_until(format!("{action} is held"), LIMIT, async || {
        let calls_of = world.calls_of(action);
        let held = calls_of.iter().filter(|call| call.outcome == Outcome::Held);
        (held.count() >= calls).then_some(())
    })
    .await;
}

/// Runs the pod by the kubelet's retries. Panics if the pod has two instances at any time.
async fn runs_on_one_instance(world: &World, kubelet: &mut Kubelet, spec: &Pod) -> RunningPod {
    let several = wait_until("the pod has two instances", LIMIT, async || {
        Some(world.left()).filter(|left| left.len() > 1)
    });
    let running = tokio::select! {
        running = run_in_the_end(kubelet, spec) => running,
        left = several => panic!("two instances of a pod: {left:?}"),
    };
    let status = kubelet.sandbox_status(&running.sandbox).await.unwrap();
    assert_eq!(world.instance_of(&spec.name).address, status.network.unwrap().ip);
    running
}

/// Restarts the daemon. Checks that the pod runs on a single instance, and that nothing is left
/// after its end.
async fn goes_on(world: &World, kiyot: &mut Kiyot<'_>, spec: &Pod, beside: &Beside) {
    kiyot.start_again().await;
    let mut kubelet = kiyot.kubelet().await;
    let running = runs_on_one_instance(world, &mut kubelet, spec).await;
    beside.ends(world, kiyot, &[&running]).await;
}

/// Verifies A33, V36.
#[tokio::test]
async fn daemon_killed_before_its_launch_reaches_the_cloud_makes_one_instance() {
    let world = World::start().await;
    let (mut kiyot, beside) = Beside::start(&world, world.options()).await;
    let spec = pod("killed", "ec2");
    world.faults().set_hold("RunInstances", Some(Hold::Effect));
    // The launch on the node has begun as well.
    let on_node = pod("on-node", "netns");
    killed_at(&mut kiyot, &spec, async |kiyot| {
        is_held(&world, "RunInstances", 1).await;
        let mut kubelet = kiyot.kubelet().await;
        let config = kubelet.prepare(&on_node);
        let _calling = tokio::spawn(async move { kubelet.run_sandbox(&config, "").await });
        wait_for("the cell on the node is made", || kiyot.cells().len() == 2).await;
    })
    .await;
    assert_eq!(world.launched().len(), 0);
    kiyot.start_again().await;
    // The launch is replayed before the first call arrives.
    is_held(&world, "RunInstances", 2).await;
    let mut kubelet = kiyot.kubelet().await;
    let on_node = run_in_the_end(&mut kubelet, &on_node).await;
    assert_eq!(kiyot.cells().len(), 2, "{:?}", kiyot.cells());
    kubelet.stop_and_remove(&on_node).await.unwrap();
    world.faults().clear();
    let running = runs_on_one_instance(&world, &mut kubelet, &spec).await;
    assert_eq!(world.launched().len(), 1, "{:?}", world.launched());
    beside.ends(&world, &kiyot, &[&running]).await;
}

/// Verifies A33, V36.
#[tokio::test]
async fn launch_of_a_pod_that_is_deleted_while_the_daemon_is_dead_leaves_nothing() {
    let world = World::start().await;
    let mut options = world.options();
    options.milpa.push_str("launch_timeout = \"3s\"\n");
    let (mut kiyot, beside) = Beside::start(&world, options).await;
    world.faults().set_hold("RunInstances", Some(Hold::Reply));
    let spec = pod("deleted", "ec2");
    killed_at(&mut kiyot, &spec, async |_| is_held(&world, "RunInstances", 1).await).await;
    assert_eq!(world.running().len(), 1);
    world.faults().clear();
    kiyot.start_again().await;
    world.has_no_cells().await;
    assert_eq!(world.launched().len(), 1, "{:?}", world.launched());
    beside.ends(&world, &kiyot, &[]).await;
}

/// Verifies A33, V36.
#[tokio::test]
async fn daemon_killed_before_the_enrolment_joins_the_launch() {
    let world = World::start().await;
    let (mut kiyot, beside) = Beside::start(&world, world.options()).await;
    let spec = pod("killed", "ec2");
    killed_at(&mut kiyot, &spec, async |kiyot| {
        beside.logged(kiyot, "agent program is downloaded").await;
    })
    .await;
    assert!(!beside.has_log(&kiyot, "certificate issued"), "{}", kiyot.log());
    goes_on(&world, &mut kiyot, &spec, &beside).await;
    assert_eq!(world.launched().len(), 1, "{:?}", world.launched());
}

/// Verifies A33, V36.
#[tokio::test]
async fn daemon_killed_after_the_enrolment_joins_the_launch_or_ends_it() {
    let world = World::start().await;
    let (mut kiyot, beside) = Beside::start(&world, world.options()).await;
    let spec = pod("killed", "ec2");
    killed_at(&mut kiyot, &spec, async |kiyot| beside.logged(kiyot, "certificate issued").await)
        .await;
    assert!(!beside.has_log(&kiyot, "sandbox created"), "{}", kiyot.log());
    goes_on(&world, &mut kiyot, &spec, &beside).await;
}

/// Verifies A33, V36.
#[tokio::test]
async fn daemon_killed_while_it_attaches_a_cell_ends_it_before_the_next() {
    let world = World::start().await;
    let mut options = world.options();
    let gate = gate_of_firewall(world.node.directory());
    let path = format!("{}:{}", gate.display(), command::PATH);
    options.environment.push(("PATH".to_owned(), path));
    let (mut kiyot, beside) = Beside::start(&world, options).await;
    let _absent = fs::remove_file(gate.join("waits"));
    fs::write(gate.join("closed"), "").unwrap();
    let mut spec = pod("killed", "ec2");
    spec.ports =
        vec![cri::PortMapping { container_port: 8080, host_port: 18080, ..Default::default() }];
    killed_at(&mut kiyot, &spec, async |_| {
        wait_for("iptables is called", || gate.join("waits").exists()).await;
    })
    .await;
    assert!(!beside.has_log(&kiyot, "cell bound"), "{}", kiyot.log());
    fs::remove_file(gate.join("closed")).unwrap();
    goes_on(&world, &mut kiyot, &spec, &beside).await;
}

/// Verifies A33, V36, V60.
#[tokio::test]
async fn daemon_killed_while_the_metadata_service_is_closed_ends_the_cell_before_the_next() {
    const CLOSE_METADATA: &str = "ModifyInstanceMetadataOptions";
    let world = World::start().await;
    let (mut kiyot, beside) = Beside::start(&world, world.options()).await;
    for (hold, name) in [(Hold::Effect, "effect"), (Hold::Reply, "reply")] {
        let spec = pod(name, "ec2");
        world.clear_calls();
        world.faults().set_hold(CLOSE_METADATA, Some(hold));
        killed_at(&mut kiyot, &spec, async |_| is_held(&world, CLOSE_METADATA, 1).await).await;
        let killed = world.instance_of(name).id;
        world.faults().clear();
        kiyot.start_again().await;
        let mut kubelet = kiyot.kubelet().await;
        let running = runs_on_one_instance(&world, &mut kubelet, &spec).await;
        let next = world.instance_of(name).id;
        assert_ne!(next, killed, "{hold:?}");
        let closed = |id: &str| {
            let mut calls = world.calls_of(CLOSE_METADATA);
            calls.retain(|call| call.parameters["InstanceId"] == id);
            calls.iter().any(|call| call.outcome == Outcome::Ok)
        };
        assert!(closed(&next), "{hold:?}: {:?}", world.calls_of(CLOSE_METADATA));
        kubelet.stop_and_remove(&running).await.unwrap();
        wait_for("no instance is left", || world.left().is_empty()).await;
    }
    assert_eq!(world.launched().len(), 4);
    beside.ends(&world, &kiyot, &[]).await;
}

/// Verifies A33, V36.
#[tokio::test]
async fn daemon_killed_while_it_makes_the_sandbox_ends_the_cell_before_the_next() {
    let world = World::start().await;
    let (mut kiyot, beside) = Beside::start(&world, world.options()).await;
    let spec = pod("killed", "ec2");
    killed_at(&mut kiyot, &spec, async |kiyot| {
        beside.logged(kiyot, "image copied from the node").await;
    })
    .await;
    assert!(!beside.has_log(&kiyot, "sandbox created"), "{}", kiyot.log());
    goes_on(&world, &mut kiyot, &spec, &beside).await;
}

/// Verifies A33, V36.
#[tokio::test]
async fn daemon_killed_during_a_termination_ends_the_instance() {
    let world = World::start().await;
    let (mut kiyot, beside) = Beside::start(&world, world.options()).await;
    let mut kubelet = kiyot.kubelet().await;
    for hold in [Hold::Effect, Hold::Reply] {
        let running = kubelet.run_pod(&pod("ended", "ec2")).await.unwrap();
        world.clear_calls();
        world.faults().set_hold("TerminateInstances", Some(hold));
        kubelet.stop_and_remove(&running).await.unwrap();
        is_held(&world, "TerminateInstances", 1).await;
        kiyot.kill9();
        kiyot.start_again().await;
        kubelet = kiyot.kubelet().await;
        world.faults().clear();
        world.has_no_cells().await;
        let sandboxes = kubelet.sandboxes().await.unwrap();
        let left: Vec<_> = sandboxes.iter().map(|sandbox| &sandbox.id).collect();
        assert_eq!(left, [&beside.pod.sandbox]);
    }
    assert_eq!(world.launched().len(), 2);
    beside.ends(&world, &kiyot, &[]).await;
}
