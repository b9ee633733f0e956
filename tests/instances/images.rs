//! Images that have the agent.

use super::{WAIT, World, pod, run};

/// Unit of the agent, as an image has it.
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
    // The boot data came from there, and the pod has no way to it.
    let main = &running.container("main").id;
    let script = "wget -S -O - http://169.254.169.254/latest/meta-data/ 2>&1; true";
    let output = run(&mut kubelet, main, script).await;
    assert!(output.contains("No route to host"), "{output}");
    world.ends(&mut kubelet, &[&running]).await;
}
