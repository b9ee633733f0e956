//! Rehearsal of a warm cell, before a pod needs it: runs a sandbox, creates a container in it, and
//! removes both.
//!
//! The first sandbox of a cell takes twice as long as the second: the pause image is unpacked, and
//! the programs of the runtime are read, and in a virtual machine without KVM also translated. For
//! the first container of a machine, containerd compiles and loads its AppArmor profile.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use kiyot_engine::id::CellId;
use kiyot_link::rehearsal::NAMESPACE;
use kiyot_proto::cri;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::CellSync;
use crate::backends::milpa::{
    cell_client::{CellClient, checked_id, found},
    cells::Cell,
    failure::{Code, Failure},
};

/// Time limit of each call of a rehearsal.
const REHEARSAL_CALL_TIMEOUT: Duration = Duration::from_secs(30);
/// Name of the rehearsal's sandbox and container in the cell. No kubelet and no list sees them.
const NAME: &str = "rehearsal";
/// The rehearsal's name server, which nothing queries.
const LOOPBACK: &str = "127.0.0.1";

/// Cells with a running rehearsal.
#[derive(Debug, Default)]
pub(super) struct Rehearsals(Mutex<HashMap<CellId, CancellationToken>>);

impl Rehearsals {
    /// Adds a rehearsal, which ends when the guard is dropped.
    fn begin(&self, cell: &CellId) -> Ended<'_> {
        let ended = CancellationToken::new();
        let mut running = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        running.insert(cell.clone(), ended.clone());
        Ended { rehearsals: self, cell: cell.clone(), _ended: ended.drop_guard() }
    }

    fn running(&self, cell: &CellId) -> Option<CancellationToken> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(cell).cloned()
    }
}

/// Guard of a running rehearsal.
#[derive(Debug)]
struct Ended<'a> {
    rehearsals: &'a Rehearsals,
    cell: CellId,
    _ended: DropGuard,
}

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        let mut running = self.rehearsals.0.lock().unwrap_or_else(PoisonError::into_inner);
        running.remove(&self.cell);
    }
}

impl CellSync {
    /// Runs a sandbox in a warm cell that has the pause image, creates a container of this image,
    /// and removes both. Does nothing once a pod has taken the cell. After an error also removes
    /// both, if the cell answers.
    pub(super) async fn rehearse(&self, cell: &Cell, pause: String) -> Result<(), Failure> {
        let _ended = self.rehearsals.begin(&cell.id);
        let client = CellClient::new(cell);
        // A killed daemon may have left a rehearsal, but a pod's sandbox must be the only one.
        self.remove_rehearsals(&client, &cell.id).await?;
        // Checked after `begin`: a pod that takes the cell from now on waits for the rehearsal's
        // end.
        if !self.cells.is_warm(&cell.id) {
            return Ok(());
        }
        let ran = run(&client, config(&cell.id), pause).await;
        if ran.as_ref().is_err_and(|failure| failure.code() == Code::DeadlineExceeded) {
            // The cell still works on the call.
            tokio::time::sleep(REHEARSAL_CALL_TIMEOUT).await;
        }
        let removed = self.remove_rehearsals(&client, &cell.id).await;
        ran.and(removed)
    }

    async fn remove_rehearsals(&self, client: &CellClient, cell: &CellId) -> Result<(), Failure> {
        let request = cri::ListPodSandboxRequest::default();
        let listed = client.list_pod_sandbox(REHEARSAL_CALL_TIMEOUT, request).await?;
        let rehearsals = listed.items.into_iter();
        let rehearsals = rehearsals
            .filter(|it| it.metadata.as_ref().is_some_and(|metadata| is_rehearsal(metadata, cell)));
        for sandbox in rehearsals {
            let pod_sandbox_id = checked_id(sandbox.id)?;
            let request = cri::StopPodSandboxRequest { pod_sandbox_id: pod_sandbox_id.clone() };
            found(client.stop_pod_sandbox(REHEARSAL_CALL_TIMEOUT, request).await)?;
            let request = cri::RemovePodSandboxRequest { pod_sandbox_id };
            found(client.remove_pod_sandbox(REHEARSAL_CALL_TIMEOUT, request).await)?;
        }
        Ok(())
    }

    /// Waits until no rehearsal runs in a cell, so that a pod's sandbox is the only one.
    pub(crate) async fn rehearsal_ended(&self, cell: &CellId) {
        if let Some(running) = self.rehearsals.running(cell) {
            running.cancelled().await;
        }
    }
}

