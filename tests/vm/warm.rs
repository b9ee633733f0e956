//! Warm pool of machines.

use kiyot_testkit::{Kiyot, Node, wait_for};

use super::{WAIT, pod, run, strong, strong_options};

/// Verifies A28, V16.
#[tokio::test]
#[ignore = "takes long without KVM; make test-vm"]
async fn pod_takes_a_warm_machine_and_a_reload_drains_the_pool() {
    let node = Node::start().await;
    let mut options = strong_options();
    options.sections.push_str("[[backends.milpa.warm]]\ncount = 1\n");
    let mut kiyot = Kiyot::start(&node, options).await;
    let prepared = |kiyot: &Kiyot<'_>| kiyot.log().matches("warm cell is prepared").count();
    wait_for("a machine is warm", || prepared(&kiyot) == 1).await;
    let warm = kiyot.cells();
    assert_eq!(warm.len(), 1);
    // The pool outlives the daemon.
    assert!(kiyot.stop().await.success());
    kiyot.start_again().await;
    assert_eq!(kiyot.cells(), warm);

    wait_for("the machine is in the pool", || {
        kiyot.log().matches("cell waits in its warm pool").count() == 2
    })
    .await;
    let mut kubelet = kiyot.kubelet().await;
    let spec = strong(pod("taken", &format!("echo up; {WAIT}")));
    let running = kubelet.run_pod(&spec).await.unwrap();
    assert!(kiyot.log().contains("pod takes a cell of a warm pool"), "{}", kiyot.log());
    let main = running.container("main").clone();
    kubelet.logged(&main, "up").await;
    assert!(run(&mut kubelet, &main.id, "ip -4 address show eth0").await.contains("inet 10.88."));
    // A privileged container loads no profile: the machine has the profile from its rehearsal.
    let profiles = "cat /proc/1/root/sys/kernel/security/apparmor/profiles";
    let profiles = run(&mut kubelet, &main.id, profiles).await;
    assert!(profiles.contains("cri-containerd.apparmor.d"), "{profiles}");
    wait_for("another machine follows", || kiyot.cells().len() == 2).await;

    kiyot.reload("count = 1", "count = 0").await;
    wait_for("the pool is drained", || kiyot.cells() == warm).await;
    assert_eq!(run(&mut kubelet, &main.id, "echo there").await, "there\n");
    kubelet.stop_and_remove(&running).await.unwrap();
    assert_eq!(kiyot.cells(), Vec::<String>::new());
    drop(kiyot);
    let left = node.stop();
    assert!(left.is_empty(), "leftovers:\n{left}");
}
