//! The witness: a pod on the node that runs through all kills of the soak.

use std::{fs, sync::Arc};

use kiyot_testkit::{Container, Kubelet, LIMIT, Pod, RunningPod, cri, processes, wait_until};

use crate::{
    plan::Work,
    shape::mark,
    state::{ContainerEntry, SandboxEntry, SoakState},
    watcher::{Process, start_of},
};

/// The pod and the first process of its container.
#[derive(Debug)]
pub(crate) struct Witness {
    kubelet: Kubelet,
    running: RunningPod,
    process: Process,
}

impl Witness {
    pub(crate) async fn start(shared: &Arc<SoakState>, mut kubelet: Kubelet) -> Self {
        let mut spec = Pod::new("witness");
        let script = "trap 'exit 0' TERM; while :; do echo alive > /tmp/alive; sleep 0.5; done";
        let mut main = Container::script("main", script);
        main.command.push(mark(&spec.uid, "main"));
        spec = spec.container(main);
        let running = kubelet.run_pod(&spec).await.unwrap();
        let (pod, kills, id) =
            ("the witness".to_owned(), shared.kills(), &running.container("main").id);
        {
            let mut ledger = shared.ledger();
            ledger.sandboxes.insert(
                running.sandbox.clone(),
                SandboxEntry {
                    pod: pod.clone(),
                    cell: false,
                    kills: kills.clone(),
                    stopping: false,
                    removing: false,
                },
            );
            ledger.containers.insert(
                id.clone(),
                ContainerEntry {
                    sandbox: running.sandbox.clone(),
                    pod,
                    name: "main".to_owned(),
                    work: Work::Counts,
                    cell: false,
                    kills,
                    started: true,
                    stopping: false,
                    removing: false,
                },
            );
        }
        // Until it executes the program, the process is runc.
        let process = wait_until("the witness runs", LIMIT, async || first_process(&spec)).await;
        Self { kubelet, running, process }
    }

    /// Checks that the process is the same and still works, and removes the pod.
    pub(crate) async fn finish(mut self, shared: &SoakState) {
        let id = self.running.container("main").id.clone();
        let status = self.kubelet.container_status(&id).await.unwrap();
        if status.state() != cri::ContainerState::ContainerRunning {
            shared.report(format!("the witness reads {status:?}"));
        }
        let now = first_process(&self.running.spec);
        if now.as_ref() != Some(&self.process) {
            shared.report(format!("the witness was process {:?} and is {now:?}", self.process));
        }
        let at = format!("/proc/{}/root/tmp/alive", self.process.0);
        // The program recreates the file after it is removed.
        let _ = fs::remove_file(&at);
        wait_until("the witness writes its file again", LIMIT, async || {
            fs::exists(&at).is_ok_and(|there| there).then_some(())
        })
        .await;
        {
            let mut ledger = shared.ledger();
            ledger.allow_stop(&self.running.sandbox);
            ledger.allow_removal(&self.running.sandbox);
        }
        self.kubelet.stop_and_remove(&self.running).await.unwrap();
    }
}

/// Returns the first process of the pod's container. Its child `sleep` has the same command line
/// between fork and exec.
fn first_process(spec: &Pod) -> Option<Process> {
    let pid = processes(&[&mark(&spec.uid, "main")]).into_iter().find(|pid| {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        is_first_of_namespace(&status)
    })?;
    let started = start_of(&pid)?;
    Some((pid, started))
}

/// Returns whether `status` is of the first process of a PID namespace (proc_pid_status(5)).
fn is_first_of_namespace(status: &str) -> bool {
    let ids = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
    ids.is_some_and(|ids| ids.split_whitespace().next_back() == Some("1"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forked_child_is_not_the_first_process() {
        let status = |ids: &str| format!("Name:\tsh\nPid:\t71\nNSpid:\t{ids}\nVmRSS:\t1 kB\n");
        assert!(is_first_of_namespace(&status("71\t1")));
        for other in ["72\t2", "72\t11", "72"] {
            assert!(!is_first_of_namespace(&status(other)), "{other}");
        }
        assert!(!is_first_of_namespace(""));
    }
}
