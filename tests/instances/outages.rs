//! Outages and refusals of the API while pods run.

use std::time::Duration;

use kiyot_testcloud::{Call, Credentials, Outage, Outcome, RoleKey, State};
use kiyot_testkit::{Kiyot, Kubelet, LIMIT, Pod, RunningPod, wait_for, wait_until};

use super::{SHORT_LISTING_PERIOD, WAIT, World, are_unharmed, local_pod, pod, run_in_the_end};

/// The code of a call that EC2 refuses because there are too many.
const LIMIT_EXCEEDED: &str = "RequestLimitExceeded";
/// Failed lists in each part of an outage.
const FAILED_LISTS: usize = 3;
/// Lists after an outage: more than the two that end an instance without a cell.
const SUCCESSFUL_LISTS: usize = 3;

/// Waits until several lists have failed.
async fn lists_fail(kiyot: &Kiyot<'_>) {
    let failed = || kiyot.log().matches("provider instances not listed").count();
    let before = failed();
    wait_for("lists fail", || failed() >= before + FAILED_LISTS).await;
}

/// A daemon with a short time for launches, and three pods.
struct MidRun<'a> {
    kiyot: Kiyot<'a>,
    kubelet: Kubelet,
    /// A pod on the node.
    local: RunningPod,
    /// A pod in a cell.
    kept: RunningPod,
    /// A pod in a cell that is terminated during the outage.
    ended: RunningPod,
    /// The instance of `ended`.
    instance: String,
}

impl<'a> MidRun<'a> {
    async fn start(world: &'a World) -> Self {
        let mut options = world.options();
        // A launch must still succeed within this time: a busy machine needs a third of it.
        options.milpa.push_str("launch_timeout = \"20s\"\n");
        options.of_provider.push_str(SHORT_LISTING_PERIOD);
        let (kiyot, mut kubelet) = world.daemon(options).await;
        let local = kubelet.run_pod(&local_pod()).await.unwrap();
        let kept = run_in_the_end(&mut kubelet, &pod("kept", WAIT)).await;
        let ended = run_in_the_end(&mut kubelet, &pod("ended", WAIT)).await;
        let instance = world.instance_of("ended").id;
        Self { kiyot, kubelet, local, kept, ended, instance }
    }

    /// Ends the faults, and waits for the termination and for the launch of a pod.
    async fn recovers(mut self, world: &World, new: &Pod) {
        world.faults().clear();
        world.reaches(&self.instance, State::Terminated).await;
        let new = run_in_the_end(&mut self.kubelet, new).await;
        let pods = [&self.kept, &self.local, &new];
        are_unharmed(&mut self.kubelet, &pods).await;
        world.ends(&mut self.kubelet, &pods).await;
    }
}

/// Represents an outage of half an hour by its effects: several lists fail, a launch and a
/// termination fail and are repeated, and the time for the launch passes.
///
/// Verifies V32, V33.
#[tokio::test]
async fn outage_in_mid_run_harms_no_running_pod() {
    let world = World::start().await;
    let mut run = Box::pin(MidRun::start(&world)).await;
    let new = pod("new", WAIT);
    world.faults().set_outage(Some(Outage::Refused));
    let mut other = run.kubelet.clone();
    let outage = async {
        run.kubelet.stop_and_remove(&run.ended).await.unwrap();
        for outage in [Outage::Refused, Outage::Unavailable] {
            world.faults().set_outage(Some(outage));
            lists_fail(&run.kiyot).await;
            are_unharmed(&mut run.kubelet, &[&run.kept, &run.local]).await;
        }
    };
    let (refused, ()) = tokio::join!(other.run_pod(&new), outage);
    let error = refused.unwrap_err();
    assert!(error.message().contains("was not launched within 20 s: launch t"), "{error}");
    are_unharmed(&mut run.kubelet, &[&run.kept, &run.local]).await;
    Box::pin(run.recovers(&world, &new)).await;
}

