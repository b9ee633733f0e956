//! Pods with power over their machine's kernel.

use std::fs;

use kiyot_testkit::{Kiyot, KiyotOptions, LIMIT, Node, cri, wait_until};

use super::{WAIT, options, pod};

/// A setting of the kernel that containers without privileges can't change.
const SETTING: &str = "/proc/sys/kernel/core_pattern";

/// Verifies V7.
#[tokio::test]
async fn privileged_pod_has_power_over_its_own_machine_alone() {
    let node = Node::start().await;
    let policy = "[backends.milpa.policy]\nprivileged = \"cell\"\n".to_owned();
    let kiyot = Kiyot::start(&node, KiyotOptions { sections: policy, ..options() }).await;
    let mut kubelet = kiyot.kubelet().await;
    let mut spec = pod("strong", &format!("echo up; {WAIT}"));
    spec.containers[0].privileged = true;
    let running = kubelet.run_pod(&spec).await.unwrap();
    let main = running.container("main").clone();
    kubelet.logged(&main, "up").await;

    let before = fs::read(SETTING).unwrap();
    let script = format!(
        "echo '|/bin/false own-kernel' > {SETTING} && cat {SETTING} && ls /dev/vda /dev/vdb"
    );
    let output = kubelet.exec_sync(&main.id, &["sh", "-c", &script]).await.unwrap();
    assert_eq!(
        (output.code, output.stdout.as_str()),
        (0, "|/bin/false own-kernel\n/dev/vda\n/dev/vdb\n"),
        "{}",
        output.stderr
    );
    assert_eq!(fs::read(SETTING).unwrap(), before, "the node's setting is unchanged");

    // Reboots the machine at once: the call may or may not return.
    let reboot = ["sh", "-c", "echo 1 > /proc/sys/kernel/sysrq; echo b > /proc/sysrq-trigger"];
    let _ = kubelet.exec_sync(&main.id, &reboot).await;
    wait_until("the pod has ended with its machine", LIMIT, async || {
        let container = kubelet.container_status(&main.id).await.ok()?;
        (container.state() == cri::ContainerState::ContainerExited).then_some(())
    })
    .await;
    kubelet.stop_and_remove(&running).await.unwrap();
    assert_eq!(kiyot.cells(), Vec::<String>::new());
}
