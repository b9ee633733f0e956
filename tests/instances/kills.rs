//! Daemons killed at each step of a launch and of an end. Afterwards the pod has one instance or
//! none, and never two.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    time::Duration,
};

use kiyot_testcloud::{Hold, Outcome};
use kiyot_testkit::{
    Kiyot, Kubelet, LIMIT, Pod, RunningPod, command, cri, poll_until, wait_for, wait_until,
};

use super::{WAIT, World, pod, run_in_the_end};

/// Period of looks at the log, below the time between steps.
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

/// Waits until the log has a text.
async fn logged(kiyot: &Kiyot<'_>, text: &str) {
    poll_until(format!("the log has {text:?}"), LIMIT, LOG_POLL_PERIOD, async || {
        kiyot.log().contains(text).then_some(())
    })
    .await;
}

/// Makes a directory with an `iptables-restore` that waits while the directory has a file `closed`.
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
    fs::write(gate.join("closed"), "").unwrap();
    gate
}

/// Waits until a call of an action is held.
async fn is_held(world: &World, action: &str, calls: usize) {
    wait_until(format!("{action} is held"), LIMIT, async || {
        let calls_of = world.calls_of(action);
        let held = calls_of.iter().filter(|call| call.outcome == Outcome::Held);
        (held.count() >= calls).then_some(())
    })
    .await;
}

/// Runs the pod as the kubelet's retries do. It never has two instances.
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

/// Restarts the daemon; the pod runs on one instance, and nothing is left after its end.
async fn goes_on(world: &World, kiyot: &mut Kiyot<'_>, spec: &Pod) {
    kiyot.start_again().await;
    let mut kubelet = kiyot.kubelet().await;
    let running = runs_on_one_instance(world, &mut kubelet, spec).await;
    world.ends(&mut kubelet, &[&running]).await;
}

/// Verifies V36.
#[tokio::test]
async fn daemon_killed_before_its_launch_reaches_the_cloud_makes_one_instance() {
    let world = World::start().await;
    let (mut kiyot, _kubelet) = world.daemon(world.options()).await;
    let spec = pod("killed", WAIT);
    world.faults().set_hold("RunInstances", Some(Hold::Effect));
    killed_at(&mut kiyot, &spec, async |_| is_held(&world, "RunInstances", 1).await).await;
    assert_eq!(world.launched().len(), 0);
    kiyot.start_again().await;
    // The replay is under way before the first call arrives.
    is_held(&world, "RunInstances", 2).await;
    let mut kubelet = kiyot.kubelet().await;
    world.faults().clear();
    let running = runs_on_one_instance(&world, &mut kubelet, &spec).await;
    assert_eq!(world.launched().len(), 1, "{:?}", world.launched());
    world.ends(&mut kubelet, &[&running]).await;
}

/// Verifies V36.
#[tokio::test]
async fn launch_of_a_pod_that_is_deleted_while_the_daemon_is_dead_leaves_nothing() {
    let world = World::start().await;
    let mut options = world.options();
    options.milpa.push_str("launch_timeout = \"3s\"\n");
    let (mut kiyot, _kubelet) = world.daemon(options).await;
    world.faults().set_hold("RunInstances", Some(Hold::Reply));
    let spec = pod("deleted", WAIT);
    killed_at(&mut kiyot, &spec, async |_| is_held(&world, "RunInstances", 1).await).await;
    assert_eq!(world.running().len(), 1);
    world.faults().clear();
    kiyot.start_again().await;
    world.has_no_cells().await;
    assert_eq!(world.launched().len(), 1, "{:?}", world.launched());
}

