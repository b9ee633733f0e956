//! Lists of the admin API with more pods than a node runs. The pods exist only in the daemon's
//! records.

use std::{
    io::{BufRead, BufReader},
    path::Path,
    process::Stdio,
    time::Instant,
};

use futures::StreamExt;
use kiyot::backends::milpa::store::{Batch, Store, Table};
use kiyot_engine::id::{CellId, ContainerId, SandboxId};
use kiyot_proto::{admin, cri, store};
use kiyot_testkit::{Kiyot, Node};

use crate::cell::{operator::admin::admin, operator::admin_streams::milpactl, options};

const PODS: usize = 10_000;
/// The number of cells of the pods. It is small, because the daemon proves the end of each cell
/// when it starts, and a change of a cell looks at all cells.
const CELLS: usize = 100;
/// The number of pods in a part of a list (`src/admin/lists.rs`).
const PART: usize = 8;

/// Returns the name of a pod. Names sort like the numbers.
fn name(number: usize) -> String {
    format!("web-{number:05}")
}

/// Records ended pods with one container each. Returns their sandboxes.
async fn record_pods(state: &Path) -> Vec<String> {
    const CREATED: i64 = 1_790_000_000_000_000_000;
    let store = Store::open(state).await.unwrap();
    let mut batch = Batch::default();
    let mut sandboxes = Vec::new();
    let cells: Vec<_> = (0..CELLS).map(|_| CellId::mint().unwrap().to_string()).collect();
    for number in 0..PODS {
        let (sandbox, container) = (SandboxId::mint().unwrap(), ContainerId::mint().unwrap());
        let metadata = cri::PodSandboxMetadata {
            name: name(number),
            namespace: "shop".to_owned(),
            uid: format!("6b225a70-2f38-4522-bf72-0000000{number:05}"),
            attempt: 0,
        };
        let labels = [("app".to_owned(), "web".to_owned())];
        let meta = store::SandboxMeta {
            id: sandbox.to_string(),
            cell: cells[number % CELLS].clone(),
            config: Some(cri::PodSandboxConfig {
                metadata: Some(metadata),
                labels: labels.into(),
                ..Default::default()
            }),
            created_unix_nanos: CREATED,
            addresses: vec!["10.88.0.2".to_owned()],
            ..Default::default()
        };
        let status = store::SandboxStatus::default();
        let main = store::ContainerMeta {
            id: container.to_string(),
            sandbox: sandbox.to_string(),
            config: Some(cri::ContainerConfig {
                metadata: Some(cri::ContainerMetadata { name: "main".to_owned(), attempt: 0 }),
                image: Some(cri::ImageSpec { image: "busybox".to_owned(), ..Default::default() }),
                ..Default::default()
            }),
            created_unix_nanos: CREATED,
            ..Default::default()
        };
        let ended = store::ContainerStatus {
            state: cri::ContainerState::ContainerExited.into(),
            started_unix_nanos: CREATED,
            finished_unix_nanos: CREATED + 1,
            reason: "Completed".to_owned(),
            log_whole: true,
            ..Default::default()
        };
        batch
            .put(Table::Sandboxes, sandbox.as_str(), &meta)
            .put(Table::SandboxStatuses, sandbox.as_str(), &status)
            .put(Table::Containers, container.as_str(), &main)
            .put(Table::ContainerStatuses, container.as_str(), &ended);
        sandboxes.push(sandbox.to_string());
    }
    store.commit(batch).await.unwrap();
    store.close().await;
    sandboxes
}

/// Verifies O20.
#[tokio::test]
async fn first_of_ten_thousand_recorded_pods_is_sent_before_the_last_is_read() {
    let node = Node::start().await;
    let mut kiyot = Kiyot::start(&node, options()).await;
    kiyot.stop().await;
    let sandboxes = record_pods(&kiyot.state()).await;
    kiyot.start_again().await;
    let mut kubelet = kiyot.kubelet().await;
    let mut client = admin(&kiyot).await;

    let begun = Instant::now();
    let request = admin::ListPodsRequest::default();
    let mut parts = client.list_pods(request).await.unwrap().into_inner();
    let first = parts.next().await.unwrap().unwrap().pods;
    println!("first part after {:?}", begun.elapsed());
    assert_eq!((first.len(), &*first[0].name), (PART, &*name(0)));
    assert_eq!(first[0].phase(), admin::PodPhase::Succeeded);
    // Meanwhile the client receives only as much as fits in the window of the stream.
    let request = cri::RemovePodSandboxRequest { pod_sandbox_id: sandboxes[PODS - 1].clone() };
    kubelet.runtime.remove_pod_sandbox(request).await.unwrap();
    let mut names: Vec<_> = first.into_iter().map(|pod| pod.name).collect();
    while let Some(part) = parts.next().await {
        names.extend(part.unwrap().pods.into_iter().map(|pod| pod.name));
    }
    println!("last part after {:?}", begun.elapsed());
    assert_eq!(names, (0..PODS - 1).map(name).collect::<Vec<_>>());

    let begun = Instant::now();
    let mut listing = milpactl(&kiyot, &["get", "pods"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(listing.stdout.take().unwrap()).lines();
    let first: Vec<_> = lines.by_ref().take(2).map(Result::unwrap).collect();
    println!("milpactl's first pod after {:?}", begun.elapsed());
    assert!(first[0].starts_with("NAME") && first[1].starts_with("shop/web-00000 "), "{first:?}");
    assert_eq!(lines.count(), PODS - 2);
    println!("milpactl's last pod after {:?}", begun.elapsed());
    assert!(listing.wait().unwrap().success());
}
