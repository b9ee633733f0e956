//! Ends an instance: first its processes, then its resources. Every step can be repeated and
//! accepts absent parts, so that a new daemon can start again after a kill. The directory is
//! removed last, because it names the remains; see `removal`.

use std::{collections::BTreeSet, io, path::PathBuf, time::Duration};

use kiyot_engine::provider::{Attachment, ProviderError};
use kiyot_linux::unmount_beneath;
use tokio::task::spawn_blocking;

use crate::{
    Instances,
    cgroup::{self, Containers},
    instance::{Home, InstanceRecord},
    limits,
    network::namespace,
    process, slice,
};

/// Bounds the time that killed processes have to end.
const END_LIMIT: Duration = Duration::from_secs(60);
/// Bounds the scans for further processes. Each scan kills some hundreds.
const ROUNDS: u32 = 100;

/// Ends an instance. After `Ok` only files may be left, which are removed in the background.
pub(super) async fn sweep(instances: &Instances, home: &Home) -> Result<(), ProviderError> {
    let cell = home.cell();
    // An unreadable disk proves nothing about processes.
    if !home.dir().try_exists().map_err(|error| {
        ProviderError::transient(format!("look for the instance of {cell}"), error)
    })? {
        return Ok(());
    }
    let hierarchies = cgroup::hierarchies()
        .map_err(|error| ProviderError::transient("read the cgroup hierarchies", error))?;
    let known = end_processes(home, &hierarchies).await?;
    let plan = instances.networks.plan_of(home, &known)?;
    if let Some(plan) = &plan {
        instances.networks.detach(home, plan).await?;
    }
    if let Some(attachment) = &known.attachment {
        slice::release(home, &hierarchies, &attachment.cgroup_parent).await?;
    }
    let pod_uid = plan.and_then(|plan| plan.pod_uid().map(str::to_owned));
    let home_of_task = home.clone();
    spawn_blocking(move || remove(&home_of_task, &hierarchies, known, pod_uid))
        .await
        .map_err(|error| ProviderError::transient(format!("clean up after {cell}"), error))?
        .map_err(|error| ProviderError::transient(format!("clean up after {cell}"), error))?;
    instances
        .removal
        .remove(home)
        .await
        .map_err(|error| ProviderError::transient(format!("remove the directory of {cell}"), error))
}

/// Kills the processes of the instance until no process is left. Before each kill it records the
/// cgroups of the containers that can't be found by the pod's cgroup.
async fn end_processes(
    home: &Home,
    hierarchies: &[cgroup::Hierarchy],
) -> Result<InstanceRecord, ProviderError> {
    let failed = |error: io::Error| {
        ProviderError::transient(format!("end the processes of {}", home.cell()), error)
    };
    let mut known = home.known().map_err(failed)?;
    let launcher = known.launcher.filter(|_| known.boot_id == super::boot_id());
    for round in 0..ROUNDS {
        let (home_of_task, hierarchies_of_task) = (home.clone(), hierarchies.to_vec());
        let attachment = known.attachment.clone();
        let found = spawn_blocking(move || {
            if round == 0 {
                return look_at_first(&home_of_task, &hierarchies_of_task, attachment, launcher);
            }
            let (cell, netns) = (home_of_task.cell(), home_of_task.netns_path());
            let processes = process::of_instance(&hierarchies_of_task, cell, &netns, launcher)?;
            let cgroups = process::container_cgroups(&hierarchies_of_task, &processes)?;
            Ok(Found { processes, cgroups })
        })
        .await
        .map_err(io::Error::other)
        .map_err(failed)?
        .map_err(failed)?;
        let before = known.cgroups.len();
        known.cgroups.extend(found.cgroups);
        if found.processes.is_empty() {
            if round == 0 {
                continue;
            }
            // The programs that remove the network run in the cell's cgroup, which must not be
            // frozen.
            cgroup::thaw_own(hierarchies, home.cell()).map_err(failed)?;
            return Ok(known);
        }
        if round > 0
            && known.cgroups.len() != before
            && let Err(error) = home.keep(&known)
        {
            if !error.is_no_space() {
                return Err(error);
            }
            // The cell may have filled the disk: its end must not wait for free space. The next
            // daemon finds the cgroups by the pod.
            tracing::warn!(cell = home.cell(), "container cgroups not recorded, disk full");
        }
        let processes = found.processes;
        tracing::debug!(
            cell = home.cell(),
            processes = processes.len(),
            "killing processes of a cell"
        );
        // Frozen processes of version 1 exit only after a thaw.
        cgroup::thaw(hierarchies, home.cell(), &known.cgroups);
        cgroup::kill(hierarchies, home.cell());
        let left = spawn_blocking(move || process::end(&processes, END_LIMIT))
            .await
            .map_err(io::Error::other)
            .map_err(failed)?
            .map_err(failed)?;
        if !left.is_empty() {
            return Err(failed(io::Error::other(format!(
                "{left:?} have not ended {} s after they were killed",
                END_LIMIT.as_secs()
            ))));
        }
    }
    Err(failed(io::Error::other("new processes start after every kill")))
}

