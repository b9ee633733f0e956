//! Pods that an earlier version ran without a kubelet.

use std::{fs, os::unix::fs::symlink, path::Path};

use kiyot::backends::milpa::store::{Batch, Store, Table};
use kiyot_proto::store as records;
use kiyot_testkit::{Kiyot, LIMIT, Node, command, wait_until};

use crate::cell::{
    assert_nothing_left,
    storage::node_mounts::mounts_beneath,
    streaming::network::{Firewall, server, without_port_plugin},
};

/// The earlier version's record of a pod.
#[derive(Clone, PartialEq, prost::Message)]
struct FormerPod {
    #[prost(string, tag = "1")]
    namespace: String,
    #[prost(string, tag = "2")]
    name: String,
    #[prost(string, repeated, tag = "3")]
    manifest: Vec<String>,
    #[prost(int64, tag = "4")]
    created_unix_nanos: i64,
}

/// The earlier version's record of a requested end.
#[derive(Clone, PartialEq, prost::Message)]
struct FormerEnd {
    #[prost(int64, tag = "1")]
    grace_seconds: i64,
}

/// The tables of the earlier version.
const TABLES: [Table; 2] = [Table::StandalonePods, Table::StandaloneEnds];

/// Records a pod, and all sandboxes as the pod's, as the earlier version did.
async fn record(state: &Path, uid: &str) {
    let store = Store::open(state).await.unwrap();
    let mut batch = Batch::default();
    let sandboxes: Vec<(String, records::SandboxMeta)> =
        store.load(Table::Sandboxes).await.unwrap();
    for (id, meta) in sandboxes {
        batch.put(Table::Sandboxes, &id, &records::SandboxMeta { standalone: true, ..meta });
    }
    let pod = FormerPod {
        namespace: "default".to_owned(),
        name: "former".to_owned(),
        manifest: vec!["kind: Pod".to_owned()],
        created_unix_nanos: 1,
    };
    batch.put(Table::StandalonePods, uid, &pod);
    batch.put(Table::StandaloneEnds, uid, &FormerEnd { grace_seconds: 1 });
    store.commit(batch).await.unwrap();
    store.close().await;
}

/// Returns the number of records of the earlier version.
async fn recorded(state: &Path) -> usize {
    let store = Store::open(state).await.unwrap();
    let mut all = 0;
    for table in TABLES {
        all += store.load::<records::StandalonePod>(table).await.unwrap().len();
    }
    store.close().await;
    all
}

/// Waits until the daemon has logged a text this many times.
async fn logged(kiyot: &Kiyot<'_>, text: &str, times: usize) {
    wait_until(format!("{text:?} is logged {times} times"), LIMIT, async || {
        (kiyot.log().matches(text).count() >= times).then_some(())
    })
    .await;
}

/// Verifies O53.
#[tokio::test]
async fn former_pods_end_before_their_files_and_files_before_records_despite_kills() {
    const NOT_YET: &str = "pods of an earlier version not ended yet";
    let node = Node::start().await;
    without_port_plugin(&node, |_| {});
    let firewall = Firewall::new(&node);
    let mut kiyot = Kiyot::start(&node, firewall.options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let running = kubelet.run_pod(&server("former", 18087)).await.unwrap();
    kiyot.stop().await;
    let (state, uid) = (kiyot.state(), running.spec.uid.clone());
    record(&state, &uid).await;

    // The directory has a volume in memory, a part of a directory of the node, a log, and a link
    // that leads outside.
    let kept = node.directory().join("kept");
    fs::create_dir(&kept).unwrap();
    fs::write(kept.join("file"), "kept").unwrap();
    let dir = state.canonicalize().unwrap().join("standalone");
    let [secret, part] = ["volumes/kubernetes.io~secret/keys", "volume-subpaths/host/main/0"]
        .map(|path| dir.join("pods").join(&uid).join(path));
    let logs = dir.join("logs").join(format!("default_former_{uid}/main"));
    for dir in [&secret, &part, &logs] {
        fs::create_dir_all(dir).unwrap();
    }
    command::run("mount", &["-t", "tmpfs", "tmpfs", secret.to_str().unwrap()]);
    command::run("mount", &["--bind", kept.to_str().unwrap(), part.to_str().unwrap()]);
    fs::write(secret.join("word"), "hush").unwrap();
    fs::write(logs.join("0.log"), "line").unwrap();
    symlink(&kept, logs.join("link")).unwrap();
    let beneath = || (mounts_beneath(&dir).len(), logs.join("0.log").exists());

    // No file and no record is removed before the end of the cell is proven.
    firewall.lock(true);
    kiyot.start_again().await;
    logged(&kiyot, NOT_YET, 1).await;
    assert_eq!((kiyot.cells().len(), beneath()), (1, (2, true)));
    kiyot.kill9();
    assert_eq!(recorded(&state).await, 2);
    firewall.lock(false);

    // The records stay while the files can't be removed.
    let path = dir.to_str().unwrap();
    command::run("mount", &["--bind", path, path]);
    command::run("mount", &["-o", "remount,bind,ro", path]);
    kiyot.start_again().await;
    wait_until("the cell has ended", LIMIT, async || kiyot.cells().is_empty().then_some(())).await;
    logged(&kiyot, NOT_YET, 2).await;
    assert!(logs.join("0.log").exists());
    kiyot.kill9();
    assert_eq!(recorded(&state).await, 2);
    command::run("umount", &[path]);

    kiyot.start_again().await;
    logged(&kiyot, "pods of an earlier version ended", 1).await;
    assert!(!dir.exists(), "{}", dir.display());
    assert_eq!(mounts_beneath(&dir), Vec::<std::path::PathBuf>::new());
    assert_eq!(fs::read_to_string(kept.join("file")).unwrap(), "kept");
    let mut kubelet = kiyot.kubelet().await;
    assert_eq!(kubelet.sandboxes().await.unwrap(), []);

    // This state is left by a kill before the removal of the records.
    kiyot.stop().await;
    assert_eq!(recorded(&state).await, 0);
    record(&state, &uid).await;
    kiyot.start_again().await;
    logged(&kiyot, "pods of an earlier version ended", 2).await;
    kiyot.stop().await;
    assert_eq!(recorded(&state).await, 0);
    kubelet.forget(&running.spec);
    drop(kiyot);
    assert_nothing_left(node);
}
