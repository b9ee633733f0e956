//! Cgroups of pods that outlived a reboot of the node.
//!
//! The kubelet kills a running pod if it does not find the pod's cgroup (`SyncPod`): a directory in
//! each hierarchy of version 1, or a directory in version 2 with the controllers that the kubelet
//! uses (`cgroupV2impl.Validate`). It makes a pod's cgroup only before the pod runs.

use std::{collections::BTreeSet, fs, io, path::Path};

use kiyot_engine::provider::ProviderError;
use kiyot_linux::tree::{RelPath, beneath};
use tokio::task::spawn_blocking;

use crate::{
    cgroup::{self, Hierarchy, relative},
    slice,
};

/// The controllers that a kubelet uses (`getSupportedUnifiedControllers`).
const KUBELET_CONTROLLERS: [&str; 5] = ["cpu", "cpuset", "memory", "hugetlb", "pids"];

/// Makes the absent cgroups of pods, by their `cgroup_parent`. Tries all, then returns the last
/// error.
pub async fn restore(parents: &[String]) -> Result<(), ProviderError> {
    let failed = |error: io::Error| ProviderError::transient("make the cgroups of pods", error);
    let mounted = cgroup::hierarchies().map_err(failed)?;
    let has_v1 = mounted.iter().any(|hierarchy| hierarchy.has("memory"));
    // With version 1 present, a kubelet does not look at version 2.
    let used = |hierarchy: &Hierarchy| !(has_v1 && hierarchy.is_v2());
    let hierarchies: Vec<Hierarchy> = mounted.into_iter().filter(used).collect();
    let (mut outcome, mut made) = (Ok(()), 0);
    for parent in parents {
        let Some(path) = relative(parent) else { continue };
        if hierarchies.iter().all(|hierarchy| is_complete(hierarchy, &path)) {
            continue;
        }
        if let Err(error) = slice::start(&hierarchies, parent).await {
            outcome = Err(error);
        }
        let own = hierarchies.clone();
        let tried = spawn_blocking(move || own.iter().try_for_each(|it| make(it, &path))).await;
        match tried.map_err(io::Error::other).flatten() {
            Ok(()) => made += 1,
            Err(error) => outcome = Err(failed(error)),
        }
    }
    if made > 0 {
        tracing::info!(made, "cgroups of running pods made again");
    }
    outcome
}

/// Returns whether a kubelet would find a cgroup complete.
fn is_complete(hierarchy: &Hierarchy, path: &RelPath) -> bool {
    let dir = path.beneath(&hierarchy.mount);
    dir.is_dir() && (!hierarchy.is_v2() || missing(&hierarchy.mount, &dir).is_empty())
}

/// Returns the controllers of version 2 that a kubelet uses and this cgroup lacks.
fn missing(mount: &Path, dir: &Path) -> BTreeSet<String> {
    let (available, own) = (controllers(mount), controllers(dir));
    let is_used = |name: &&String| KUBELET_CONTROLLERS.contains(&name.as_str());
    available.difference(&own).filter(is_used).cloned().collect()
}

fn controllers(dir: &Path) -> BTreeSet<String> {
    let text = fs::read_to_string(dir.join("cgroup.controllers")).unwrap_or_default();
    text.split_whitespace().map(str::to_owned).collect()
}

/// Makes a cgroup with its parents.
fn make(hierarchy: &Hierarchy, path: &RelPath) -> io::Result<()> {
    let mut dir = hierarchy.mount.clone();
    for part in path.as_str().split('/') {
        let parent = dir.clone();
        if hierarchy.is_v2() {
            for controller in controllers(&parent) {
                // One by one: a controller that can't be passed on does not affect the others.
                let _ = fs::write(parent.join("cgroup.subtree_control"), format!("+{controller}"));
            }
        }
        dir = beneath(&parent, part)?;
        match fs::create_dir(&dir) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(cgroup::named(&dir, error));
            }
            _ => {}
        }
        if hierarchy.has("cpuset") {
            cgroup::inherit_cpuset(&parent, &dir)?;
        }
    }
    let missing = missing(&hierarchy.mount, &dir);
    if hierarchy.is_v2() && !missing.is_empty() {
        return Err(io::Error::other(format!(
            "{} lacks the controllers {missing:?}",
            dir.display()
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const POD: &str = "/kubepods/besteffort/pod1-2";

    #[test]
    fn cgroup_of_a_pod_is_made_with_its_parents_and_stays() {
        let dir = tempfile::tempdir().unwrap();
        let hierarchy = Hierarchy::played(dir.path(), &["pids"]);
        let path = relative(POD).unwrap();
        assert!(!is_complete(&hierarchy, &path));
        for _ in 0..2 {
            make(&hierarchy, &path).unwrap();
            assert!(is_complete(&hierarchy, &path));
        }
        assert!(dir.path().join("kubepods/besteffort/pod1-2").is_dir());
    }

    #[test]
    fn cgroup_of_version_2_passes_controllers_on_and_needs_those_of_the_kubelet() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("cgroup.controllers"), "cpu memory rdma\n").unwrap();
        let hierarchy = Hierarchy::played(dir.path(), &[]);
        let path = relative(POD).unwrap();
        // A plain directory gets no controllers.
        let error = make(&hierarchy, &path).unwrap_err().to_string();
        assert!(error.ends_with("pod1-2 lacks the controllers {\"cpu\", \"memory\"}"), "{error}");
        assert!(dir.path().join("cgroup.subtree_control").is_file());
        let own = dir.path().join("kubepods/besteffort/pod1-2/cgroup.controllers");
        fs::write(own, "memory cpu\n").unwrap();
        assert!(is_complete(&hierarchy, &path));
        make(&hierarchy, &path).unwrap();
    }
}
