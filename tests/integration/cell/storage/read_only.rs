//! Recursively read-only mounts. containerd 2.0 and later support them. The kubelet learns this
//! from Status.

use kiyot_testkit::{Container, Kiyot, Kubelet, Node, Pod, Source, cri};
use tonic::Code;

use crate::cell::{
    WAIT, containerd_version, failures::faults::processes, options, remove_and_assert_clean,
    run_script, wait_until_connected,
};

/// Returns the features of a runtime handler from Status.
async fn handler_features(kubelet: &mut Kubelet, handler: &str) -> cri::RuntimeHandlerFeatures {
    let handlers = kubelet
        .runtime
        .status(cri::StatusRequest::default())
        .await
        .unwrap()
        .into_inner()
        .runtime_handlers;
    handlers.into_iter().find(|found| found.name == handler).unwrap().features.unwrap()
}

/// Verifies D43.
#[tokio::test]
async fn recursive_read_only_mount_follows_the_cells_containerd() {
    let node = Node::start().await;
    let mut kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let nothing = cri::RuntimeHandlerFeatures::default();
    assert_eq!(
        handler_features(&mut kubelet, "kiyot").await,
        nothing,
        "no feature is reported before the first cell"
    );
    let spec = Pod::new("sealed").in_cell().volume("scratch", Source::EmptyDir { memory: false });
    let config = kubelet.prepare(&spec);
    let sandbox = kubelet.run_sandbox(&config, "").await.unwrap();
    let mut running = kubelet.running(&spec, config, sandbox);
    // The node and the cells have the same containerd here. It may support user namespaces, but
    // pods in cells have none.
    let does = containerd_version(&mut kubelet).await >= (2, 0)
        && handler_features(&mut kubelet, "").await.recursive_read_only_mounts;
    let expected =
        cri::RuntimeHandlerFeatures { recursive_read_only_mounts: does, user_namespaces: false };
    assert_eq!(handler_features(&mut kubelet, "kiyot").await, expected);

    // The container mounts a file system within the volume in the cell.
    let maker = Container::script("maker", WAIT).mount("scratch", "/scratch");
    let made = kubelet.create_container(&running, &maker, 0).await.unwrap();
    kubelet.start_container(&made.id).await.unwrap();
    run_script(&mut kubelet, &made.id, "mkdir /scratch/beneath").await;
    running.containers.insert("maker".to_owned(), made);
    let cell = kiyot.cells().remove(0);
    let agent = processes(&["kiyot-cell agent", &cell]).remove(0);
    let beneath = kiyot
        .state()
        .join("cells")
        .join(&cell)
        .join("pod/empty-dir/scratch/beneath")
        .display()
        .to_string();
    kiyot_testkit::output(
        "nsenter",
        &["-t", &agent, "-m", "mount", "-t", "tmpfs", "tmpfs", &beneath],
    )
    .unwrap();
    let host_path = kubelet
        .pod_directory(&spec.uid)
        .join("volumes/kubernetes.io~empty-dir/scratch")
        .display()
        .to_string();
    for recursive_read_only in [false, true] {
        let mut container = Container::script(&format!("reader-{recursive_read_only}"), WAIT);
        let mount = cri::Mount {
            container_path: "/sealed".to_owned(),
            host_path: host_path.clone(),
            readonly: true,
            ..Default::default()
        };
        container.more_mounts = vec![cri::Mount { recursive_read_only, ..mount }];
        let made = match kubelet.create_container(&running, &container, 0).await {
            Ok(made) => made,
            Err(refused) => {
                assert!(recursive_read_only && !does, "{refused:?}");
                assert_eq!(refused.code(), Code::Unimplemented);
                assert!(
                    refused.message().contains("/sealed")
                        && refused.message().contains("recursively read-only"),
                    "{refused:?}"
                );
                continue;
            }
        };
        kubelet.start_container(&made.id).await.unwrap();
        let output = run_script(
            &mut kubelet,
            &made.id,
            "touch /sealed/file; touch /sealed/beneath/file && echo written",
        )
        .await;
        assert!(output.contains("/sealed/file: Read-only file system"), "{output}");
        assert_eq!(
            output.contains("/sealed/beneath/file: Read-only file system"),
            recursive_read_only,
            "{output}"
        );
        assert_eq!(output.contains("written"), !recursive_read_only, "{output}");
        running.containers.insert(container.name, made);
    }
    // The restarted daemon reports the feature before it has launched a cell.
    kiyot.restart().await;
    let mut kubelet = kiyot.kubelet().await;
    assert_eq!(handler_features(&mut kubelet, "kiyot").await, expected);
    wait_until_connected(&mut kubelet, running.container("maker")).await;
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}
