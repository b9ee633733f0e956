//! Looks at everything all the time: what must be true at any moment of a soak.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fs,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use kiyot_testkit::{Kubelet, cri, processes, processes::command_line};

use crate::{
    plan::{Victim, Work},
    shape::MARK,
    shared::{Kills, KnownContainer, Shared},
};

/// Between two looks: as often as a kubelet's PLEG, twice.
const PAUSE: Duration = Duration::from_millis(500);
/// The command line of a pause container's process.
const PAUSE_PROCESS: &str = "/bin/busybox sleep 2147483647";

/// The last state that a container was seen in, and its end.
#[derive(Debug, Default)]
struct Seen {
    state: i32,
    end: Option<(i32, String, i64)>,
}

/// Looks until the task is aborted.
pub(crate) async fn watch(shared: Arc<Shared>, mut kubelet: Kubelet) {
    let mut seen = HashMap::new();
    loop {
        lists_are_whole(&shared, &mut kubelet, &mut seen).await;
        nothing_runs_twice(&shared);
        // Not to wait for something: the next look.
        tokio::time::sleep(PAUSE).await;
    }
}

/// Compares the lists with what was acknowledged. A list that is an error is right, too.
async fn lists_are_whole(shared: &Shared, kubelet: &mut Kubelet, seen: &mut HashMap<String, Seen>) {
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
    // Containers first: one that is listed has a sandbox that is.
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
                shared.finds(format!("{}: the list has no sandbox {id}", known.pod));
            }
        }
        for id in &containers {
            if let Some(known) = ledger.containers.get(id).filter(|known| !known.removing) {
                shared.finds(format!(
                    "{}: the list has no container {id} ({})",
                    known.pod, known.name
                ));
            }
        }
    }
    let back = of_sandboxes.iter().map(|listed| &listed.id);
    for id in back.chain(of_containers.iter().map(|listed| &listed.id)) {
        if removed.contains(id) {
            shared.finds(format!("{id} was removed, and is listed"));
        }
    }
    nothing_is_listed_twice(shared, &of_sandboxes, &of_containers);
    sandboxes_are_ready(shared, &of_sandboxes);
    for listed in &of_containers {
        states_go_forward(shared, kubelet, seen, listed).await;
    }
    let there: BTreeSet<_> = of_containers.iter().map(|listed| &listed.id).collect();
    seen.retain(|id, _| there.contains(id));
}

fn nothing_is_listed_twice(
    shared: &Shared,
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
        shared.finds(format!("two of {pod} are listed as running: {ids:?}"));
    }
}

/// A sandbox that nobody stops stays ready, unless its cell was killed.
fn sandboxes_are_ready(shared: &Shared, sandboxes: &[cri::PodSandbox]) {
    let ledger = shared.ledger();
    for listed in sandboxes {
        let Some(known) = ledger.sandboxes.get(&listed.id) else { continue };
        let excused =
            known.stopping || (known.cell && shared.killed_since(&known.kills, &[Victim::Cell]));
        if listed.state() != cri::PodSandboxState::SandboxReady && !excused {
            shared.finds(format!(
                "{}: {} reads NOTREADY, and nobody stopped it",
                known.pod, listed.id
            ));
        }
    }
}