/// Returns whether a sandbox belongs to a rehearsal in a cell. Versions before [`NAMESPACE`] used
/// the name as the namespace. Kubernetes may have this namespace, too, but no pod has the cell's id
/// as its uid.
fn is_rehearsal(sandbox: &cri::PodSandboxMetadata, cell: &CellId) -> bool {
    let is_earlier = || {
        (sandbox.namespace.as_str(), sandbox.name.as_str(), sandbox.uid.as_str())
            == (NAME, NAME, cell.as_str())
    };
    sandbox.namespace == NAMESPACE || is_earlier()
}

/// Runs a sandbox, and creates a container in it.
async fn run(
    client: &CellClient,
    config: cri::PodSandboxConfig,
    image: String,
) -> Result<(), Failure> {
    let request =
        cri::RunPodSandboxRequest { config: Some(config.clone()), runtime_handler: String::new() };
    let sandbox = client.run_pod_sandbox(REHEARSAL_CALL_TIMEOUT, request).await?;
    let container = cri::ContainerConfig {
        metadata: Some(cri::ContainerMetadata { name: NAME.to_owned(), attempt: 0 }),
        image: Some(cri::ImageSpec { image, ..cri::ImageSpec::default() }),
        linux: Some(cri::LinuxContainerConfig {
            resources: Some(cri::LinuxContainerResources::default()),
            security_context: Some(cri::LinuxContainerSecurityContext {
                namespace_options: Some(namespaces()),
                ..Default::default()
            }),
        }),
        ..Default::default()
    };
    let request = cri::CreateContainerRequest {
        pod_sandbox_id: checked_id(sandbox.pod_sandbox_id)?,
        config: Some(container),
        sandbox_config: Some(config),
    };
    client.create_container(REHEARSAL_CALL_TIMEOUT, request).await.map(drop)
}

/// Returns the namespaces of a usual pod.
fn namespaces() -> cri::NamespaceOption {
    cri::NamespaceOption {
        network: cri::NamespaceMode::Node.into(),
        pid: cri::NamespaceMode::Container.into(),
        ..cri::NamespaceOption::default()
    }
}

/// Returns the config of the sandbox, with the namespaces of a usual pod.
fn config(cell: &CellId) -> cri::PodSandboxConfig {
    cri::PodSandboxConfig {
        metadata: Some(cri::PodSandboxMetadata {
            name: NAME.to_owned(),
            uid: cell.as_str().to_owned(),
            namespace: NAMESPACE.to_owned(),
            attempt: 0,
        }),
        // Without name servers containerd copies the cell's own, which a machine has only once it
        // is bound.
        dns_config: Some(cri::DnsConfig {
            servers: vec![LOOPBACK.to_owned()],
            ..cri::DnsConfig::default()
        }),
        linux: Some(cri::LinuxPodSandboxConfig {
            security_context: Some(cri::LinuxSandboxSecurityContext {
                namespace_options: Some(namespaces()),
                ..Default::default()
            }),
            ..Default::default()
        }),
        ..Default::default()
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use tokio::time::{Instant, timeout};

    use super::*;

    #[test]
    fn sandbox_of_a_previous_version_is_a_rehearsal_only_of_its_cell() {
        let (cell, other) = (CellId::mint().unwrap(), CellId::mint().unwrap());
        let own = config(&cell).metadata.unwrap();
        assert!(is_rehearsal(&own, &cell));
        let earlier = cri::PodSandboxMetadata { namespace: NAME.to_owned(), ..own };
        assert!(is_rehearsal(&earlier, &cell));
        assert!(!is_rehearsal(&earlier, &other));
        let pod = cri::PodSandboxMetadata { name: "web".to_owned(), ..earlier.clone() };
        assert!(!is_rehearsal(&pod, &cell));
        let pod = cri::PodSandboxMetadata { namespace: "default".to_owned(), ..earlier };
        assert!(!is_rehearsal(&pod, &cell));
    }

    #[tokio::test(start_paused = true)]
    async fn wait_for_a_rehearsal_ends_when_the_rehearsal_is_cut() {
        const CUT_AFTER: Duration = Duration::from_secs(120);
        let (rehearsals, cell) = (Rehearsals::default(), CellId::mint().unwrap());
        let begun = Instant::now();
        let rehearsal = async {
            let _ended = rehearsals.begin(&cell);
            pending::<()>().await;
        };
        let wait = async {
            rehearsals.running(&cell).unwrap().cancelled().await;
            begun.elapsed()
        };
        let (cut, waited) = tokio::join!(timeout(CUT_AFTER, rehearsal), wait);
        assert_eq!((cut.is_err(), waited), (true, CUT_AFTER));
        assert!(rehearsals.running(&cell).is_none());
    }
}
