//! The watcher: checks the invariants that hold at every moment of a soak.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fs,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use kiyot_testkit::{Kubelet, cri, processes, processes::command_line};

use crate::{
    plan::{Target, Work},
    shape::MARK,
    state::{ContainerEntry, Kills, SoakState},
};

/// The time between two checks: half the relist period of a kubelet's PLEG.
const CHECK_PERIOD: Duration = Duration::from_millis(500);
/// The command line of a pause container's process.
const PAUSE_PROCESS: &str = "/bin/busybox sleep 2147483647";

/// The last listed state of a container, and its exit.
#[derive(Debug, Default)]
struct Seen {
    state: i32,
    end: Option<(i32, String, i64)>,
}

/// Checks the invariants until the task is aborted.
pub(crate) async fn watch(shared: Arc<SoakState>, mut kubelet: Kubelet) {
    let mut seen = HashMap::new();
    loop {
        check_lists(&shared, &mut kubelet, &mut seen).await;
        check_processes(&shared);
        // The sleep is the period of the checks, not a wait for a condition.
        tokio::time::sleep(CHECK_PERIOD).await;
    }
}

/// Checks that the lists have every acknowledged object. A list may be an error instead.
async fn check_lists(shared: &SoakState, kubelet: &mut Kubelet, seen: &mut HashMap<String, Seen>) {
    let (mut sandboxes, mut containers, removed) = {
        let ledger = shared.ledger();
        let kept: BTreeSet<_> = ledger
            .sandboxes
            .iter()
            .filter(|(_, known)| !known.removing)
            .map(|(id, _)| id.clone())
            .collect();
        let containers: BTreeSet<_> = ledger
            .containers
            .iter()
            .filter(|(_, known)| !known.removing)
            .map(|(id, _)| id.clone())
            .collect();
        (kept, containers, ledger.removed.iter().cloned().collect::<BTreeSet<_>>())
    };
    shared.calls.fetch_add(2, Ordering::Relaxed);
    // Containers are listed first: the sandbox of a listed container must be in the later list.
    let (Ok(of_containers), Ok(of_sandboxes)) =
        (kubelet.containers().await, kubelet.sandboxes().await)
    else {
        shared.failed.fetch_add(1, Ordering::Relaxed);
        return;
    };
    for listed in &of_sandboxes {
        sandboxes.remove(&listed.id);
    }
    for listed in &of_containers {
        containers.remove(&listed.id);
    }
    {
        let ledger = shared.ledger();
        for id in &sandboxes {
            if let Some(known) = ledger.sandboxes.get(id).filter(|known| !known.removing) {
                shared.report(format!("{}: the list has no sandbox {id}", known.pod));
            }
        }
        for id in &containers {
            if let Some(known) = ledger.containers.get(id).filter(|known| !known.removing) {
                shared.report(format!(
                    "{}: the list has no container {id} ({})",
                    known.pod, known.name
                ));
            }
        }
    }
    let back = of_sandboxes.iter().map(|listed| &listed.id);
    for id in back.chain(of_containers.iter().map(|listed| &listed.id)) {
        if removed.contains(id) {
            shared.report(format!("{id} was removed, but is listed"));
        }
    }
    check_duplicates(shared, &of_sandboxes, &of_containers);
    check_readiness(shared, &of_sandboxes);
    for listed in &of_containers {
        check_states(shared, kubelet, seen, listed).await;
    }
    let there: BTreeSet<_> = of_containers.iter().map(|listed| &listed.id).collect();
    seen.retain(|id, _| there.contains(id));
}

fn check_duplicates(
    shared: &SoakState,
    sandboxes: &[cri::PodSandbox],
    containers: &[cri::Container],
) {
    let mut ready: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for listed in sandboxes {
        if listed.state() == cri::PodSandboxState::SandboxReady {
            let uid = listed.metadata.clone().unwrap_or_default().uid;
            ready.entry(uid).or_default().push(&listed.id);
        }
    }
    let mut running: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for listed in containers {
        if listed.state() == cri::ContainerState::ContainerRunning {
            let name = listed.metadata.clone().unwrap_or_default().name;
            let uid = listed.labels.get("io.kubernetes.pod.uid").cloned().unwrap_or_default();
            running.entry(format!("{uid}:{name}")).or_default().push(&listed.id);
        }
    }
    for (pod, ids) in ready.iter().chain(&running).filter(|(_, ids)| ids.len() > 1) {
        shared.report(format!("{pod}: several attempts are listed as running: {ids:?}"));
    }
}

