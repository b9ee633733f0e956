//! Life of a pod in a virtual machine.

use std::fs;

use kiyot_link::vm_file::{LINK_GUEST, LINK_HOST, LINK_PORT, LINK_TAP};
use kiyot_testkit::{Kiyot, LIMIT, Node, Source, cri, wait_until};

use super::{WAIT, options, pod, streams};

/// Verifies D5, V1, V2.
#[tokio::test]
async fn pod_in_a_vm_lives_like_a_pod_on_the_node() {
    let node = Node::start().await;
    let mut kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let spec = pod("first", &format!("echo hello from $(hostname); cat /settings/colour; {WAIT}"))
        .volume("settings", Source::ConfigMap(Source::files(&[("colour", "blue\n")])))
        .container(streams::reader());
    let mut spec = spec;
    spec.containers[0] = spec.containers[0].clone().mount("settings", "/settings");
    let running = kubelet.run_pod(&spec).await.unwrap();
    let main = running.container("main").clone();
    kubelet.logged(&main, "hello from first").await;
    kubelet.logged(&main, "blue").await;

    // The pod has a kernel of its own, and a single device beside the loopback, without the link.
    let run = async |kubelet: &mut kiyot_testkit::Kubelet, script: &str| {
        let output = kubelet.exec_sync(&main.id, &["sh", "-c", script]).await.unwrap();
        assert_eq!(output.code, 0, "{script}: {}", output.stderr);
        output.stdout
    };
    let kernel = fs::read_to_string("/proc/version").unwrap();
    assert_ne!(run(&mut kubelet, "cat /proc/version").await, kernel);
    let devices = run(&mut kubelet, "ls /sys/class/net").await;
    assert_eq!(devices.split_whitespace().collect::<Vec<_>>(), ["eth0", "lo"]);

    // The agent connects to the node by another device, which the pod neither has nor reaches.
    let namespace = format!("kiyot-{}", kiyot.cells().remove(0));
    let heard = ["-n", &namespace, "neighbour", "show", "dev", LINK_TAP];
    let heard = kiyot_testkit::output("ip", &heard).unwrap();
    let guest = LINK_GUEST.to_string();
    let mac = heard.split_whitespace().skip_while(|word| *word != "lladdr").nth(1).unwrap();
    assert!(heard.starts_with(&guest), "{heard}");
    let own = run(&mut kubelet, "cat /sys/class/net/*/address; ip address").await;
    assert!(!own.contains(mac) && !own.contains(&guest), "{mac} is in the pod: {own}");
    run(&mut kubelet, &format!("! nc -w 5 {LINK_HOST} {LINK_PORT} < /dev/null")).await;

    // The pod's address is in the node's CNI network, and the node reaches it.
    let status = kubelet.sandbox_status(&running.sandbox).await.unwrap();
    assert_eq!(status.state(), cri::PodSandboxState::SandboxReady);
    let ip = status.network.unwrap().ip;
    assert!(ip.starts_with("10.88."), "{ip}");
    let addresses = run(&mut kubelet, "ip -4 addr show eth0").await;
    assert!(addresses.contains(&format!("inet {ip}/")), "{addresses}");
    run(
        &mut kubelet,
        "mkdir -p /tmp/www; echo served > /tmp/www/index.html; httpd -p 8080 -h /tmp/www",
    )
    .await;
    let page = wait_until("the pod serves", LIMIT, async || {
        kiyot_testkit::output("busybox", &["wget", "-q", "-O", "-", &format!("http://{ip}:8080/")])
            .ok()
    })
    .await;
    assert_eq!(page.trim(), "served");

    streams::carry_input(&mut kubelet, &running).await;

    kubelet.update_volume(&spec, "settings", &Source::files(&[("colour", "red")]));
    wait_until("the volume is updated", LIMIT, async || {
        let output = kubelet.exec_sync(&main.id, &["cat", "/settings/colour"]).await.ok()?;
        (output.stdout == "red").then_some(())
    })
    .await;

    kubelet.stop_and_remove(&running).await.unwrap();
    assert_eq!(kiyot.cells(), Vec::<String>::new(), "a stopped pod has no cell");
    assert!(kiyot.stop().await.success());
    drop(kiyot);
    let left = node.stop();
    assert!(left.is_empty(), "leftovers:\n{left}");
}
