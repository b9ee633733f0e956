//! The soak: several callers create, change and remove pods of random shape, while the daemon,
//! agents, cells and containerds are killed at random moments. At the end nothing may be left.
//! `make soak SECONDS=n SEED=s` runs it.
//!
//! The test needs root and its own namespaces, which cargo's runner provides (scripts/runner). It
//! is a separate binary, so that everything on its host belongs to it and can be compared.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a failed setup fails the test in place"
)]

use std::{
    fmt::Write,
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use kiyot_testkit::{
    Kiyot, KiyotOptions, Kubelet, LIMIT, Node, kill_all, processes, seed, wait_until,
};
use tokio::{
    runtime::Handle,
    task::{JoinHandle, spawn_blocking},
};

use caller::Caller;
use chains::NetworkRecorder;
use inventory::{Inventory, Remains, own_logged_cells, records, resident};
use plan::{CALLERS, Kill, Place, Plan, Target};
use shims::ShimRecorder;
use state::SoakState;

mod caller;
mod chains;
mod inventory;
mod plan;
mod shape;
mod shims;
mod state;
mod watcher;
mod witness;

/// The default time during which processes are killed, in seconds; `SOAK_SECONDS` overrides it.
const SECONDS: u64 = 60;
const PROGRESS_PERIOD: Duration = Duration::from_secs(60);
/// The time between two inventories.
const INVENTORY_PERIOD: Duration = Duration::from_secs(1);
/// Time limit of the callers after the last kill.
const CALLERS_LIMIT: Duration = Duration::from_secs(900);
/// Bounds the growth of the daemon's memory after the warm-up, in KiB.
const MAX_GROWTH_KIB: u64 = 32 * 1024;
/// The size of the warm pool during the kills.
const WARM: &str = "count = 2";
const NOT_WARM: &str = "count = 0";
/// Bounds the log file of a daemon, in bytes.
const MAX_LOG_BYTES: u64 = 64 << 20;

/// Verifies X13, Y6.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_of_random_shape_outlive_random_kills_and_leave_nothing() {
    let seconds = std::env::var("SOAK_SECONDS").ok().filter(|text| !text.is_empty());
    let seconds =
        seconds.map_or(SECONDS, |text| text.parse().expect("SOAK_SECONDS is a number of seconds"));
    let seed = seed();
    let soak = Soak { plan: Plan::of(seed), seed, shared: Arc::default() };
    Box::pin(soak.run(Duration::from_secs(seconds))).await;
}

/// A soak with its plan and shared state.
struct Soak {
    plan: Plan,
    seed: u64,
    shared: Arc<SoakState>,
}

/// The resident memory of the daemon, in KiB.
#[derive(Debug, Default)]
struct Memory {
    warm: u64,
    most: u64,
    last: u64,
}

