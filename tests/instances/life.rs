//! Life of a pod on an instance.

use kiyot_testcloud::{Cloud, State};
use kiyot_testkit::{Kiyot, LIMIT, Node, Source, cri, wait_until};

use super::{Consoles, WAIT, options, pod};

#[tokio::test]
async fn pod_on_an_instance_lives_as_one_on_the_node() {
    let cloud = Cloud::start_with_instances().await;
    let _consoles = Consoles(&cloud);
    let node = Node::start().await;
    let mut kiyot = Kiyot::start(&node, options(&cloud)).await;
    let mut kubelet = kiyot.kubelet().await;
    let mut spec =
        pod("first", &format!("echo hello from $(hostname); cat /settings/colour; {WAIT}"))
            .volume("settings", Source::ConfigMap(Source::files(&[("colour", "blue\n")])));
    spec.containers[0] = spec.containers[0].clone().mount("settings", "/settings");
    let running = kubelet.run_pod(&spec).await.unwrap();
    let main = running.container("main").clone();
    kubelet.logged(&main, "hello from first").await;
    kubelet.logged(&main, "blue").await;

    let instances = cloud.instances();
    let status = kubelet.sandbox_status(&running.sandbox).await.unwrap();
    assert_eq!(status.state(), cri::PodSandboxState::SandboxReady);
    let ip = status.network.unwrap().ip;
    let instance = instances.iter().find(|instance| instance.address == ip).unwrap();
    let id = instance.id.clone();

    kubelet.update_volume(&spec, "settings", &Source::files(&[("colour", "red")]));
    wait_until("the volume is updated", LIMIT, async || {
        let output = kubelet.exec_sync(&main.id, &["cat", "/settings/colour"]).await.ok()?;
        (output.stdout == "red").then_some(())
    })
    .await;

    kubelet.stop_and_remove(&running).await.unwrap();
    wait_until("the instance is terminated", LIMIT, async || {
        (cloud.instance(&id).unwrap().state == State::Terminated).then_some(())
    })
    .await;
    assert!(kiyot.stop().await.success());
}
