//! Faults of the API and of instances, as a kubelet sees them.

use kiyot_testcloud::{Cloud, Outage, Outcome};
use kiyot_testkit::{Container, Kubelet, LIMIT, Pod, RunningPod, allowed, wait_for, wait_until};
use tokio::time::{Instant, timeout};

use super::{
    LOCAL_LIMIT, SHORT_LISTING_PERIOD, WAIT, World, are_unharmed, local_pod, pod, run,
    run_in_the_end,
};

/// Lists of the other endpoint: more than the two that end an instance without a cell.
const LISTS: usize = 3;

/// Terminations that are denied before they are permitted again.
const DENIED: usize = 2;

/// Verifies V27, V33.
#[tokio::test]
async fn agent_that_never_starts_fails_its_pod_with_the_console_and_a_denied_end_is_retried() {
    let world = World::start().await;
    let mut options = world.options();
    // This program has no command `service`: the instance does not end by itself.
    options.sections.push_str("agent = \"/bin/true\"\n");
    let (mut kiyot, _kubelet) = world.daemon(options).await;
    world.faults().set_denied("TerminateInstances", true);
    let ended = "user-data ended with status 0";
    let error = world.error_of_launch_that_says(&mut kiyot, &pod("silent", WAIT), ended).await;
    let message = error.message();
    assert!(message.contains("did not connect within"), "{message}");
    assert!(message.contains(&format!("its console ends: {ended}")), "{message}");
    wait_for("the termination is repeated", || {
        world.calls_of("TerminateInstances").len() >= DENIED
    })
    .await;
    assert_eq!(world.running().len(), 1);
    world.faults().clear();
    world.has_no_cells().await;
}

/// The pod in a cell waits at most 20 s. The start during an outage is compared with that wait:
/// however slow the machine is, pods on the node do not wait for the API.
///
/// Verifies V28, V33.
#[tokio::test]
async fn api_outage_delays_only_pods_in_cells() {
    let world = World::start().await;
    let mut options = world.options();
    options.milpa.push_str("launch_timeout = \"20s\"\n");
    world.faults().set_outage(Some(Outage::Hang));
    let (mut kiyot, mut kubelet) = world.daemon(options).await;
    let spec = pod("waits", WAIT);
    let mut other = kubelet.clone();
    let waiting = other.run_pod(&spec);
    tokio::pin!(waiting);
    let first = tokio::select! {
        biased;
        outcome = &mut waiting => panic!("the pod in a cell did not wait: {outcome:?}"),
        first = lives_on_the_node(&mut kubelet, "first") => first,
    };
    let error = waiting.await.unwrap_err();
    let message = error.message();
    assert!(message.starts_with("the provider of cells: read subnets and images"), "{message}");
    // Both lists are read concurrently: either may time out first.
    let calls = ["DescribeSubnets", "DescribeImages"];
    let late = |call: &str| message.ends_with(&format!("{call}: not answered within 20 s"));
    assert!(calls.into_iter().any(late), "{message}");
    let mut locals = vec![first];
    for outage in [Outage::Hang, Outage::Refused, Outage::Unavailable] {
        world.faults().set_outage(Some(outage));
        let began = Instant::now();
        kiyot.restart().await;
        kubelet = kiyot.kubelet().await;
        let name = format!("local-{outage:?}").to_lowercase();
        let local = lives_on_the_node(&mut kubelet, &name);
        let answered = timeout(allowed(LOCAL_LIMIT), local).await;
        locals.push(answered.unwrap_or_else(|_| panic!("{outage:?}: pods on the node wait")));
        eprintln!("{outage:?}: a pod on the node runs {:?} after the restart", began.elapsed());
    }
    world.faults().clear();
    let running = run_in_the_end(&mut kubelet, &spec).await;
    for outage in [Outage::Refused, Outage::Reset, Outage::Unavailable, Outage::InternalError] {
        world.faults().set_outage(Some(outage));
        are_unharmed(&mut kubelet, &[&running, &locals[0]]).await;
    }
    world.faults().clear();
    let all: Vec<&RunningPod> = locals.iter().chain([&running]).collect();
    world.ends(&mut kubelet, &all).await;
}

/// Runs a pod on the node and makes the kubelet's calls for it.
async fn lives_on_the_node(kubelet: &mut Kubelet, name: &str) -> RunningPod {
    let spec = Pod::new(name).container(Container::script("main", WAIT));
    let local = kubelet.run_pod(&spec).await.unwrap();
    kubelet.sandbox_status(&local.sandbox).await.unwrap();
    let listed = kubelet.containers().await.unwrap();
    let main = &local.container("main").id;
    assert!(listed.iter().any(|container| container.id == *main), "{listed:?}");
    run(kubelet, main, "true").await;
    local
}

