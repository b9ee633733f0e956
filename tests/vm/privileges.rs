//! Pods with power over their machine's kernel.

use std::fs;

use kiyot_testkit::{Kiyot, KiyotOptions, LIMIT, Node, cri, wait_until};

use super::{WAIT, options, pod, run};

/// A setting of the kernel that containers without privileges can't change.
const SETTING: &str = "/proc/sys/kernel/core_pattern";

/// Verifies V7.
#[tokio::test]
async fn privileged_pod_has_power_only_over_its_own_machine() {
    let node = Node::start().await;
    let policy = "[backends.milpa.policy]\nprivileged = \"cell\"\n".to_owned();
    let kiyot = Kiyot::start(&node, KiyotOptions { sections: policy, ..options() }).await;
    let mut kubelet = kiyot.kubelet().await;
    let spec = pod("strong", &format!("echo up; {WAIT}"));
    let mut spec =
        spec.annotation("pod.elotl.co/cpu", "2").annotation("pod.elotl.co/memory", "1Gi");
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

    // The machine has the size that the pod requests, and the memory of the cell's own programs.
    let script = "nproc && sed -n 's/MemTotal: *\\([0-9]*\\) kB/\\1/p' /proc/meminfo";
    let size = run(&mut kubelet, &main.id, script).await;
    let size: Vec<u64> = size.lines().map(|line| line.parse().unwrap()).collect();
    assert!(size[0] == 2 && (1 << 20..2 << 20).contains(&size[1]), "{size:?}");

    // Its kernel loads the module that a device needs.
    let script = "! grep -q '^dummy ' /proc/modules && ip link add own type dummy && \
                  grep -q '^dummy ' /proc/modules";
    run(&mut kubelet, &main.id, script).await;

    // Reboots the machine at once, so that the call may fail.
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
