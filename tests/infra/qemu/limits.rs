//! Limits and weight of a machine's processes on the node.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use kiyot_engine::provider::{Attachment, Provider};
use kiyot_local::{PauseImage, qemu::Qemu};

use super::{super::bench::cgroup_mounts, Vms};

/// Reads of the whole disk at once, more than QEMU has threads for.
const READS: &str =
    "for i in $(seq 80); do dd if=/dev/vdb of=/dev/null bs=64k count=400 & done; wait";
/// Script that starts processes in a cgroup until it can't.
const FORKS: &str = "echo $$ > \"$0/cgroup.procs\"; exec 2> /dev/null; i=0; while [ $i -lt 1000 ]; \
                     do sleep 1000 > /dev/null & i=$((i+1)); done; echo all of them";

/// The cgroup of a pod, as a kubelet makes it.
struct PodCgroup {
    dir: PathBuf,
    parent: String,
}

impl PodCgroup {
    /// Makes a cgroup in the hierarchy that has CPU weights.
    fn new(name: &str) -> Self {
        let parent = format!("/{name}-pod");
        let mounts = cgroup_mounts();
        let dirs = mounts.iter().map(|mount| mount.join(&parent[1..]));
        let weighed = |dir: &PathBuf| {
            fs::create_dir(dir).unwrap();
            let is_weighed = weight_file(dir).is_some();
            if !is_weighed {
                fs::remove_dir(dir).unwrap();
            }
            is_weighed
        };
        let dir = dirs.into_iter().find(weighed).unwrap();
        Self { dir, parent }
    }

    fn set_weight(&self, weight: &str) {
        fs::write(weight_file(&self.dir).unwrap(), weight).unwrap();
    }
}

impl Drop for PodCgroup {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.dir);
    }
}

fn weight_file(dir: &Path) -> Option<PathBuf> {
    let files = ["cpu.shares", "cpu.weight"].map(|name| dir.join(name));
    files.into_iter().find(|file| file.exists())
}

/// Returns the directory of a cell's own cgroup that has a file.
fn with_file(cell: &str, file: &str) -> PathBuf {
    let dirs = cgroup_mounts().into_iter().map(|mount| mount.join("kiyot").join(cell));
    let found = dirs.into_iter().find(|dir| dir.join(file).exists());
    found.unwrap_or_else(|| panic!("no cgroup of {cell} has {file}"))
}

fn number(path: &Path) -> u64 {
    fs::read_to_string(path).unwrap().trim().parse().unwrap()
}

/// Verifies V11.
#[tokio::test]
async fn processes_of_a_machine_have_limits_and_the_weight_of_their_pod() {
    let vms = Vms::new();
    let pod = PodCgroup::new(&vms.bench.name);
    pod.set_weight("321");
    let (_, instance, mut guest) = vms.launch().await;
    let to = Attachment { cgroup_parent: pod.parent.clone(), ..vms.attachment(&instance) };
    vms.provider.attach(&instance.id, &to).await.unwrap();
    let cell = instance.cell.as_str();
    let weighed =
        with_file(cell, weight_file(&pod.dir).unwrap().file_name().unwrap().to_str().unwrap());
    assert_eq!(number(&weight_file(&weighed).unwrap()), 321);
    let sum = number(&weight_file(weighed.parent().unwrap()).unwrap());
    assert!(sum >= 321, "{sum}");

    // Each list follows a resize of the pod, which the kubelet writes to the pod's cgroup, also
    // after a restart of the daemon.
    let restarted = Qemu::new(&vms.bench.config, PauseImage::new(None));
    for (provider, weight) in [(&vms.provider, "400"), (&restarted, "300")] {
        pod.set_weight(weight);
        provider.list_owned().await.unwrap();
        assert_eq!(number(&weight_file(&weighed).unwrap()).to_string(), weight);
    }
    let sum = number(&weight_file(weighed.parent().unwrap()).unwrap());
    assert!(sum >= 300, "{sum}");

    // The limits and the weight apply to QEMU and its launcher.
    let pids = with_file(cell, "pids.max");
    for pid in [vms.qemu(&instance), vms.bench.launcher(&instance.id)] {
        for dir in [&weighed, &pids] {
            let procs = fs::read_to_string(dir.join("cgroup.procs")).unwrap();
            assert!(procs.lines().any(|line| line == pid.to_string()), "{pid}: {procs}");
        }
    }

    // Heavy input and output keep to the limit.
    guest.succeeds(READS).await;
    let (limit, used) = (number(&pids.join("pids.max")), number(&pids.join("pids.current")));
    println!("limit {limit} used {used}");
    let events = fs::read_to_string(pids.join("pids.events")).unwrap();
    assert_eq!(events.lines().next(), Some("max 0"), "no thread was refused: {used} of {limit}");

    // A process that took over QEMU starts no processes beyond the limit.
    let forks = Command::new("sh").arg("-c").arg(FORKS).arg(&pids).output().unwrap();
    let printed = String::from_utf8_lossy(&forks.stdout);
    assert!(!forks.status.success() && printed.is_empty(), "{forks:?}");
    let used = number(&pids.join("pids.current"));
    assert!(used <= limit, "{used} of {limit}");
    drop(pod);
    vms.end(&instance).await;
}