/// Verifies V36.
#[tokio::test]
async fn daemon_killed_before_the_enrolment_joins_the_launch() {
    let world = World::start().await;
    let (mut kiyot, _kubelet) = world.daemon(world.options()).await;
    let spec = pod("killed", WAIT);
    killed_at(&mut kiyot, &spec, async |kiyot| {
        logged(kiyot, "agent program is downloaded").await;
    })
    .await;
    assert!(!kiyot.log().contains("certificate issued"), "{}", kiyot.log());
    goes_on(&world, &mut kiyot, &spec).await;
    assert_eq!(world.launched().len(), 1, "{:?}", world.launched());
}

/// Verifies V36.
#[tokio::test]
async fn daemon_killed_after_the_enrolment_joins_the_launch_or_ends_it() {
    let world = World::start().await;
    let (mut kiyot, _kubelet) = world.daemon(world.options()).await;
    let spec = pod("killed", WAIT);
    killed_at(&mut kiyot, &spec, async |kiyot| logged(kiyot, "certificate issued").await).await;
    assert!(!kiyot.log().contains("sandbox created"), "{}", kiyot.log());
    goes_on(&world, &mut kiyot, &spec).await;
}

/// Verifies V36.
#[tokio::test]
async fn daemon_killed_while_it_attaches_a_cell_ends_it_before_the_next() {
    let world = World::start().await;
    let mut options = world.options();
    let gate = gate_of_firewall(world.node.directory());
    let path = format!("{}:{}", gate.display(), command::PATH);
    options.environment.push(("PATH".to_owned(), path));
    let (mut kiyot, _kubelet) = world.daemon(options).await;
    let mut spec = pod("killed", WAIT);
    spec.ports =
        vec![cri::PortMapping { container_port: 8080, host_port: 18080, ..Default::default() }];
    killed_at(&mut kiyot, &spec, async |_| {
        wait_for("the firewall is called", || gate.join("waits").exists()).await;
    })
    .await;
    assert!(!kiyot.log().contains("cell bound"), "{}", kiyot.log());
    fs::remove_file(gate.join("closed")).unwrap();
    goes_on(&world, &mut kiyot, &spec).await;
}

/// Verifies V36, V60.
#[tokio::test]
async fn daemon_killed_while_the_metadata_service_is_closed_ends_the_cell_before_the_next() {
    const CLOSE_METADATA: &str = "ModifyInstanceMetadataOptions";
    let world = World::start().await;
    let (mut kiyot, _kubelet) = world.daemon(world.options()).await;
    for (hold, name) in [(Hold::Effect, "effect"), (Hold::Reply, "reply")] {
        let spec = pod(name, WAIT);
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
}

/// Verifies V36.
#[tokio::test]
async fn daemon_killed_while_it_makes_the_sandbox_ends_the_cell_before_the_next() {
    let world = World::start().await;
    let (mut kiyot, _kubelet) = world.daemon(world.options()).await;
    let spec = pod("killed", WAIT);
    killed_at(&mut kiyot, &spec, async |kiyot| {
        logged(kiyot, "image copied from the node").await;
    })
    .await;
    assert!(!kiyot.log().contains("sandbox created"), "{}", kiyot.log());
    goes_on(&world, &mut kiyot, &spec).await;
}

/// Verifies V36.
#[tokio::test]
async fn daemon_killed_during_a_termination_ends_the_instance() {
    let world = World::start().await;
    let (mut kiyot, mut kubelet) = world.daemon(world.options()).await;
    for hold in [Hold::Effect, Hold::Reply] {
        let running = kubelet.run_pod(&pod("ended", WAIT)).await.unwrap();
        world.clear_calls();
        world.faults().set_hold("TerminateInstances", Some(hold));
        kubelet.stop_and_remove(&running).await.unwrap();
        is_held(&world, "TerminateInstances", 1).await;
        kiyot.kill9();
        kiyot.start_again().await;
        kubelet = kiyot.kubelet().await;
        world.faults().clear();
        world.has_no_cells().await;
        assert_eq!(kubelet.sandboxes().await.unwrap(), []);
    }
    assert_eq!(world.launched().len(), 2);
}
