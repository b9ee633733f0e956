//! Ends of instances that the daemon did not order.

use kiyot_testcloud::State;
use kiyot_testkit::{Kubelet, LIMIT, RunningPod, kill_all, processes, wait_until};

use super::{SHORT_LISTING_PERIOD, WAIT, World, are_unharmed, pod, sandbox_ends};

/// EC2's reason for the end of an instance that a call stops or terminates.
const BY_USER: &str = "Client.UserInitiatedShutdown: User initiated shutdown";

/// Waits until a pod has lost its cell, and checks the reason.
async fn is_lost(kubelet: &mut Kubelet, pod: &RunningPod, reason: &str) {
    sandbox_ends(kubelet, &pod.sandbox).await;
    let status = kubelet.container_status(&pod.container("main").id).await.unwrap();
    assert_eq!((status.exit_code, status.reason.as_str()), (137, "CellLost"), "{status:?}");
    assert!(status.message.ends_with(&format!("its instance ended: {reason}")), "{status:?}");
}

/// Verifies V25.
#[tokio::test]
async fn instance_terminated_from_the_console_ends_its_pod() {
    let world = World::start().await;
    let (_kiyot, mut kubelet) = world.daemon(world.options()).await;
    let ended = kubelet.run_pod(&pod("ended", WAIT)).await.unwrap();
    let id = world.launched().remove(0).id;
    let other = kubelet.run_pod(&pod("other", WAIT)).await.unwrap();
    world.change("TerminateInstances", &id).await;
    is_lost(&mut kubelet, &ended, BY_USER).await;
    kubelet.exec_sync(&other.container("main").id, &["true"]).await.unwrap();
    world.ends(&mut kubelet, &[&ended, &other]).await;
}

/// Verifies V25.
#[tokio::test]
async fn spot_interruption_is_the_reason_in_the_status_of_its_pod() {
    let world = World::start().await;
    let (kiyot, mut kubelet) = world.daemon(world.options()).await;
    let interrupted = kubelet.run_pod(&pod("interrupted", WAIT)).await.unwrap();
    world.interrupt(&world.instance_of("interrupted").id).await;
    let reason = "Server.SpotInstanceTermination: Spot instance interrupted";
    is_lost(&mut kubelet, &interrupted, reason).await;
    let log = kiyot.log();
    let is_named = |line: &&str| line.contains("cell instance ended") && line.contains(reason);
    assert_eq!(log.lines().filter(is_named).count(), 1, "{log}");
    world.ends(&mut kubelet, &[&interrupted]).await;
}

/// Verifies V21, V25.
#[tokio::test]
async fn instance_stopped_from_the_console_fails_its_pod_and_never_resumes_it() {
    let world = World::start().await;
    let mut options = world.options();
    options.of_provider.push_str(SHORT_LISTING_PERIOD);
    let (_kiyot, mut kubelet) = world.daemon(options).await;
    let other = kubelet.run_pod(&pod("other", WAIT)).await.unwrap();

    let stopped = kubelet.run_pod(&pod("stopped", WAIT)).await.unwrap();
    let id = world.instance_of("stopped").id;
    world.change("StopInstances", &id).await;
    is_lost(&mut kubelet, &stopped, BY_USER).await;
    world.reaches(&id, State::Terminated).await;

    // The instance is started again before the daemon is permitted to terminate it.
    let started = kubelet.run_pod(&pod("started", WAIT)).await.unwrap();
    let id = world.instance_of("started").id;
    world.clear_calls();
    world.faults().set_denied("TerminateInstances", true);
    world.change("StopInstances", &id).await;
    world.reaches(&id, State::Stopped).await;
    wait_until("the daemon terminates the instance", LIMIT, async || {
        world.calls_of("TerminateInstances").pop()
    })
    .await;
    world.change("StartInstances", &id).await;
    world.reaches(&id, State::Terminated).await;
    assert_eq!(world.instance(&id).unwrap().boots, 2);
    let console = world.console(&id);
    assert!(console.contains("machine has run its cell before"), "{console}");
    is_lost(&mut kubelet, &started, BY_USER).await;
    are_unharmed(&mut kubelet, &[&other]).await;
    world.faults().clear();
    world.ends(&mut kubelet, &[&other, &stopped, &started]).await;
}

/// Verifies V21, V25.
#[tokio::test]
async fn instance_stopped_and_started_from_the_console_never_resumes_its_pod() {
    let world = World::start().await;
    let (mut kiyot, mut kubelet) = world.daemon(world.options()).await;
    let running = kubelet.run_pod(&pod("stopped", WAIT)).await.unwrap();
    let id = world.launched().remove(0).id;
    // No daemon runs: it would terminate the stopped instance.
    kiyot.kill9();
    world.change("StopInstances", &id).await;
    world.reaches(&id, State::Stopped).await;
    world.change("StartInstances", &id).await;
    world.reaches(&id, State::Terminated).await;
    let console = world.console(&id);
    assert!(console.contains("machine has run its cell before"), "{console}");
    kiyot.start_again().await;
    let mut kubelet = kiyot.kubelet().await;
    sandbox_ends(&mut kubelet, &running.sandbox).await;
    world.ends(&mut kubelet, &[&running]).await;
}

/// Verifies V21.
#[tokio::test]
async fn killed_service_powers_its_instance_off() {
    let world = World::start().await;
    let (_kiyot, mut kubelet) = world.daemon(world.options()).await;
    let running = kubelet.run_pod(&pod("crashed", WAIT)).await.unwrap();
    let id = world.launched().remove(0).id;
    let service = processes(&["/usr/local/bin/kiyot-cell service"]);
    assert!(!service.is_empty(), "no service runs");
    kill_all(&service);
    world.reaches(&id, State::Terminated).await;
    sandbox_ends(&mut kubelet, &running.sandbox).await;
    kubelet.stop_and_remove(&running).await.unwrap();
}

/// Verifies V25.
#[tokio::test]
async fn killed_daemon_finds_its_pods_again() {
    let world = World::start().await;
    let (mut kiyot, mut kubelet) = world.daemon(world.options()).await;
    let script = "i=0; while :; do i=$((i+1)); echo line $i; sleep 0.2; done";
    let running = kubelet.run_pod(&pod("counter", script)).await.unwrap();
    let main = running.container("main").clone();
    kubelet.logged(&main, "line 2").await;
    kiyot.kill9();
    kiyot.start_again().await;
    let mut kubelet = kiyot.kubelet().await;
    wait_until("the pod answers again", LIMIT, async || {
        kubelet.exec_sync(&main.id, &["true"]).await.ok()
    })
    .await;
    let seen = kubelet.log_lines(&main).len();
    wait_until("the log goes on", LIMIT, async || {
        (kubelet.log_lines(&main).len() > seen).then_some(())
    })
    .await;
    let lines = kubelet.log_lines(&main);
    for (at, line) in lines.iter().enumerate() {
        assert_eq!(line.text, format!("line {}", at + 1), "no line is lost or doubled");
    }
    assert_eq!(world.running().len(), 1);
    world.ends(&mut kubelet, &[&running]).await;
}