/// Verifies V28, V80.
#[tokio::test]
async fn empty_lists_of_another_endpoint_or_region_end_no_pod() {
    let world = World::start().await;
    let other = Cloud::start().await;
    let mut options = world.options();
    options.of_provider.push_str(SHORT_LISTING_PERIOD);
    let (mut kiyot, mut kubelet) = world.daemon(options).await;
    let local = kubelet.run_pod(&local_pod()).await.unwrap();
    let kept = kubelet.run_pod(&pod("elsewhere", WAIT)).await.unwrap();
    let main = kept.container("main").id.clone();
    let configuration = std::fs::read_to_string(kiyot.configuration()).unwrap();
    let elsewhere = configuration.replace(&world.endpoint(), &other.endpoint());
    let (here, there) = ("region = \"us-east-1\"", "region = \"eu-west-1\"");
    assert!(elsewhere != configuration && elsewhere.contains(here), "{configuration}");
    for (region, changed) in
        [("us-east-1", elsewhere.clone()), ("eu-west-1", elsewhere.replace(here, there))]
    {
        kiyot.stop().await;
        std::fs::write(kiyot.configuration(), changed).unwrap();
        other.clear_calls();
        kiyot.start_again().await;
        kubelet = kiyot.kubelet().await;
        wait_until("the pod answers", LIMIT, async || {
            kubelet.exec_sync(&main, &["true"]).await.ok()
        })
        .await;
        wait_until("the other endpoint is asked for instances", LIMIT, async || {
            let mut lists = other.calls_of("DescribeInstances");
            lists.retain(|call| call.outcome == Outcome::Ok);
            (lists.len() >= LISTS).then_some(())
        })
        .await;
        are_unharmed(&mut kubelet, &[&kept, &local]).await;
        let log = kiyot.log();
        let first = format!("launched_in=\"region us-east-1, endpoint {}\"", world.endpoint());
        let now = format!("region {region}, endpoint {}", other.endpoint());
        let names = |line: &str| line.contains("ERROR") && line.contains(&first);
        let named = log.lines().filter(|line| names(line) && line.contains(&now));
        assert_eq!(named.count(), 1, "{log}");
        for cloud in [&world, &other] as [&Cloud; 2] {
            assert!(cloud.calls_of("TerminateInstances").is_empty());
        }
    }
    kiyot.stop().await;
    std::fs::write(kiyot.configuration(), configuration).unwrap();
    kiyot.start_again().await;
    let mut kubelet = kiyot.kubelet().await;
    wait_until("the pod answers", LIMIT, async || kubelet.exec_sync(&main, &["true"]).await.ok())
        .await;
    world.ends(&mut kubelet, &[&kept, &local]).await;
    assert_eq!(world.launched().len(), 1);
}

/// Verifies V80.
#[tokio::test]
async fn empty_lists_of_another_provider_end_no_pod() {
    let world = World::start().await;
    let (mut kiyot, mut kubelet) = world.daemon(world.options()).await;
    let local = kubelet.run_pod(&local_pod()).await.unwrap();
    let kept = kubelet.run_pod(&pod("kept", WAIT)).await.unwrap();
    let deleted = kubelet.run_pod(&pod("deleted", WAIT)).await.unwrap();
    let configuration = std::fs::read_to_string(kiyot.configuration()).unwrap();
    let changed = configuration.replace("provider = \"ec2\"", "provider = \"netns\"");
    assert_ne!(changed, configuration);
    kiyot.stop().await;
    std::fs::write(kiyot.configuration(), changed).unwrap();
    kiyot.start_again().await;
    kubelet = kiyot.kubelet().await;
    for running in [&kept, &deleted] {
        let main = &running.container("main").id;
        wait_until("the pod answers", LIMIT, async || {
            kubelet.exec_sync(main, &["true"]).await.ok()
        })
        .await;
    }
    are_unharmed(&mut kubelet, &[&kept, &deleted, &local]).await;
    let log = kiyot.log();
    let cells: Vec<_> =
        world.launched().iter().map(|instance| instance.tags["kiyot:cell"].clone()).collect();
    let names = |line: &&str| {
        line.contains("ERROR")
            && line.contains("provider, region or endpoint changed while cells exist")
            && line.contains("launched_in=\"region us-east-1, endpoint ")
            && line.contains("provider_looks_in=\"this node (netns or qemu)\"")
            && cells.iter().all(|cell| line.contains(cell))
    };
    assert_eq!((cells.len(), log.lines().filter(names).count()), (2, 1), "{log}");

    // The cell's agent ends the pod and the instance.
    kubelet.stop_and_remove(&deleted).await.unwrap();
    are_unharmed(&mut kubelet, &[&kept, &local]).await;
    assert!(world.calls_of("TerminateInstances").is_empty());
    kiyot.stop().await;
    std::fs::write(kiyot.configuration(), configuration).unwrap();
    kiyot.start_again().await;
    let mut kubelet = kiyot.kubelet().await;
    let main = &kept.container("main").id;
    wait_until("the pod answers", LIMIT, async || kubelet.exec_sync(main, &["true"]).await.ok())
        .await;
    world.ends(&mut kubelet, &[&kept, &local]).await;
    world.has_no_cells().await;
    assert_eq!(world.launched().len(), 2);
}
