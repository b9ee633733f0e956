//! Pods that an earlier version ran without a kubelet, from its own records. They end at the start
//! of this version: first their cells, then their mounts and files, last the records. Each step is
//! retried until it succeeds, also by the next run of the daemon.

use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use futures::future::join_all;
use kiyot_engine::StoreError;
use kiyot_linux::unmount_beneath;
use kiyot_proto::{cri, store::StandalonePod};
use kiyot_values::error_chain::error_chain;
use tokio::time::sleep;

use super::{
    cells::Cells,
    cri::CriService,
    store::{Batch, Store, Table},
};
use crate::{backends::Method, blocking::blocking};

/// Pause before a retry.
const RETRY_PAUSE: Duration = Duration::from_secs(2);
/// Pause between two checks whether a launch has ended.
const LAUNCH_PAUSE: Duration = Duration::from_millis(200);
/// Time limit of a CRI call.
const CALL_TIMEOUT: Duration = Duration::from_secs(120);
/// The directories of volumes and logs.
const DIRECTORIES: [&str; 2] = ["pods", "logs"];
/// The tables of the records, in the order of their removal.
const TABLES: [Table; 2] = [Table::StandaloneEnds, Table::StandalonePods];

/// Ends the pods of an earlier version.
#[derive(Debug)]
pub(super) struct FormerPods {
    pub(super) store: Store,
    pub(super) cri: Arc<CriService>,
    pub(super) cells: Arc<Cells>,
    /// The directory of volumes and logs.
    pub(super) dir: PathBuf,
}

impl FormerPods {
    /// Ends all pods of an earlier version.
    pub(super) async fn end(self) {
        while let Err(error) = self.try_end().await {
            tracing::warn!(error, "pods of an earlier version not ended yet");
            sleep(RETRY_PAUSE).await;
        }
    }

    async fn try_end(&self) -> Result<(), String> {
        let of_store = |error: StoreError| error_chain(&error);
        let mut uids = BTreeSet::new();
        for table in TABLES {
            let records: Vec<(String, StandalonePod)> =
                self.store.load(table).await.map_err(of_store)?;
            uids.extend(records.into_iter().map(|(uid, _)| uid));
        }
        // Includes sandboxes of pods whose record can't be read.
        let sandboxes = self.cri.pods().all_sandboxes().into_iter();
        let own = sandboxes.filter(|sandbox| sandbox.meta().standalone);
        uids.extend(own.map(|sandbox| sandbox.uid.to_string()));
        for ended in join_all(uids.iter().map(|uid| self.end_cells(uid))).await {
            ended?;
        }
        let dir = self.dir.clone();
        blocking(move || remove_files(&dir)).await.map_err(|error| error_chain(&error))?;
        let mut batch = Batch::default();
        for uid in &uids {
            for table in TABLES {
                batch.remove(table, uid);
            }
        }
        self.store.commit(batch).await.map_err(of_store)?;
        if !uids.is_empty() {
            tracing::info!(pods = uids.len(), "pods of an earlier version ended");
        }
        Ok(())
    }

    /// Ends the launches and cells of a pod. Returns once their ends are proven.
    async fn end_cells(&self, uid: &str) -> Result<(), String> {
        loop {
            let orders = self.cells.orders().into_iter();
            let own: Vec<_> = orders.filter(|order| order.key.pod_uid == uid).collect();
            if own.is_empty() {
                break;
            }
            for order in own {
                self.cells.end_changed_launch(&order.key, "");
            }
            sleep(LAUNCH_PAUSE).await;
        }
        for sandbox in self.cri.pods().sandboxes_of_pod(uid) {
            let deadline = Some(Instant::now() + CALL_TIMEOUT);
            let pod_sandbox_id = sandbox.id.to_string();
            let stop = cri::StopPodSandboxRequest { pod_sandbox_id: pod_sandbox_id.clone() };
            let stopped = self.cri.call_with(Method::StopPodSandbox, &stop, deadline).await;
            let _: cri::StopPodSandboxResponse =
                stopped.map_err(|status| status.message().to_owned())?;
            let remove = cri::RemovePodSandboxRequest { pod_sandbox_id };
            let removed = self.cri.call_with(Method::RemovePodSandbox, &remove, deadline).await;
            let _: cri::RemovePodSandboxResponse =
                removed.map_err(|status| status.message().to_owned())?;
        }
        let reason = "an earlier version ran its pod without a kubelet";
        let ended = self.cells.terminate_all_of(uid, reason).await;
        ended.map_err(|error| error_chain(&error))
    }
}

/// Removes mounts, volumes and logs. The directory itself may be an operator's link, which is
/// resolved once; no link beneath it is followed.
fn remove_files(dir: &Path) -> io::Result<()> {
    let real = match fs::canonicalize(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        real => real?,
    };
    for name in DIRECTORIES {
        let beneath = kiyot_linux::tree::own(&real, name);
        unmount_beneath(&beneath)?;
        kiyot_linux::tree::remove_path(&beneath)?;
    }
    // Fails for a link and for a directory with other files: both stay.
    let _ = fs::remove_dir(dir);
    Ok(())
}
