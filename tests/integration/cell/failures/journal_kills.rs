//! Kills of the daemon in each state of a cell in the journal.
//!
//! A waiting program holds the daemon in a state: `kiyot-cell`, a CNI plugin, or the cell's runc.
//! In the state Launching, the daemon calls no program. The daemon is frozen before the kill, so
//! that its state equals the state on disk. Two states are not tested here: Requested is never
//! recorded, and netns cells have no state Stopping, because their end is awaited. The engine's
//! tests and the simulator have both.

use std::{
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use kiyot::backends::milpa::store::{Store, Table};
use kiyot_proto::store::{Cell, CellPhase};
use kiyot_testkit::{
    Kiyot, KiyotOptions, Kubelet, LIMIT, Leftovers, Node, Pod, RunningPod, wait_until,
};

use crate::cell::{
    WAIT, assert_nothing_left,
    failures::kills::{bring_up, remove_all, retry},
    lifecycle::stops::{freeze, thaw},
    options, pod,
};

/// The time for which the daemon runs between two freezes.
const STEP: Duration = Duration::from_millis(1);
/// The maximal number of launches until the journal has a launch when the daemon is frozen.
const MAX_LAUNCHES: usize = 50;

/// The programs that can wait, and when.
#[derive(Clone, Copy)]
enum Hold {
    /// `kiyot-cell launch`, before the agent starts.
    Boot,
    /// A CNI plugin at ADD.
    Attach,
    /// The cell's runc at the creation of the sandbox.
    Sandbox,
    /// A CNI plugin at DEL.
    Detach,
}

/// Programs that wait while their hold is set. Holds their directory.
struct Holds(PathBuf);

impl Holds {
    fn new(node: &Node) -> (Self, KiyotOptions) {
        let holds = Self(node.directory().join("holds"));
        let network = holds.0.join("network");
        for dir in [network.join("bin"), network.join("net.d")] {
            fs::create_dir_all(dir).unwrap();
        }
        let daemon = PathBuf::from(env!("CARGO_BIN_EXE_kiyot"));
        let cell = daemon.with_file_name("kiyot-cell");
        let wait = |hold: Hold| {
            let (file, held) = (holds.file(hold), holds.held(hold));
            let (file, held) = (file.display(), held.display());
            format!(
                "if [ -e {file} ]; then touch {held}; while [ -e {file} ]; do sleep 0.05; done; fi"
            )
        };
        write_program(
            &holds.0.join("kiyot-cell"),
            &format!(
                "case $1 in launch) {};; esac\nexec {} \"$@\"\n",
                wait(Hold::Boot),
                cell.display()
            ),
        );
        write_program(
            &holds.0.join("runc"),
            &format!(
                "for word in \"$@\"; do case $word in create) {};; esac; done\nexec runc \"$@\"\n",
                wait(Hold::Sandbox)
            ),
        );
        write_program(
            &network.join("bin/held"),
            &format!(
                "if [ $CNI_COMMAND = DEL ]; then {}; exit 0; fi\n{}\n\
                 sed 's/.*\"prevResult\":\\({{.*}}\\),\"type\".*/\\1/'\n",
                wait(Hold::Detach),
                wait(Hold::Attach)
            ),
        );
        for plugin in fs::read_dir(Node::cni_plugins()).unwrap().flatten() {
            symlink(plugin.path(), network.join("bin").join(plugin.file_name())).unwrap();
        }
        let conflist = fs::read(node.cni_configuration().join("10-test.conflist")).unwrap();
        let mut conflist: serde_json::Value = serde_json::from_slice(&conflist).unwrap();
        conflist["plugins"].as_array_mut().unwrap().push(serde_json::json!({ "type": "held" }));
        fs::write(network.join("net.d/10-test.conflist"), conflist.to_string()).unwrap();
        let options = KiyotOptions {
            network: Some(network),
            of_provider: format!(
                "cell_binary = \"{0}/kiyot-cell\"\nrunc = \"{0}/runc\"\n",
                holds.0.display()
            ),
            ..options()
        };
        (holds, options)
    }

    fn file(&self, hold: Hold) -> PathBuf {
        self.0.join(format!("hold-{}", hold as u8))
    }

    fn held(&self, hold: Hold) -> PathBuf {
        self.0.join(format!("held-{}", hold as u8))
    }

    fn set(&self, hold: Hold) {
        fs::write(self.file(hold), "").unwrap();
    }

    async fn wait_until_held(&self, hold: Hold) {
        wait_until("a program waits", LIMIT, async || self.held(hold).exists().then_some(())).await;
    }

    fn release(&self, hold: Hold) {
        fs::remove_file(self.file(hold)).unwrap();
    }
}

fn write_program(path: &Path, script: &str) {
    fs::write(path, format!("#!/bin/sh\n{script}")).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

/// Returns whether all threads of a process are stopped.
fn is_frozen(pid: &str) -> bool {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
    threads.into_iter().all(|thread| {
        let stat = fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
        stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('T'))
    })
}

/// Returns the cells in the journal of a frozen daemon, with their states.
async fn recorded(kiyot: &Kiyot<'_>) -> Vec<(String, CellPhase)> {
    let copy = tempfile::tempdir().unwrap();
    fs::copy(kiyot.state().join("store.redb"), copy.path().join("store.redb")).unwrap();
    let store = Store::open(copy.path()).await.unwrap();
    let cells = store.load::<Cell>(Table::Cells).await.unwrap();
    store.close().await;
    let phases = cells.into_iter().map(|(_, cell)| (cell.id.clone(), cell.phase()));
    phases.filter(|(_, phase)| *phase != CellPhase::Gone).collect()
}

/// Kills the daemon while the journal has a single cell, in this state.
async fn kill_in(kiyot: &mut Kiyot<'_>, phase: CellPhase) {
    let pid = [kiyot.pid().to_string()];
    wait_until(format!("the cell is {phase:?} on disk"), LIMIT, async || {
        freeze(&pid);
        wait_until("the daemon is frozen", LIMIT, async || is_frozen(&pid[0]).then_some(())).await;
        let found = recorded(kiyot).await;
        let is_so = matches!(&*found, [(_, of_cell)] if *of_cell == phase);
        if !is_so {
            thaw(&pid);
        }
        is_so.then_some(())
    })
    .await;
    kiyot.kill9();
}

/// Freezes the daemon repeatedly until the journal has a single cell, in this state. Returns the
/// cell and leaves the daemon frozen. Returns `None` and leaves the daemon running if the cell has
/// already passed the state.
async fn freeze_in(kiyot: &Kiyot<'_>, phase: CellPhase) -> Option<String> {
    let pid = [kiyot.pid().to_string()];
    loop {
        freeze(&pid);
        wait_until("the daemon is frozen", LIMIT, async || is_frozen(&pid[0]).then_some(())).await;
        let found = recorded(kiyot).await;
        if let [(cell, of_cell)] = &*found
            && *of_cell == phase
        {
            return Some(cell.clone());
        }
        thaw(&pid);
        if !found.is_empty() {
            return None;
        }
        // A process that is frozen again at once makes no progress.
        tokio::time::sleep(STEP).await;
    }
}

/// Counts how many cells of a daemon exist at the same time.
struct Count {
    most: Arc<AtomicUsize>,
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Count {
    fn start(kiyot: &Kiyot<'_>) -> Self {
        let (most, stop) = (Arc::<AtomicUsize>::default(), Arc::<AtomicBool>::default());
        let (dir, most_seen, stopped) =
            (kiyot.state().join("cells"), Arc::clone(&most), Arc::clone(&stop));
        let thread = std::thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                let cells = fs::read_dir(&dir).into_iter().flatten().flatten();
                let records = cells.filter(|cell| cell.path().join("instance.json").exists());
                most_seen.fetch_max(records.count(), Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        Self { most, stop, thread: Some(thread) }
    }
}

impl Drop for Count {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().map(std::thread::JoinHandle::join);
    }
}

/// Runs the sandbox of a pod in a task.
fn run_sandbox(kubelet: &Kubelet, spec: &Pod) -> tokio::task::JoinHandle<()> {
    let (mut kubelet, config) = (kubelet.clone(), kubelet.prepare(spec));
    tokio::spawn(async move {
        let _cut = kubelet.run_sandbox(&config, "").await;
    })
}

/// Starts the pod by the kubelet's retries.
async fn run_again(kiyot: &Kiyot<'_>, spec: &Pod) -> RunningPod {
    let kubelet = kiyot.kubelet().await;
    let running = retry("the pod is running", || {
        let (mut kubelet, spec) = (kubelet.clone(), spec.clone());
        async move { bring_up(&mut kubelet, &spec).await }
    })
    .await;
    let main = running.container("main").id.clone();
    let output = retry("exec succeeds", || {
        let (mut kubelet, id) = (kubelet.clone(), main.clone());
        async move { kubelet.exec_sync(&id, &["echo", "here"]).await }
    })
    .await;
    assert_eq!(output.stdout, "here\n");
    assert_eq!(kiyot.cells().len(), 1, "a pod has a single cell");
    running
}

/// Removes the pod by the kubelet's retries. Asserts that nothing of its cells is left.
async fn remove(kiyot: &Kiyot<'_>, node: &Node, spec: &Pod, mut cells: Vec<String>) {
    let kubelet = kiyot.kubelet().await;
    cells.extend(kiyot.cells());
    retry("the pod is removed", || remove_all(kubelet.clone(), spec.uid.clone())).await;
    wait_until("no cell is left", LIMIT, async || kiyot.cells().is_empty().then_some(())).await;
    kubelet.forget(spec);
    cells.push(spec.uid.clone());
    let left = Leftovers::of_host().about(&cells);
    assert!(left.is_empty(), "left:\n{left}");
    assert_eq!(node.addresses(), Vec::<String>::new());
}

/// Kills the daemon while a program holds the launch of a pod's cell in a state. Then calls
/// [`assert_retried`].
async fn assert_killed_in(phase: CellPhase, hold: Hold, joins: bool) {
    let node = Node::start().await;
    let (holds, options) = Holds::new(&node);
    let mut kiyot = Kiyot::start(&node, options).await;
    let spec = pod("held", WAIT);
    holds.set(hold);
    let cut = run_sandbox(&kiyot.kubelet().await, &spec);
    holds.wait_until_held(hold).await;
    kill_in(&mut kiyot, phase).await;
    cut.await.unwrap();
    let cells = kiyot.cells();
    Box::pin(assert_retried(kiyot, &node, &spec, (cells, joins), || holds.release(hold))).await;
    assert_nothing_left(node);
}

/// Starts the daemon again and makes the kubelet retry. `cells` are the cells of the killed daemon;
/// `joins` is whether the retry must get the same cell. `release` is called when the first retry
/// has begun.
async fn assert_retried(
    mut kiyot: Kiyot<'_>,
    node: &Node,
    spec: &Pod,
    (cells, joins): (Vec<String>, bool),
    release: impl FnOnce(),
) {
    let count = Count::start(&kiyot);
    kiyot.start_again().await;
    let retried = run_sandbox(&kiyot.kubelet().await, spec);
    release();
    run_again(&kiyot, spec).await;
    retried.await.unwrap();
    assert_eq!(kiyot.cells() == cells, joins, "{:?}, before {cells:?}", kiyot.cells());
    remove(&kiyot, node, spec, cells).await;
    assert_eq!(count.most.load(Ordering::Relaxed), 1, "the pod never has two cells");
}

/// Verifies X1, P6.
#[tokio::test]
async fn daemon_killed_while_a_cell_is_launching_keeps_it_for_the_retry() {
    let node = Node::start().await;
    let mut kiyot = Kiyot::start(&node, options()).await;
    // A launch in this state calls no program that could wait. If the daemon was too fast, another
    // pod is launched.
    for _ in 0..MAX_LAUNCHES {
        let spec = pod("held", WAIT);
        let cut = run_sandbox(&kiyot.kubelet().await, &spec);
        if let Some(cell) = freeze_in(&kiyot, CellPhase::Launching).await {
            kiyot.kill9();
            cut.await.unwrap();
            Box::pin(assert_retried(kiyot, &node, &spec, (vec![cell], true), || ())).await;
            assert_nothing_left(node);
            return;
        }
        cut.await.unwrap();
        remove(&kiyot, &node, &spec, Vec::new()).await;
    }
    panic!("the journal had none of {MAX_LAUNCHES} launches");
}

/// Verifies X1, P6.
#[tokio::test]
async fn daemon_killed_while_a_cell_is_booting_keeps_it_for_the_retry() {
    assert_killed_in(CellPhase::Booting, Hold::Boot, true).await;
}

/// Verifies X1.
#[tokio::test]
async fn daemon_killed_while_a_cell_is_binding_ends_it_before_the_retry_gets_another() {
    assert_killed_in(CellPhase::Enrolled, Hold::Attach, false).await;
}

/// Verifies X1.
#[tokio::test]
async fn daemon_killed_before_the_sandbox_is_recorded_ends_the_bound_cell() {
    assert_killed_in(CellPhase::Bound, Hold::Sandbox, false).await;
}

/// Verifies X1, P6.
#[tokio::test]
async fn daemon_killed_while_a_cell_is_idle_keeps_it_for_the_retry() {
    let node = Node::start().await;
    let (holds, options) = Holds::new(&node);
    let mut kiyot = Kiyot::start(&node, options).await;
    let spec = pod("held", WAIT);
    holds.set(Hold::Boot);
    let cut = run_sandbox(&kiyot.kubelet().await, &spec);
    holds.wait_until_held(Hold::Boot).await;
    kill_in(&mut kiyot, CellPhase::Booting).await;
    cut.await.unwrap();
    let cells = kiyot.cells();
    let count = Count::start(&kiyot);
    // Before the retry, the agent connects and the cell waits for its pod.
    kiyot.start_again().await;
    holds.release(Hold::Boot);
    kill_in(&mut kiyot, CellPhase::Idle).await;
    kiyot.start_again().await;
    run_again(&kiyot, &spec).await;
    assert_eq!(kiyot.cells(), cells);
    remove(&kiyot, &node, &spec, cells).await;
    assert_eq!(count.most.load(Ordering::Relaxed), 1, "the pod never has two cells");
    drop((count, kiyot));
    assert_nothing_left(node);
}

/// Verifies A22.
#[tokio::test]
async fn daemon_killed_while_a_warm_cell_is_binding_ends_it_before_the_retry_gets_another() {
    let node = Node::start().await;
    let (holds, options) = Holds::new(&node);
    let options = KiyotOptions {
        // The limit keeps the pool from being filled again.
        milpa: "max_cells = 1\n".to_owned(),
        sections: "[[backends.milpa.warm]]\ncount = 1\n".to_owned(),
        ..options
    };
    let mut kiyot = Kiyot::start(&node, options).await;
    wait_until("the cell is warm", LIMIT, async || {
        kiyot.log().contains("cell waits in its warm pool").then_some(())
    })
    .await;
    let cells = kiyot.cells();
    let spec = pod("held", WAIT);
    holds.set(Hold::Attach);
    let cut = run_sandbox(&kiyot.kubelet().await, &spec);
    holds.wait_until_held(Hold::Attach).await;
    assert_eq!(kiyot.cells(), cells);
    kill_in(&mut kiyot, CellPhase::Enrolled).await;
    cut.await.unwrap();
    kiyot.start_again().await;
    let retried = run_sandbox(&kiyot.kubelet().await, &spec);
    holds.release(Hold::Attach);
    run_again(&kiyot, &spec).await;
    retried.await.unwrap();
    assert_ne!(kiyot.cells(), cells, "a cell that was taken once is not taken again");
    kiyot.reload("count = 1", "count = 0").await;
    remove(&kiyot, &node, &spec, cells).await;
    drop(kiyot);
    assert_nothing_left(node);
}

/// Verifies X1, P5.
#[tokio::test]
async fn daemon_killed_while_a_cell_is_bound_keeps_its_pod() {
    let node = Node::start().await;
    let mut kiyot = Kiyot::start(&node, options()).await;
    let spec = pod("held", WAIT);
    let running = kiyot.kubelet().await.run_pod(&spec).await.unwrap();
    let cells = kiyot.cells();
    kill_in(&mut kiyot, CellPhase::Bound).await;
    kiyot.start_again().await;
    let again = run_again(&kiyot, &spec).await;
    assert_eq!(
        (&again.sandbox, &again.container("main").id),
        (&running.sandbox, &running.container("main").id)
    );
    assert_eq!(kiyot.cells(), cells);
    remove(&kiyot, &node, &spec, cells).await;
    drop(kiyot);
    assert_nothing_left(node);
}

/// Verifies X1, X3.
#[tokio::test]
async fn daemon_killed_while_a_cell_is_terminating_continues_the_end_when_started() {
    let node = Node::start().await;
    let (holds, options) = Holds::new(&node);
    let mut kiyot = Kiyot::start(&node, options).await;
    let spec = pod("held", WAIT);
    let running = kiyot.kubelet().await.run_pod(&spec).await.unwrap();
    let cells = kiyot.cells();
    holds.set(Hold::Detach);
    let mut kubelet = kiyot.kubelet().await;
    let stopping = tokio::spawn(async move { kubelet.stop_pod(&running).await });
    holds.wait_until_held(Hold::Detach).await;
    kill_in(&mut kiyot, CellPhase::Terminating).await;
    stopping.await.unwrap().unwrap_err();
    kiyot.start_again().await;
    assert_eq!(kiyot.cells(), cells, "the end of the cell is not proven");
    holds.release(Hold::Detach);
    remove(&kiyot, &node, &spec, cells).await;
    drop(kiyot);
    assert_nothing_left(node);
}
