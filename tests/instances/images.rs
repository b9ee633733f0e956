//! Images that have the agent.

use std::fs;

use kiyot_testkit::processes;

use super::{WAIT, World, pod, run};

/// Unit of the agent in an image.
const UNIT: &[u8] = include_bytes!("../../config/kiyot-cell.service");

/// Verifies V22, V39.
#[tokio::test]
async fn image_with_the_agent_boots_from_the_metadata_service() {
    let world = World::start().await;
    let mut options = world.options();
    let agent = std::fs::read(options.binary.with_file_name("kiyot-cell")).unwrap();
    world.add_to_images("/usr/local/bin/kiyot-cell", &agent, 0o755);
    for directory in ["", "multi-user.target.wants/"] {
        let path = format!("/etc/systemd/system/{directory}kiyot-cell.service");
        world.add_to_images(&path, UNIT, 0o644);
    }
    options.of_provider.push_str("image_has_agent = true\n");
    let (kiyot, mut kubelet) = world.daemon(options).await;
    let running = kubelet.run_pod(&pod("prebuilt", WAIT)).await.unwrap();
    assert!(!kiyot.log().contains("agent program is downloaded"), "{}", kiyot.log());
    // The boot data comes from the metadata service, which the pod can't reach.
    let main = &running.container("main").id;
    let script = "wget -S -O - http://169.254.169.254/latest/meta-data/ 2>&1; true";
    let output = run(&mut kubelet, main, script).await;
    assert!(output.contains("No route to host"), "{output}");
    world.ends(&mut kubelet, &[&running]).await;
}

/// Verifies I26.
#[tokio::test]
async fn containerd_of_an_instance_has_the_proxies_of_the_daemon() {
    let world = World::start().await;
    let mut options = world.options();
    // The endpoint is reached without TLS: the daemon itself does not use the proxy.
    let proxy = "http://user:hidden-word@192.0.2.1:3128";
    options.environment.push(("HTTPS_PROXY".to_owned(), proxy.to_owned()));
    let (kiyot, mut kubelet) = world.daemon(options).await;
    let running = kubelet.run_pod(&pod("proxied", WAIT)).await.unwrap();
    let variable = format!("HTTPS_PROXY={proxy}");
    let has_proxy = |pid: &String| {
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment.split(|&byte| byte == 0).any(|entry| entry == variable.as_bytes())
    };
    let containerds = processes(&["containerd", "--config", "kiyot-cell/private/containerd.toml"]);
    assert_eq!(containerds.iter().filter(|pid| has_proxy(pid)).count(), 1, "{containerds:?}");
    assert!(!kiyot.log().contains("hidden-word"), "{}", kiyot.log());
    let main = &running.container("main").id;
    assert_eq!(run(&mut kubelet, main, "env | grep -ci proxy; true").await, "0\n");
    world.ends(&mut kubelet, &[&running]).await;
}
