//! Cells of two providers at the same time: on the node, and instances of the cloud.

use std::fs;

use kiyot_testcloud::Outage;
use kiyot_testkit::{
    Container, Kiyot, KiyotOptions, Kubelet, LIMIT, Pod, Provider, RunningPod, wait_until,
};
use tokio::time::timeout;

use super::{LOCAL_LIMIT, WAIT, World, pod, run};

/// Memory for cells on the node, in MiB: enough for one pod of the default size with the memory of
/// its cell, but not for two.
const NODE_MIB: u64 = 1000;

/// Returns the options of a daemon that prefers cells on the node while the node has room.
pub(super) fn options(world: &World) -> KiyotOptions {
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap();
    let total = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:")).unwrap();
    let kib: u64 = total.trim().trim_end_matches("kB").trim().parse().unwrap();
    let reserved = kib / 1024 - NODE_MIB;
    let mut options = world.options();
    options.preferred = Some((Provider::Netns, format!("reserve_memory = \"{reserved}Mi\"")));
    options
}

async fn start(kubelet: &mut Kubelet, name: &str) -> RunningPod {
    kubelet.run_pod(&pod(name, WAIT)).await.unwrap()
}

/// Returns the number of cells on the node, and of running instances of the cloud.
pub(super) fn cells(world: &World, kiyot: &Kiyot<'_>) -> (usize, usize) {
    (kiyot.cells().len(), world.running().len())
}

/// Verifies A30, A31, A33, A35.
#[tokio::test]
async fn node_fills_first_then_pods_overflow_and_all_outlive_the_daemon() {
    let world = World::start().await;
    let (mut kiyot, mut kubelet) = world.daemon(options(&world)).await;
    let first = start(&mut kubelet, "first").await;
    assert_eq!(cells(&world, &kiyot), (1, 0));
    let second = start(&mut kubelet, "second").await;
    assert_eq!(cells(&world, &kiyot), (1, 1));
    for (running, host) in [(&first, "first"), (&second, "second")] {
        let name = run(&mut kubelet, &running.container("main").id, "hostname").await;
        assert_eq!(name.trim(), host);
    }
    kiyot.kill9();
    kiyot.start_again().await;
    let mut kubelet = kiyot.kubelet().await;
    for running in [&first, &second] {
        wait_until("the cell is connected again", LIMIT, async || {
            kubelet.exec_sync(&running.container("main").id, &["true"]).await.ok()
        })
        .await;
    }
    // The daemon knows the providers of its cells from the records: the node counts as full, and
    // after an end it has room again.
    let third = start(&mut kubelet, "third").await;
    assert_eq!(cells(&world, &kiyot), (1, 2));
    kubelet.stop_and_remove(&first).await.unwrap();
    let fourth = start(&mut kubelet, "fourth").await;
    assert_eq!(cells(&world, &kiyot), (1, 2));
    for running in [&second, &third, &fourth] {
        kubelet.stop_and_remove(running).await.unwrap();
    }
    wait_until("all instances have ended", LIMIT, async || {
        world.running().is_empty().then_some(())
    })
    .await;
    assert_eq!(kiyot.cells(), Vec::<String>::new());
    assert!(kiyot.stop().await.success());
    drop(kiyot);
    let left = world.node.stop();
    assert!(left.is_empty(), "leftovers:\n{left}");
}

/// Verifies A31, A36.
#[tokio::test]
async fn pod_chooses_its_provider_and_a_hanging_provider_stops_no_other() {
    let world = World::start().await;
    let (kiyot, mut kubelet) = world.daemon(options(&world)).await;
    for (key, value, expected) in [
        ("provider", "ec2", (0, 1)),
        ("isolation", "instance", (0, 1)),
        ("provider", "netns", (1, 0)),
    ] {
        let chosen = pod(&format!("{key}-{value}"), WAIT);
        let chosen = chosen.annotation(&format!("pod.elotl.co/{key}"), value);
        let running = kubelet.run_pod(&chosen).await.unwrap();
        assert_eq!(cells(&world, &kiyot), expected, "{key}: {value}");
        kubelet.stop_and_remove(&running).await.unwrap();
        wait_until("the cell of the pod has ended", LIMIT, async || {
            (cells(&world, &kiyot) == (0, 0)).then_some(())
        })
        .await;
    }
    let contradiction = pod("contradiction", WAIT)
        .annotation("pod.elotl.co/provider", "netns")
        .annotation("pod.elotl.co/isolation", "instance");
    let error = kubelet.run_pod(&contradiction).await.unwrap_err();
    assert_eq!(error.code(), tonic::Code::InvalidArgument);
    assert!(
        error.message().contains(
            "no provider has a cell for the pod: ec2: pod.elotl.co/provider asks for \"netns\"; \
             netns: pod.elotl.co/isolation asks for \"instance\", and its cells are on the node"
        ),
        "{error}"
    );
    // The daemon does not wait for the calls of ec2, which hang.
    world.faults().set_outage(Some(Outage::Hang));
    let beside = timeout(LOCAL_LIMIT, start(&mut kubelet, "beside")).await.unwrap();
    assert_eq!(kiyot.cells().len(), 1);
    kubelet.stop_and_remove(&beside).await.unwrap();
    world.faults().clear();
}

/// Verifies A37.
#[tokio::test]
async fn rule_chooses_the_provider_until_a_reload() {
    const RULE: &str = "providers = [\"ec2\"]";
    let world = World::start().await;
    let mut options = options(&world);
    options.sections.push_str(&format!(
        "[[routing.rule]]\nname = \"batch\"\nlabel = {{ tier = \"batch\" }}\n\
         backend = \"milpa\"\n{RULE}\n"
    ));
    let (kiyot, mut kubelet) = world.daemon(options).await;
    let batch = |name: &str| {
        let pod = Pod::new(name).label("tier", "batch");
        pod.container(Container::script("main", WAIT))
    };
    let first = kubelet.run_pod(&batch("first")).await.unwrap();
    assert_eq!(cells(&world, &kiyot), (0, 1), "the node has room");
    let contradiction = batch("contradiction").annotation("pod.elotl.co/provider", "netns");
    let refused = kubelet.run_pod(&contradiction).await.unwrap_err();
    let both = "pod.elotl.co/provider asks for \"netns\", and the routing rule \"batch\" allows \
                \"ec2\"";
    assert!(refused.message().contains(both), "{refused}");
    // A rule with a provider that is not configured leaves the old rules.
    kiyot.reload(RULE, "providers = [\"qemu\"]").await;
    assert!(kiyot.log().contains("is not a provider of backend \"milpa\""), "{}", kiyot.log());
    let second = kubelet.run_pod(&batch("second")).await.unwrap();
    assert_eq!(cells(&world, &kiyot), (0, 2));
    kiyot.reload("providers = [\"qemu\"]", "providers = [\"netns\"]").await;
    let third = kubelet.run_pod(&batch("third")).await.unwrap();
    assert_eq!(cells(&world, &kiyot), (1, 2), "the cells of running pods stay");
    for running in [&first, &second, &third] {
        kubelet.stop_and_remove(running).await.unwrap();
    }
}