/// The parts of an instance that a scan found.
#[derive(Debug, Default)]
struct Found {
    processes: BTreeSet<process::Identity>,
    /// The cgroups of the instance's containers.
    cgroups: BTreeSet<PathBuf>,
}

/// Returns the processes whose end nearly always ends the whole instance. Returns no process if the
/// containers' cgroups can't be found by the pod's cgroup, because an unknown frozen cgroup would
/// keep its processes alive. Blocking.
fn look_at_first(
    home: &Home,
    hierarchies: &[cgroup::Hierarchy],
    attachment: Option<Attachment>,
    launcher: Option<process::Identity>,
) -> io::Result<Found> {
    let Some(Attachment { pod_uid, cgroup_parent, .. }) = attachment else {
        return Ok(Found::default());
    };
    let pod_uid = Some(pod_uid).filter(|uid| !uid.is_empty());
    let containers = Containers { pod_uid, ids: home.containers()? };
    let Some(cgroups) = containers.within(hierarchies, &cgroup_parent) else {
        return Ok(Found::default());
    };
    let processes = process::first_of_instance(hierarchies, home.cell(), launcher)?;
    Ok(Found { processes, cgroups })
}

/// Removes all resources but the processes, the files and the pod's network. Blocking.
fn remove(
    home: &Home,
    hierarchies: &[cgroup::Hierarchy],
    known: InstanceRecord,
    pod_uid: Option<String>,
) -> io::Result<()> {
    unmount_beneath(home.dir())?;
    namespace::remove(&home.netns_path())?;
    let containers = Containers { pod_uid, ids: home.containers()? };
    let cgroup_parent = known.attachment.map(|attachment| attachment.cgroup_parent);
    let mut cgroups = known.cgroups;
    cgroups.extend(
        cgroup_parent
            .and_then(|parent| containers.within(hierarchies, &parent))
            .unwrap_or_else(|| containers.anywhere(hierarchies)),
    );
    cgroup::remove_containers(&cgroups)?;
    cgroup::remove(hierarchies, home.cell())?;
    // The next attachment of a cell sets the parent's limits again.
    hierarchies.iter().for_each(|hierarchy| drop(limits::lower_parent(hierarchy)));
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use kiyot_config::MilpaBackend;
    use kiyot_engine::{id::CellId, provider::InstanceId};

    use super::*;

    /// Verifies X18.
    #[tokio::test]
    async fn unreadable_instance_has_not_ended() {
        let dir = tempfile::tempdir().unwrap();
        let config = MilpaBackend { state_dir: dir.path().to_owned(), ..MilpaBackend::default() };
        let instances = Instances::new(&config, &config.netns.network, None, "any");
        let instance = InstanceId(CellId::mint().unwrap().as_str().to_owned());
        assert!(instances.terminate(std::slice::from_ref(&instance)).await[&instance].is_ok());
        // Like a failing disk: an error other than "not found".
        fs::write(dir.path().join("cells"), "").unwrap();
        let outcomes = instances.terminate(std::slice::from_ref(&instance)).await;
        let error = outcomes[&instance].as_ref().unwrap_err();
        assert!(error.doing.contains(&instance.0), "{error}");
    }
}