/// Verifies V28, V33.
#[tokio::test]
async fn restart_while_the_api_is_down_keeps_running_pods() {
    let world = World::start().await;
    let mut options = world.options();
    options.of_provider.push_str(SHORT_LISTING_PERIOD);
    let (mut kiyot, mut kubelet) = world.daemon(options).await;
    let local = kubelet.run_pod(&local_pod()).await.unwrap();
    let script = "i=0; while :; do i=$((i+1)); echo line $i; sleep 0.2; done";
    let kept = kubelet.run_pod(&pod("kept", script)).await.unwrap();
    let main = kept.container("main").clone();
    let instance = world.instance_of("kept").id;
    kubelet.logged(&main, "line 2").await;
    for outage in [Outage::Refused, Outage::Unavailable] {
        world.faults().set_outage(Some(outage));
        kiyot.kill9();
        let before = kubelet.log_lines(&main).len();
        kiyot.start_again().await;
        kubelet = kiyot.kubelet().await;
        lists_fail(&kiyot).await;
        wait_until("the pod answers", LIMIT, async || {
            kubelet.exec_sync(&main.id, &["true"]).await.ok()
        })
        .await;
        are_unharmed(&mut kubelet, &[&kept, &local]).await;
        wait_for("the log goes on", || kubelet.log_lines(&main).len() > before).await;
        world.faults().clear();
    }
    world.clear_calls();
    wait_for("instances are listed", || {
        let mut lists = world.calls_of("DescribeInstances");
        lists.retain(|call| call.outcome == Outcome::Ok);
        lists.len() >= SUCCESSFUL_LISTS
    })
    .await;
    are_unharmed(&mut kubelet, &[&kept, &local]).await;
    let lines = kubelet.log_lines(&main);
    for (line, number) in lines.iter().zip(1..) {
        assert_eq!(line.text, format!("line {number}"), "no line is lost or doubled");
    }
    assert_eq!(world.instance_of("kept").id, instance);
    assert_eq!(world.launched().len(), 1);
    assert!(world.calls_of("TerminateInstances").is_empty());
    let new = kubelet.run_pod(&pod("new", WAIT)).await.unwrap();
    world.ends(&mut kubelet, &[&kept, &local, &new]).await;
}

/// Verifies V28, V33.
#[tokio::test]
async fn credentials_that_expire_in_mid_run_harm_no_running_pod() {
    let world = World::start().await;
    let mut options = world.options();
    options.of_provider.push_str(SHORT_LISTING_PERIOD);
    let (mut kiyot, mut kubelet) = world.daemon(options).await;
    let local = kubelet.run_pod(&local_pod()).await.unwrap();
    let kept = kubelet.run_pod(&pod("kept", WAIT)).await.unwrap();
    let spec = pod("refused", WAIT);
    world.faults().set_credentials(Some(Credentials::Expired));
    let error = kubelet.run_pod(&spec).await.unwrap_err();
    assert!(error.message().contains("RequestExpired"), "{error}");
    for refusal in [Credentials::Expired, Credentials::Wrong, Credentials::Unknown] {
        world.faults().set_credentials(Some(refusal));
        lists_fail(&kiyot).await;
        are_unharmed(&mut kubelet, &[&kept, &local]).await;
    }
    assert_eq!(world.launched().len(), 1);
    world.faults().clear();
    // The restart replaces the pause of three minutes after a launch that was not permitted.
    kiyot.restart().await;
    let mut kubelet = kiyot.kubelet().await;
    let running = run_in_the_end(&mut kubelet, &spec).await;
    world.ends(&mut kubelet, &[&kept, &local, &running]).await;
}

/// Verifies V28, V33.
#[tokio::test]
async fn daemon_that_starts_with_wrong_credentials_runs_pods_on_the_node() {
    let world = World::start().await;
    world.faults().set_credentials(Some(Credentials::Wrong));
    let (_kiyot, mut kubelet) = world.daemon(world.options()).await;
    let local = kubelet.run_pod(&local_pod()).await.unwrap();
    let spec = pod("refused", WAIT);
    let error = kubelet.run_pod(&spec).await.unwrap_err();
    assert!(error.message().contains("AuthFailure"), "{error}");
    are_unharmed(&mut kubelet, &[&local]).await;
    assert!(world.launched().is_empty());
    world.faults().clear();
    let running = run_in_the_end(&mut kubelet, &spec).await;
    world.ends(&mut kubelet, &[&running, &local]).await;
}

/// Verifies V28, V33.
#[tokio::test]
async fn daemon_without_credentials_runs_pods_on_the_node_and_names_credentials_in_other_errors() {
    let world = World::start().await;
    let mut options = world.options();
    options.environment = ["AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"]
        .map(|file| (file.to_owned(), "/nonexistent".to_owned()))
        .into();
    options.environment.push(("AWS_EC2_METADATA_DISABLED".to_owned(), "true".to_owned()));
    let (_kiyot, mut kubelet) = world.daemon(options).await;
    let local = kubelet.run_pod(&local_pod()).await.unwrap();
    let error = kubelet.run_pod(&pod("refused", WAIT)).await.unwrap_err();
    assert!(error.message().contains("credentials"), "{error}");
    are_unharmed(&mut kubelet, &[&local]).await;
    assert!(world.calls().is_empty(), "{:?}", world.calls());
    world.ends(&mut kubelet, &[&local]).await;
}

