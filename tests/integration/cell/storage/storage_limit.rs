//! The limit on a pod's usage of its cell's disk.

use kiyot_testkit::{
    Container, Kiyot, KiyotOptions, Kubelet, LIMIT, Node, Pod, Source, cri, wait_until,
};

use crate::cell::{WAIT, assert_nothing_left, options, remove_and_assert_clean};

const LIMIT_BYTES: u64 = 32 << 20;

fn options_with_limit() -> KiyotOptions {
    KiyotOptions { milpa: "ephemeral_storage_limit = \"32Mi\"".to_owned(), ..options() }
}

fn with_scratch(name: &str, script: &str) -> Pod {
    Pod::new(name)
        .in_cell()
        .volume("scratch", Source::EmptyDir { memory: false })
        .container(Container::script("main", script).mount("scratch", "/scratch"))
}

/// Returns the bytes that the pod uses, as its cell reports them.
async fn usage_bytes(kubelet: &mut Kubelet, sandbox: &str) -> u64 {
    let request =
        cri::PodSandboxStatusRequest { pod_sandbox_id: sandbox.to_owned(), verbose: true };
    let status = kubelet.runtime.pod_sandbox_status(request).await.unwrap().into_inner();
    let info: serde_json::Value = serde_json::from_str(&status.info["info"]).unwrap();
    info["ephemeralStorageBytes"].as_u64().unwrap()
}

/// Verifies X44.
#[tokio::test]
async fn pod_over_its_limit_is_evicted_and_others_run_on() {
    let node = Node::start().await;
    let mut kiyot = Kiyot::start(&node, options_with_limit()).await;
    let mut kubelet = kiyot.kubelet().await;
    let sparse = "dd if=/dev/zero of=/scratch/sparse bs=1 count=0 seek=1099511627776";
    let modest = format!("{sparse}; dd if=/dev/zero of=/scratch/file bs=1M count=8; {WAIT}");
    let modest = kubelet.run_pod(&with_scratch("modest", &modest)).await.unwrap();
    let write = |path: &str| format!("dd if=/dev/zero of={path} bs=1M count=48; {WAIT}");
    for (name, path) in [("volume", "/scratch/file"), ("layer", "/file")] {
        let greedy = kubelet.run_pod(&with_scratch(name, &write(path))).await.unwrap();
        let end = kubelet.exited(&greedy.container("main").id).await;
        assert_eq!((end.reason.as_str(), end.exit_code), ("Evicted", 137), "{name}: {end:?}");
        let limit = format!("limit {LIMIT_BYTES} bytes");
        assert!(end.message.contains(&limit), "{name}: {end:?}");
        let bytes = end.message.split_whitespace().find_map(|word| word.parse::<u64>().ok());
        assert!(bytes.is_some_and(|bytes| bytes > LIMIT_BYTES), "{name}: {end:?}");
        kubelet.stop_and_remove(&greedy).await.unwrap();
    }
    let measured = wait_until("the other pod is measured", LIMIT, async || {
        Some(usage_bytes(&mut kubelet, &modest.sandbox).await).filter(|bytes| *bytes >= 8 << 20)
    })
    .await;
    assert!(measured < LIMIT_BYTES, "{measured} bytes");
    let status = kubelet.container_status(&modest.container("main").id).await.unwrap();
    assert_eq!(status.state(), cri::ContainerState::ContainerRunning);
    // A pod of the previous run keeps its limit, which the restarted daemon sends again.
    kiyot.kill9();
    kiyot.start_again().await;
    let mut kubelet = kiyot.kubelet().await;
    let main = modest.container("main");
    crate::cell::wait_until_connected(&mut kubelet, main).await;
    let more = ["dd", "if=/dev/zero", "of=/scratch/more", "bs=1M", "count=48"];
    // The pod may end before the response.
    let _ = kubelet.exec_sync(&main.id, &more).await;
    assert_eq!(kubelet.exited(&main.id).await.reason, "Evicted");
    remove_and_assert_clean(&mut kubelet, &kiyot, &modest).await;
    drop(kiyot);
    assert_nothing_left(node);
}
