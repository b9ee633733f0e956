//! Settings of the node's CRI plugin in cells.

use std::fs;

use kiyot_testkit::{Container, Kiyot, LIMIT, Node, Pod, wait_until};
use serde_json::{Value, json};

use crate::cell::{WAIT, options, remove_and_assert_clean};

/// Settings of the node's containerd that differ from containerd's defaults.
const SETTINGS: &str = "\
max_container_log_line_size = 1000
ignore_image_defined_volumes = true
enable_unprivileged_icmp = true
drain_exec_sync_io_timeout = \"7s\"
";

/// Verifies U27.
#[tokio::test]
async fn settings_of_the_nodes_containerd_hold_in_a_cell() {
    let node = Node::start().await;
    let mut spec: Value = serde_json::from_str(&node.ctr(&["oci", "spec"])).unwrap();
    // Go raises the soft limit of runc's own process to the hard limit, and an exec may inherit it.
    spec["process"]["rlimits"] = json!([{ "type": "RLIMIT_NOFILE", "hard": 1000, "soft": 1000 }]);
    let base = node.directory().join("base.json");
    fs::write(&base, spec.to_string()).unwrap();
    let path = node.directory().join("containerd.toml");
    let toml = fs::read_to_string(&path)
        .unwrap()
        .replace("disable_tcp_service", &format!("{SETTINGS}disable_tcp_service"))
        .replace(
            "runtime_type =",
            &format!("base_runtime_spec = \"{}\"\nruntime_type =", base.display()),
        );
    fs::write(&path, toml).unwrap();
    node.restart_containerd().await;

    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let inspect = "ulimit -n; ulimit -Hn; cat /proc/sys/net/ipv4/ip_unprivileged_port_start \
                   /proc/sys/net/ipv4/ping_group_range; grep ^Cap /proc/self/status; \
                   grep -cE ' /(proc|dev|dev/pts|dev/shm|dev/mqueue|sys|run) ' /proc/self/mounts";
    let long = format!("head -c 2500 /dev/zero | tr '\\0' x; echo; {WAIT}");
    let mut seen = Vec::new();
    for spec in [Pod::new("plain"), Pod::new("celled").in_cell()] {
        let spec = spec.container(Container::script("main", &long));
        let running = kubelet.run_pod(&spec).await.unwrap();
        let container = running.container("main");
        let output = kubelet.exec_sync(&container.id, &["sh", "-c", inspect]).await.unwrap();
        let lines = wait_until("the line is in the log", LIMIT, async || {
            let text = fs::read_to_string(&container.log).unwrap_or_default();
            (text.matches('x').count() == 2500).then(|| text.lines().count())
        })
        .await;
        seen.push((output.stdout, lines));
        match &*spec.name {
            "celled" => remove_and_assert_clean(&mut kubelet, &kiyot, &running).await,
            _ => kubelet.stop_and_remove(&running).await.unwrap(),
        }
    }
    assert_eq!(seen[1], seen[0], "in the cell (left) and on the node (right)");
    // Equal outputs prove nothing unless the settings have an effect.
    let (output, lines) = &seen[1];
    assert!(output.starts_with("1000\n1000\n1024\n0\t2147483647\n"), "{output}");
    assert_eq!(*lines, 3);
}