/// States go forward, and an end that was told once is told for ever.
async fn states_go_forward(
    shared: &Shared,
    kubelet: &mut Kubelet,
    seen: &mut HashMap<String, Seen>,
    listed: &cri::Container,
) {
    // One that nobody was told of may be listed, too: its caller was cut off.
    let Some(known) = shared.ledger().containers.get(&listed.id).cloned() else { return };
    if listed.state() == cri::ContainerState::ContainerUnknown {
        return;
    }
    let before = seen.entry(listed.id.clone()).or_default();
    if listed.state < before.state {
        shared.finds(format!(
            "{}: {} ({}) read state {} and reads {} now",
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
            // Who stops it has said so before.
            let now = shared.ledger().containers.get(&listed.id).cloned().unwrap_or(known);
            if !is_real(shared, &now, &end) {
                shared.finds(format!(
                    "{}: {} ({}, {:?}) ended with {end:?} {:?}, killed before: {:?}, now: {:?}; {now:?}",
                    now.pod, listed.id, now.name, now.work, status.message, now.kills, shared.kills()
                ));
            }
            before.end = Some(end);
        }
        Some(told) if *told != end => shared.finds(format!(
            "{}: {} ({}) ended with {told:?} and then with {end:?}",
            known.pod, listed.id, known.name
        )),
        Some(_) => {}
    }
}

/// Can a container have ended so?
fn is_real(shared: &Shared, known: &KnownContainer, end: &(i32, String, i64)) -> bool {
    let killed = |kills: &Kills, victim| shared.killed_since(kills, &[victim]);
    let lost = known.cell && killed(&known.kills, Victim::Cell);
    let containerd = if known.cell { Victim::CellContainerd } else { Victim::NodeContainerd };
    let (code, reason, _) = end;
    match known.work {
        // The program has ended by itself.
        Work::Exits { code: own, .. } if *code == own => return true,
        Work::NoProgram if [127, 128].contains(code) => return true,
        _ => {}
    }
    match code {
        // Of a shell that was told to stop.
        0 => known.stopping && known.work.stays(),
        137 => known.stopping || lost || !known.started,
        // What was cut while it was started, or given up before: 1 is that of runc, before it is
        // the program.
        1 => !known.started,
        128 => !known.started && reason == "StartError",
        // containerd reads the exit of a container that ended while containerd was dead from the
        // shim; a shim that has ended too leaves it nothing but 255 `Unknown`.
        255 => {
            let may_end = !known.started || known.stopping || !known.work.stays();
            killed(&known.kills, containerd) && may_end
        }
        _ => false,
    }
}

/// A process, which no other will be.
type Process = (String, u64);

/// Compares what really runs: a container's first process is in a PID namespace of its own.
fn nothing_runs_twice(shared: &Shared) {
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
        // The first one may have ended before the second one began.
        let alive: Vec<_> =
            namespaces.values().filter(|(pid, started)| start_of(pid) == Some(*started)).collect();
        if alive.len() > 1 {
            let lines: Vec<_> = alive
                .iter()
                .map(|(pid, _)| {
                    fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default()
                })
                .collect();
            shared.finds(format!("{name} runs twice: {namespaces:?} {lines:?}"));
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

/// The time at which a process that lives was started, in ticks since the boot (proc_pid_stat(5)).
fn start_of(pid: &str) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let words: Vec<_> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    (*words.first()? != "Z" && *words.first()? != "X").then_some(())?;
    words.get(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known(work: Work) -> KnownContainer {
        KnownContainer {
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

    fn is_real(shared: &Shared, known: &KnownContainer, code: i32) -> bool {
        super::is_real(shared, known, &(code, "Error".to_owned(), 0))
    }

    #[test]
    fn end_of_a_container_that_nobody_stopped_is_a_finding() {
        let shared = Shared::default();
        for code in [0, 1, 128, 137, 255] {
            assert!(!is_real(&shared, &known(Work::Counts), code), "{code}");
        }
    }

    #[test]
    fn end_with_a_killed_cell_is_real_but_in_no_other_way() {
        let shared = Shared::default();
        shared.kills_one(Victim::Agent);
        assert!(!is_real(&shared, &known(Work::Counts), 137));
        shared.kills_one(Victim::Cell);
        assert!(is_real(&shared, &known(Work::Counts), 137));
        assert!(!is_real(&shared, &known(Work::Counts), 0));
        assert!(!is_real(&shared, &KnownContainer { cell: false, ..known(Work::Counts) }, 137));
    }

    #[test]
    fn exit_code_of_a_program_is_its_own() {
        let shared = Shared::default();
        let exits = known(Work::Exits { lines: 1, code: 7 });
        assert!(is_real(&shared, &exits, 7));
        assert!(!is_real(&shared, &exits, 8));
        assert!(!is_real(&shared, &exits, 0));
        assert!(!is_real(&shared, &exits, 137));
    }

    #[test]
    fn unknown_exit_code_needs_a_killed_containerd_and_a_container_that_may_end() {
        let shared = Shared::default();
        let exits = known(Work::Exits { lines: 1, code: 7 });
        assert!(!is_real(&shared, &exits, 255));
        shared.kills_one(Victim::CellContainerd);
        assert!(is_real(&shared, &exits, 255));
        assert!(is_real(&shared, &KnownContainer { stopping: true, ..known(Work::Counts) }, 255));
        assert!(!is_real(&shared, &known(Work::Counts), 255));
        assert!(!is_real(&shared, &KnownContainer { cell: false, ..exits }, 255));
    }

    #[test]
    fn container_that_is_stopped_ends_by_itself_or_by_a_kill() {
        let stopped = KnownContainer { stopping: true, ..known(Work::Counts) };
        let shared = Shared::default();
        assert!(is_real(&shared, &stopped, 0) && is_real(&shared, &stopped, 137));
        assert!(!is_real(&shared, &stopped, 1));
    }
}
