//! Providers that a reload adds and removes while cells run.

use std::fs;

use kiyot_testkit::{Kiyot, Kubelet, LIMIT, Pod, RunningPod, wait_until};

use super::{
    SHORT_LISTING_PERIOD, WAIT, World, are_unharmed,
    launches::object,
    pod,
    providers::{cells, options},
    run, run_in_the_end,
};

const BOTH: &str = "providers = [\"netns\", \"ec2\"]";
const NODE_ALONE: &str = "providers = [\"netns\"]";

/// How often a provider is removed and added in a row.
const RELOADS: usize = 20;

async fn remove(kiyot: &Kiyot<'_>) {
    reload(kiyot, BOTH, NODE_ALONE).await;
}

async fn add(kiyot: &Kiyot<'_>) {
    reload(kiyot, NODE_ALONE, BOTH).await;
}

/// Reloads the configuration, which must succeed.
async fn reload(kiyot: &Kiyot<'_>, part: &str, with: &str) {
    let reloads = |log: String| log.matches("configuration reloaded").count();
    let before = reloads(kiyot.log());
    kiyot.reload(part, with).await;
    assert_eq!(reloads(kiyot.log()), before + 1, "{}", kiyot.log());
}

/// Returns the providers that `milpactl get backends` shows.
fn shown(kiyot: &Kiyot<'_>) -> String {
    let backends = object(kiyot, &["get", "backends"]);
    let items = backends["items"].as_array().unwrap();
    let milpa = items.iter().find(|backend| backend["type"] == "milpa").unwrap();
    milpa["provider"].as_str().unwrap().to_owned()
}

async fn is_shown(kiyot: &Kiyot<'_>, providers: &str) {
    wait_until(format!("the providers are {providers}"), LIMIT, async || {
        (shown(kiyot) == providers).then_some(())
    })
    .await;
}

fn pod_of(provider: &str, name: &str) -> Pod {
    pod(name, WAIT).annotation("pod.elotl.co/provider", provider)
}

async fn start(kubelet: &mut Kubelet, provider: &str, name: &str) -> RunningPod {
    kubelet.run_pod(&pod_of(provider, name)).await.unwrap()
}

/// Verifies A41.
#[tokio::test]
async fn removed_provider_drains_comes_back_and_leaves_with_its_last_cell() {
    let world = World::start().await;
    let mut options = options(&world);
    options.of_provider.push_str(SHORT_LISTING_PERIOD);
    let (kiyot, mut kubelet) = world.daemon(options).await;
    let near = start(&mut kubelet, "netns", "near").await;
    let far = start(&mut kubelet, "ec2", "far").await;
    assert_eq!(shown(&kiyot), "netns, ec2");

    remove(&kiyot).await;
    assert_eq!(shown(&kiyot), "netns, ec2 (draining, 1 cell)");
    are_unharmed(&mut kubelet, &[&near, &far]).await;
    let refused = kubelet.run_pod(&pod_of("ec2", "late")).await.unwrap_err();
    let allowed = "no provider has a cell for the pod: netns: pod.elotl.co/provider asks for \
                   \"ec2\"; allowed: \"netns\"";
    assert!(refused.message().contains(allowed), "{refused}");
    // The node is full, and no other provider takes the pod.
    kubelet.run_pod(&pod("beside", WAIT)).await.unwrap_err();
    assert_eq!(cells(&world, &kiyot), (1, 1));

    // A provider that is added again while it drains takes pods at once.
    add(&kiyot).await;
    assert_eq!(shown(&kiyot), "netns, ec2");
    let beside = start(&mut kubelet, "ec2", "beside").await;
    assert_eq!(cells(&world, &kiyot), (1, 2));
    remove(&kiyot).await;
    kubelet.stop_and_remove(&beside).await.unwrap();
    is_shown(&kiyot, "netns, ec2 (draining, 1 cell)").await;
    are_unharmed(&mut kubelet, &[&near, &far]).await;
    kubelet.stop_and_remove(&far).await.unwrap();
    is_shown(&kiyot, "netns").await;
    assert!(kiyot.log().contains("removed provider has no cells any more"), "{}", kiyot.log());
    assert_eq!(cells(&world, &kiyot), (1, 0));

    // A provider that is added again after it has left takes pods.
    add(&kiyot).await;
    let again = run_in_the_end(&mut kubelet, &pod_of("ec2", "again")).await;
    are_unharmed(&mut kubelet, &[&near, &again]).await;
    for running in [&near, &again] {
        kubelet.stop_and_remove(running).await.unwrap();
    }
    world.has_no_cells().await;
}

/// Returns the numbers of the daemon's open files and of its threads.
fn open_files_and_threads(kiyot: &Kiyot<'_>) -> (usize, usize) {
    let count = |of: &str| fs::read_dir(format!("/proc/{}/{of}", kiyot.pid())).unwrap().count();
    (count("fd"), count("task"))
}