/// The documentation recommends the instance profile for the node's credentials. The SDK renews
/// them 10 s before they expire, and keeps using the last ones until it gets new ones.
///
/// Verifies V33, V85.
#[tokio::test]
async fn credentials_of_the_instance_profile_are_renewed_and_in_no_log() {
    const LIFETIME: Duration = Duration::from_secs(12);
    let key = |number: u8| RoleKey {
        id: format!("ASIA{number}"),
        secret: format!("planted-secret-{number}"),
        token: format!("planted-token-{number}"),
        lifetime: LIFETIME,
    };
    let world = World::start().await;
    world.set_role_key(Some(key(1)));
    let mut options = world.options();
    options.environment = ["AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"]
        .map(|file| (file.to_owned(), "/nonexistent".to_owned()))
        .into();
    options.of_provider.push_str(SHORT_LISTING_PERIOD);
    let (kiyot, mut kubelet) = world.daemon(options).await;
    let local = kubelet.run_pod(&local_pod()).await.unwrap();
    let kept = kubelet.run_pod(&pod("kept", WAIT)).await.unwrap();
    let signed = |id: &str| {
        let mut calls = world.calls();
        calls.retain(|call| call.key_id == id && call.outcome == Outcome::Ok);
        calls.iter().any(|call| call.action == "DescribeInstances")
    };
    assert!(signed("ASIA1"), "{:?}", world.calls());
    world.set_role_key(Some(key(2)));
    wait_for("lists have the new key", || signed("ASIA2")).await;
    let new = kubelet.run_pod(&pod("new", WAIT)).await.unwrap();
    let refused = |call: &Call| !matches!(call.outcome, Outcome::Ok | Outcome::Pending);
    let refused: Vec<_> = world.calls().into_iter().filter(refused).collect();
    assert!(refused.is_empty(), "{refused:?}");
    assert!(world.calls().iter().all(|call| ["ASIA1", "ASIA2"].contains(&&*call.key_id)));

    // The role is detached from the node, and attached again.
    world.set_role_key(None);
    lists_fail(&kiyot).await;
    are_unharmed(&mut kubelet, &[&kept, &new, &local]).await;
    world.set_role_key(Some(key(3)));
    wait_for("lists have the last key", || signed("ASIA3")).await;
    are_unharmed(&mut kubelet, &[&kept, &new, &local]).await;
    world.ends(&mut kubelet, &[&kept, &new, &local]).await;
    for secret in ["planted-secret", "planted-token"] {
        assert!(!kiyot.log().contains(secret), "{secret}");
    }
}

/// Verifies V33, V34.
#[tokio::test]
async fn throttled_calls_in_mid_run_harm_no_running_pod() {
    let world = World::start().await;
    let mut run = Box::pin(MidRun::start(&world)).await;
    let new = pod("new", WAIT);
    world.clear_calls();
    for action in ["DescribeInstances", "TerminateInstances", "RunInstances"] {
        world.faults().fail(action, 503, LIMIT_EXCEEDED, usize::MAX);
    }
    let mut other = run.kubelet.clone();
    let throttled = async {
        run.kubelet.stop_and_remove(&run.ended).await.unwrap();
        lists_fail(&run.kiyot).await;
        are_unharmed(&mut run.kubelet, &[&run.kept, &run.local]).await;
        // A refused call is repeated and refused again.
        for action in ["TerminateInstances", "RunInstances"] {
            let refused = Outcome::Error(LIMIT_EXCEEDED.to_owned());
            wait_for(format!("{action} is repeated"), || {
                let mut calls = world.calls_of(action);
                calls.retain(|call| call.outcome == refused);
                calls.len() >= 2
            })
            .await;
        }
        are_unharmed(&mut run.kubelet, &[&run.kept, &run.local]).await;
    };
    let (refused, ()) = tokio::join!(other.run_pod(&new), throttled);
    let error = refused.unwrap_err();
    assert!(error.message().contains(LIMIT_EXCEEDED), "{error}");
    for action in ["TerminateInstances", "RunInstances"] {
        let calls = world.calls_of(action);
        assert!(calls.iter().all(|call| call.outcome != Outcome::Ok), "{calls:?}");
    }
    Box::pin(run.recovers(&world, &new)).await;
}