impl Soak {
    async fn run(&self, length: Duration) {
        let node = Node::start_for_long().await;
        let shims = ShimRecorder::prepare(&node);
        let networks = NetworkRecorder::start(&node).await;
        let mut options = KiyotOptions::new(env!("CARGO_BIN_EXE_kiyot"));
        options.network = Some(NetworkRecorder::directory(&node));
        options.sections = format!("[[backends.milpa.warm]]\n{NOT_WARM}\n");
        let mut kiyot = Kiyot::start(&node, options).await;
        self.warm_up(&kiyot.kubelet().await).await;
        assert!(kiyot.stop().await.success(), "the daemon stops");
        let records_before = records(&kiyot);
        kiyot.start_again().await;
        let kubelet = kiyot.kubelet().await;
        let witness = witness::Witness::start(&self.shared, kubelet.clone()).await;
        self.warm_up(&kubelet).await;
        let before = settled(&node, &kiyot).await;
        kiyot.reload(NOT_WARM, WARM).await;
        let mut memory = Memory { warm: resident(kiyot.pid()), ..Memory::default() };

        let watcher = tokio::spawn(watcher::watch(Arc::clone(&self.shared), kiyot.kubelet().await));
        let callers: Vec<_> = (0..CALLERS)
            .map(|caller| {
                let (shared, kubelet, plan) =
                    (Arc::clone(&self.shared), kubelet.clone(), self.plan);
                let runtime = Handle::current();
                // The caller reads and writes files: it gets a blocking thread.
                spawn_blocking(move || {
                    runtime.block_on(caller::drive_pods(shared, kubelet, plan, caller));
                })
            })
            .collect();
        let begun = Instant::now();
        let strikes = self.kill_loop(&node, &mut kiyot, length, &mut memory, &callers).await;
        let elapsed = begun.elapsed();
        self.shared.over.store(true, Ordering::SeqCst);
        self.join_callers(callers).await;
        assert!(!watcher.is_finished(), "the watcher has ended");
        watcher.abort();
        self.assert_no_findings();

        kiyot.reload(WARM, NOT_WARM).await;
        let remains = remains_of(&node, &kiyot, (&networks, &shims), &before).await;
        memory.last = resident(kiyot.pid());
        memory.most = memory.most.max(memory.last);
        witness.finish(&self.shared).await;
        assert!(kiyot.stop().await.success(), "the daemon stops");
        let records_left = records(&kiyot);
        self.print_summary(elapsed, strikes, &memory, &remains);
        self.assert_no_findings();
        let differences = &remains.differences;
        assert!(differences.is_empty(), "SEED={} left: {differences:#?}", self.seed);
        assert_eq!(records_left, records_before, "SEED={}: records are left", self.seed);
        assert!(
            memory.last <= memory.warm + MAX_GROWTH_KIB,
            "SEED={}: the daemon's memory is {memory:?} KiB",
            self.seed
        );
        drop(kiyot);
        let left = node.stop();
        assert!(left.is_empty(), "left:\n{left}");
    }

    /// Runs a pod on the node and a pod in a cell, so that the first inventory includes lazily
    /// created state.
    async fn warm_up(&self, kubelet: &Kubelet) {
        self.shared.over.store(true, Ordering::SeqCst);
        for place in [Place::Node, Place::CellByAnnotation] {
            Caller::of(&self.shared, kubelet, self.plan.undisturbed_pod(0, place)).drive().await;
        }
        self.shared.over.store(false, Ordering::SeqCst);
        self.assert_no_findings();
    }

    /// Kills processes by the plan until the time is over. Returns the number of kills.
    async fn kill_loop(
        &self,
        node: &Node,
        kiyot: &mut Kiyot<'_>,
        length: Duration,
        memory: &mut Memory,
        callers: &[JoinHandle<()>],
    ) -> u64 {
        let begun = Instant::now();
        let mut told = begun;
        let mut number = 0;
        while begun.elapsed() < length && self.shared.findings().is_empty() {
            if callers.iter().any(JoinHandle::is_finished) {
                break;
            }
            let kill = self.plan.kill(number);
            // The plan has the moment of the kill: this is not a wait for a condition.
            tokio::time::sleep(kill.after).await;
            memory.most = memory.most.max(resident(kiyot.pid()));
            let what = self.kill(node, kiyot, kill).await;
            eprintln!("strike {number}, after {:?}: {what}", kill.after);
            number += 1;
            if told.elapsed() > PROGRESS_PERIOD {
                told = Instant::now();
                let minutes = begun.elapsed().as_secs() / 60;
                eprintln!("minute {minutes}: {}", self.figures(resident(kiyot.pid())));
                // The ids of the cells are in the log only until it is truncated.
                own_logged_cells(node, kiyot);
                bound_logs(node);
            }
        }
        number
    }

    async fn kill(&self, node: &Node, kiyot: &mut Kiyot<'_>, kill: Kill) -> String {
        let cells = kiyot.cells();
        let cell = (!cells.is_empty()).then(|| cells[kill.cell % cells.len()].clone());
        let cell = cell.as_deref();
        let words = match (kill.victim, cell) {
            (Target::Agent, Some(cell)) => vec!["kiyot-cell agent", cell],
            (Target::CellContainerd, Some(cell)) => vec!["containerd", "containerd.toml", cell],
            (Target::Cell, Some(cell)) => vec!["kiyot-cell launch", cell],
            (Target::Agent | Target::CellContainerd | Target::Cell, None) => {
                return format!("no cell for {:?}", kill.victim);
            }
            (Target::Daemon, _) => {
                self.shared.count_kill(kill.victim);
                kiyot.kill9();
                kiyot.start_again().await;
                return "the daemon".to_owned();
            }
            (Target::NodeContainerd, _) => {
                let _none_changes = self.shared.node_lock.write().await;
                self.shared.count_kill(kill.victim);
                node.kill_containerd();
                node.start_containerd().await;
                return "the node's containerd".to_owned();
            }
        };
        // The process may be absent: a cell may be starting or ending.
        self.shared.count_kill(kill.victim);
        let pids = processes(&words);
        kill_all(&pids);
        format!("{:?} of {} ({} processes)", kill.victim, cell.unwrap_or_default(), pids.len())
    }