/// Verifies A41.
#[tokio::test]
async fn reloads_back_and_forth_leave_neither_tasks_nor_files() {
    let world = World::start().await;
    let mut options = options(&world);
    options.of_provider.push_str(SHORT_LISTING_PERIOD);
    let (kiyot, mut kubelet) = world.daemon(options).await;
    let near = start(&mut kubelet, "netns", "near").await;
    let lists = || world.calls_of("DescribeInstances").len();
    let mut files = Vec::new();
    for _ in 0..RELOADS {
        remove(&kiyot).await;
        is_shown(&kiyot, "netns").await;
        files.push(open_files_and_threads(&kiyot));
        let before = lists();
        add(&kiyot).await;
        wait_until("the provider lists its instances", LIMIT, async || {
            (lists() > before).then_some(())
        })
        .await;
    }
    remove(&kiyot).await;
    // The connections of the last client close after its removal.
    let (open, threads) = files[0];
    wait_until("the daemon has about as few files open as at first", LIMIT, async || {
        let now = open_files_and_threads(&kiyot);
        (now.0 <= open + RELOADS / 4 && now.1 <= threads + RELOADS / 4).then_some(())
    })
    .await;
    // A list that was already sent may still be counted; no task requests another.
    let mut last = lists();
    wait_until("no list follows for three of its periods", LIMIT, async || {
        tokio::time::sleep(std::time::Duration::from_secs(3)).await;
        (std::mem::replace(&mut last, lists()) == lists()).then_some(())
    })
    .await;
    are_unharmed(&mut kubelet, &[&near]).await;
    kubelet.stop_and_remove(&near).await.unwrap();
}

/// Verifies A34, A41.
#[tokio::test]
async fn restart_while_a_removed_provider_has_cells_leaves_them_unknown_until_it_is_added() {
    let world = World::start().await;
    let (mut kiyot, mut kubelet) = world.daemon(options(&world)).await;
    let far = start(&mut kubelet, "ec2", "far").await;
    remove(&kiyot).await;
    kiyot.kill9();
    kiyot.start_again().await;
    assert_eq!(shown(&kiyot), "netns, ec2 (not configured, 1 cell)");
    let mut kubelet = kiyot.kubelet().await;
    wait_until("the cell is connected again", LIMIT, async || {
        kubelet.exec_sync(&far.container("main").id, &["true"]).await.ok()
    })
    .await;
    are_unharmed(&mut kubelet, &[&far]).await;
    add(&kiyot).await;
    assert_eq!(shown(&kiyot), "netns, ec2");
    are_unharmed(&mut kubelet, &[&far]).await;
    // The provider's lists are evidence again, and the end of the cell is confirmed.
    remove(&kiyot).await;
    assert_eq!(shown(&kiyot), "netns, ec2 (draining, 1 cell)");
    kubelet.stop_and_remove(&far).await.unwrap();
    is_shown(&kiyot, "netns").await;
    assert_eq!(cells(&world, &kiyot), (0, 0));
    // The daemon restarts with a provider that a reload has added.
    add(&kiyot).await;
    let again = run_in_the_end(&mut kubelet, &pod_of("ec2", "again")).await;
    kiyot.restart().await;
    let mut kubelet = kiyot.kubelet().await;
    run(&mut kubelet, &again.container("main").id, "true").await;
    assert_eq!(shown(&kiyot), "netns, ec2");
    world.ends(&mut kubelet, &[&again]).await;
}

/// Verifies A41.
#[tokio::test]
async fn provider_that_can_not_be_added_leaves_the_old_configuration() {
    let world = World::start().await;
    let mut options = options(&world);
    let image = format!("image = {{ id = {:?} }}", world.setup().image);
    let absent = "image = { id = \"ami-0123456789abcdef0\" }";
    options.of_provider = options.of_provider.replace(&image, absent);
    let (kiyot, mut kubelet) = world.daemon(options).await;
    remove(&kiyot).await;
    let near = start(&mut kubelet, "netns", "near").await;
    for (with, error) in [
        (format!("max_cells = 3\n{BOTH}"), "provider \"ec2\" of backend milpa can't make cells"),
        ("max_cells = 3\nproviders = [\"qemu\"]".to_owned(), "can't be added while \"netns\" runs"),
        ("max_cells = 3\nproviders = [\"cloud\"]".to_owned(), "2 problems"),
    ] {
        kiyot.reload(NODE_ALONE, &with).await;
        let log = kiyot.log();
        let mut failed = log.lines().filter(|line| line.contains("configuration reload failed"));
        assert!(failed.next_back().unwrap().contains(error), "{error}: {log}");
        assert_eq!(shown(&kiyot), "netns");
        are_unharmed(&mut kubelet, &[&near]).await;
        let file = fs::read_to_string(kiyot.configuration()).unwrap();
        fs::write(kiyot.configuration(), file.replace(&with, NODE_ALONE)).unwrap();
    }
    assert!(!kiyot.log().contains("max_cells: "), "nothing was applied");
    let file = fs::read_to_string(kiyot.configuration()).unwrap();
    fs::write(kiyot.configuration(), file.replace(absent, &image)).unwrap();
    add(&kiyot).await;
    let far = run_in_the_end(&mut kubelet, &pod_of("ec2", "far")).await;
    are_unharmed(&mut kubelet, &[&near, &far]).await;
    world.ends(&mut kubelet, &[&near, &far]).await;
}