/// Checks that a sandbox stays ready until it is stopped or its cell is killed.
fn check_readiness(shared: &SoakState, sandboxes: &[cri::PodSandbox]) {
    let ledger = shared.ledger();
    for listed in sandboxes {
        let Some(known) = ledger.sandboxes.get(&listed.id) else { continue };
        let excused =
            known.stopping || (known.cell && shared.killed_since(&known.kills, &[Target::Cell]));
        if listed.state() != cri::PodSandboxState::SandboxReady && !excused {
            shared.report(format!(
                "{}: {} reads NOTREADY, but was not stopped",
                known.pod, listed.id
            ));
        }
    }
}

/// Checks that the state of a container never goes back and that its exit never changes.
async fn check_states(
    shared: &SoakState,
    kubelet: &mut Kubelet,
    seen: &mut HashMap<String, Seen>,
    listed: &cri::Container,
) {
    // The list may have containers without an entry: their caller was disconnected before the
    // response.
    let Some(known) = shared.ledger().containers.get(&listed.id).cloned() else { return };
    if listed.state() == cri::ContainerState::ContainerUnknown {
        return;
    }
    let before = seen.entry(listed.id.clone()).or_default();
    if listed.state < before.state {
        shared.report(format!(
            "{}: {} ({}) had state {} and now has {}",
            known.pod, listed.id, known.name, before.state, listed.state
        ));
    }
    before.state = listed.state;
    if listed.state() != cri::ContainerState::ContainerExited {
        return;
    }
    shared.calls.fetch_add(1, Ordering::Relaxed);
    let Ok(status) = kubelet.container_status(&listed.id).await else {
        shared.failed.fetch_add(1, Ordering::Relaxed);
        return;
    };
    let end = (status.exit_code, status.reason.clone(), status.finished_at);
    match &before.end {
        None => {
            // A stop is entered in the ledger before it is requested.
            let now = shared.ledger().containers.get(&listed.id).cloned().unwrap_or(known);
            if !is_possible(shared, &now, &end) {
                shared.report(format!(
                    "{}: {} ({}, {:?}) ended with {end:?} {:?}, \
                     killed before: {:?}, now: {:?}; {now:?}",
                    now.pod,
                    listed.id,
                    now.name,
                    now.work,
                    status.message,
                    now.kills,
                    shared.kills()
                ));
            }
            before.end = Some(end);
        }
        Some(first) if *first != end => shared.report(format!(
            "{}: {} ({}) ended with {first:?} and then with {end:?}",
            known.pod, listed.id, known.name
        )),
        Some(_) => {}
    }
}

/// Returns whether a container may have this exit.
fn is_possible(shared: &SoakState, known: &ContainerEntry, end: &(i32, String, i64)) -> bool {
    let killed = |kills: &Kills, victim| shared.killed_since(kills, &[victim]);
    let lost = known.cell && killed(&known.kills, Target::Cell);
    let containerd = if known.cell { Target::CellContainerd } else { Target::NodeContainerd };
    let (code, reason, _) = end;
    match known.work {
        // The program has exited by itself.
        Work::Exits { code: own, .. } if *code == own => return true,
        Work::NoProgram if [127, 128].contains(code) => return true,
        _ => {}
    }
    match code {
        // The shell has received SIGTERM.
        0 => known.stopping && known.work.runs_until_stopped(),
        137 => known.stopping || lost || !known.started,
        // The start was interrupted or cancelled: 1 is the exit code of runc before it executes the
        // program.
        1 => !known.started,
        128 => !known.started && reason == "StartError",
        // If a container ends while containerd is dead, containerd reads the exit from the shim. If
        // the shim has exited as well, containerd reports 255 `Unknown`.
        255 => {
            let may_end = !known.started || known.stopping || !known.work.runs_until_stopped();
            killed(&known.kills, containerd) && may_end
        }
        _ => false,
    }
}

/// A process by its PID and start time. The pair is unique.
pub(crate) type Process = (String, u64);