    /// Waits until the callers have removed their last pods.
    async fn join_callers(&self, callers: Vec<JoinHandle<()>>) {
        wait_until(format!("the callers end (SEED={})", self.seed), CALLERS_LIMIT, async || {
            callers.iter().all(JoinHandle::is_finished).then_some(())
        })
        .await;
        for caller in callers {
            caller.await.unwrap();
        }
    }

    fn figures(&self, resident: u64) -> String {
        let of = |number: &std::sync::atomic::AtomicU64| number.load(Ordering::Relaxed);
        let shared = &self.shared;
        format!(
            "{} pods, {} refusals, {} calls, {} of them failed, kills {:?}, \
             {resident} KiB resident",
            of(&shared.pods),
            of(&shared.refused),
            of(&shared.calls),
            of(&shared.failed),
            shared.kills()
        )
    }

    fn print_summary(&self, elapsed: Duration, strikes: u64, memory: &Memory, remains: &Remains) {
        let mut text = format!("SEED={}: {} s, {strikes} strikes\n", self.seed, elapsed.as_secs());
        let _ = writeln!(text, "  {}", self.figures(memory.last));
        let _ = writeln!(text, "  resident, KiB: {memory:?}");
        let _ = writeln!(
            text,
            "  left: {}; left by the node's containerd: {} tasks, chains of {} sandboxes, \
             {} sockets",
            remains.differences.len(),
            remains.tasks,
            remains.chains,
            remains.sockets
        );
        eprint!("{text}");
    }

    fn assert_no_findings(&self) {
        let findings = self.shared.findings();
        assert!(
            findings.is_empty(),
            "SEED={} found, in this order:\n{}",
            self.seed,
            findings.join("\n")
        );
    }
}

/// Takes inventories until two in a row are equal, and returns the last.
async fn settled(node: &Node, kiyot: &Kiyot<'_>) -> Inventory {
    let begun = Instant::now();
    let mut last = Inventory::of(node, kiyot);
    loop {
        tokio::time::sleep(INVENTORY_PERIOD).await;
        let now = Inventory::of(node, kiyot);
        let is_settled = last.differences(&now).is_empty() && now.differences(&last).is_empty();
        if is_settled || begun.elapsed() >= LIMIT {
            return now;
        }
        last = now;
    }
}

/// Takes inventories until an inventory equals `before`, and returns the last remains.
async fn remains_of(
    node: &Node,
    kiyot: &Kiyot<'_>,
    (networks, shims): (&NetworkRecorder, &ShimRecorder),
    before: &Inventory,
) -> Remains {
    let begun = Instant::now();
    loop {
        tokio::time::sleep(INVENTORY_PERIOD).await;
        let differences = before.differences(&Inventory::of(node, kiyot));
        let remains =
            Remains::of(node.directory(), &networks.owners(), &shims.sockets(), differences);
        if remains.differences.is_empty() || begun.elapsed() >= LIMIT {
            return remains;
        }
    }
}

/// Truncates logs longer than [`MAX_LOG_BYTES`]. One earlier part is kept in a second file.
fn bound_logs(node: &Node) {
    for log in ["containerd.log", "kiyot/kiyot.log"] {
        let path = node.directory().join(log);
        let too_long =
            std::fs::metadata(&path).is_ok_and(|metadata| metadata.len() > MAX_LOG_BYTES);
        if too_long {
            let _ = std::fs::copy(&path, path.with_extension("log.before"));
            // The writer appends: it continues at the start of the truncated file.
            let _ =
                std::fs::File::options().write(true).open(&path).and_then(|file| file.set_len(0));
        }
    }
}
