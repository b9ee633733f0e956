//! Pods that milpactl gives to the kubelet.

use std::fs;

use kiyot_testkit::{Kiyot, LIMIT, Node, image::BUSYBOX_IMAGE, kubelet::StaticPods, wait_until};

use crate::cell::{
    assert_nothing_left,
    operator::admin::{admin, milpactl, pods},
    options,
};

/// Verifies O50, O51, O52.
#[tokio::test]
async fn static_pod_of_milpactl_runs_in_a_cell_until_its_file_is_removed() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let directory = node.static_pods();
    fs::create_dir(&directory).unwrap();
    let mut static_pods = StaticPods::new(kiyot.kubelet().await, directory.clone(), "worker-1");
    let file = node.directory().join("pods.yaml");
    let pod = |name: &str, more: &str| {
        format!(
            "kind: Pod\napiVersion: v1\nmetadata: {{name: {name}}}\nspec:\n{more}\
             \x20 terminationGracePeriodSeconds: 1\n  containers:\n  - name: main\n\
             \x20   image: {BUSYBOX_IMAGE}\n    command: [sh, -c, 'echo \"$WORD\"; sleep 1000']\n\
             \x20   env: [{{name: WORD, value: sesame}}]\n"
        )
    };
    let verb = async |verb: &str| {
        let path = directory.display();
        milpactl(&kiyot, None, &format!("{verb} --static-pod-path {path}")).await
    };
    let create = format!("create -f {}", file.display());

    // No pod of a file is created if the file has a document that is no static pod, or that
    // `explain` refuses.
    let map = "kind: ConfigMap\napiVersion: v1\nmetadata: {name: m}\n\
               data: {a/../../../../tmp/x: y}\n";
    for (second, expected) in
        [(pod("other", "  hostPID: true\n"), "Pod default/other: "), (map.to_owned(), "ConfigMap")]
    {
        fs::write(&file, format!("{}---\n{second}", pod("web", ""))).unwrap();
        let (text, code) = verb(&create).await;
        assert!(code != 0 && text.contains(expected), "{expected} is not in {text}");
        assert_eq!(fs::read_dir(&directory).unwrap().count(), 0);
    }

    // The kubelet ignores an unknown field.
    fs::write(&file, pod("web", "  hostPid: true\n")).unwrap();
    let (text, code) = verb(&create).await;
    for expected in ["note: document 1.spec.hostPid", "pod/default/web created\n"] {
        assert!(code == 0 && text.contains(expected), "{expected} is not in {text}");
    }
    static_pods.sync().await;
    let running = static_pods.running().next().unwrap();
    let kubelet = kiyot.kubelet().await;
    kubelet.logged(running.container("main"), "sesame").await;
    let shown = pods(&mut admin(&kiyot).await).await.remove(0);
    assert_eq!((shown.name.as_str(), &kiyot.cells()), ("web-worker-1", &vec![shown.cell.clone()]));

    let (text, code) = verb("delete web").await;
    assert_eq!((text.as_str(), code), ("pod/default/web deleted\n", 0));
    static_pods.sync().await;
    wait_until("no cell is left", LIMIT, async || kiyot.cells().is_empty().then_some(())).await;
    assert_eq!(pods(&mut admin(&kiyot).await).await, []);
    drop(kiyot);
    assert_nothing_left(node);
}