/// Checks that no container or sandbox has two live processes in different PID namespaces.
fn check_processes(shared: &SoakState) {
    let mut of_names: BTreeMap<String, BTreeMap<String, Process>> = BTreeMap::new();
    for pid in processes::processes(&[MARK]) {
        let line = command_line(&pid);
        let Some(mark) = line.split(' ').find(|word| word.starts_with(MARK)) else { continue };
        add(&mut of_names, mark.to_owned(), pid);
    }
    for pid in processes::processes(&[PAUSE_PROCESS]) {
        let groups = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
        let pod = groups.split('/').find(|part| part.starts_with("pod"));
        if let Some(pod) = pod {
            add(&mut of_names, format!("pause of {}", pod.trim_end()), pid.clone());
        }
    }
    for (name, namespaces) in of_names.iter().filter(|(_, namespaces)| namespaces.len() > 1) {
        // The first process may have exited before the second started.
        let alive: Vec<_> =
            namespaces.values().filter(|(pid, started)| start_of(pid) == Some(*started)).collect();
        if alive.len() > 1 {
            let lines: Vec<_> = alive
                .iter()
                .map(|(pid, _)| {
                    fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default()
                })
                .collect();
            shared.report(format!("{name} runs twice: {namespaces:?} {lines:?}"));
        }
    }
}

fn add(of_names: &mut BTreeMap<String, BTreeMap<String, Process>>, name: String, pid: String) {
    let namespace = fs::read_link(format!("/proc/{pid}/ns/pid"));
    if let (Ok(namespace), Some(started)) = (namespace, start_of(&pid)) {
        let namespace = namespace.display().to_string();
        of_names.entry(name).or_default().insert(namespace, (pid, started));
    }
}

/// Returns the start time of a live process in ticks since boot (proc_pid_stat(5)).
pub(crate) fn start_of(pid: &str) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let words: Vec<_> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    (*words.first()? != "Z" && *words.first()? != "X").then_some(())?;
    words.get(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known(work: Work) -> ContainerEntry {
        ContainerEntry {
            sandbox: "sandbox".to_owned(),
            pod: "pod".to_owned(),
            name: "main".to_owned(),
            work,
            cell: true,
            kills: Kills::new(),
            started: true,
            stopping: false,
            removing: false,
        }
    }

    fn is_possible(shared: &SoakState, known: &ContainerEntry, code: i32) -> bool {
        super::is_possible(shared, known, &(code, "Error".to_owned(), 0))
    }

    #[test]
    fn exit_of_an_unstopped_container_is_impossible() {
        let shared = SoakState::default();
        for code in [0, 1, 128, 137, 255] {
            assert!(!is_possible(&shared, &known(Work::Counts), code), "{code}");
        }
    }

    #[test]
    fn killed_cell_allows_only_exit_code_137() {
        let shared = SoakState::default();
        shared.count_kill(Target::Agent);
        assert!(!is_possible(&shared, &known(Work::Counts), 137));
        shared.count_kill(Target::Cell);
        assert!(is_possible(&shared, &known(Work::Counts), 137));
        assert!(!is_possible(&shared, &known(Work::Counts), 0));
        assert!(!is_possible(&shared, &ContainerEntry { cell: false, ..known(Work::Counts) }, 137));
    }

    #[test]
    fn program_exits_with_its_own_code() {
        let shared = SoakState::default();
        let exits = known(Work::Exits { lines: 1, code: 7 });
        assert!(is_possible(&shared, &exits, 7));
        assert!(!is_possible(&shared, &exits, 8));
        assert!(!is_possible(&shared, &exits, 0));
        assert!(!is_possible(&shared, &exits, 137));
    }

    #[test]
    fn exit_code_255_needs_a_killed_containerd() {
        let shared = SoakState::default();
        let exits = known(Work::Exits { lines: 1, code: 7 });
        assert!(!is_possible(&shared, &exits, 255));
        shared.count_kill(Target::CellContainerd);
        assert!(is_possible(&shared, &exits, 255));
        assert!(is_possible(
            &shared,
            &ContainerEntry { stopping: true, ..known(Work::Counts) },
            255
        ));
        assert!(!is_possible(&shared, &known(Work::Counts), 255));
        assert!(!is_possible(&shared, &ContainerEntry { cell: false, ..exits }, 255));
    }

    #[test]
    fn stopped_container_exits_by_itself_or_by_sigkill() {
        let stopped = ContainerEntry { stopping: true, ..known(Work::Counts) };
        let shared = SoakState::default();
        assert!(is_possible(&shared, &stopped, 0) && is_possible(&shared, &stopped, 137));
        assert!(!is_possible(&shared, &stopped, 1));
    }
}
