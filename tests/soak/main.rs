//! The soak: pods of random shape are made, changed and removed by several callers at once, while
//! the daemon, agents, cells and containerds are killed at random moments. In the end nothing is
//! left. `make soak SECONDS=n SEED=s` runs it for longer; a minute of it is in the suite.
//!
//! The test needs root and namespaces of its own, which cargo's runner gives it (scripts/runner).
//! It is a binary of its own so that all that is on its host is its own, and can be compared.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "what a test can't set up fails the test, at the place"
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
use inventory::{Inventory, records, resident};
use plan::{CALLERS, Place, Plan, Strike, Victim};
use shared::Shared;

mod caller;
mod inventory;
mod plan;
mod shape;
mod shared;
mod watcher;
mod witness;

/// How long it storms, in seconds; `SOAK_SECONDS` in the environment says another number.
const SECONDS: u64 = 60;
/// Between two lines of progress.
const PROGRESS: Duration = Duration::from_secs(60);
/// How long the callers may take when it is calm, for all that they still do.
const CALM_LIMIT: Duration = Duration::from_secs(900);
/// The most that the daemon's memory may grow after the warm-up, in KiB.
const MAX_GROWTH_KIB: u64 = 32 * 1024;
/// How long a log file of a daemon may grow, in bytes; then its beginning goes.
const MAX_LOG: u64 = 64 << 20;

/// Verifies X13, Y2, Y6.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_of_random_shape_outlive_random_kills_and_leave_nothing() {
    let seconds = std::env::var("SOAK_SECONDS").ok().filter(|text| !text.is_empty());
    let seconds =
        seconds.map_or(SECONDS, |text| text.parse().expect("SOAK_SECONDS is a number of seconds"));
    let seed = seed();
    let soak = Soak { plan: Plan::of(seed), seed, shared: Arc::default() };
    Box::pin(soak.run(Duration::from_secs(seconds))).await;
}

/// A soak.
struct Soak {
    plan: Plan,
    seed: u64,
    shared: Arc<Shared>,
}

/// Figures of the daemon's memory, in KiB.
#[derive(Debug, Default)]
struct Memory {
    warm: u64,
    most: u64,
    last: u64,
}

impl Soak {
    async fn run(&self, length: Duration) {
        let node = Node::start_for_long().await;
        let mut kiyot = Kiyot::start(&node, KiyotOptions::new(env!("CARGO_BIN_EXE_kiyot"))).await;
        self.warms_up(&kiyot.kubelet().await).await;
        assert!(kiyot.stop().await.success(), "the daemon stops");
        let records_before = records(&kiyot);
        kiyot.start_again().await;
        let kubelet = kiyot.kubelet().await;
        let witness = witness::Witness::begin(&self.shared, kubelet.clone()).await;
        self.warms_up(&kubelet).await;
        let before = self.settled(&node, &kiyot, None).await;
        let mut memory = Memory { warm: resident(kiyot.pid()), ..Memory::default() };

        let watcher = tokio::spawn(watcher::watch(Arc::clone(&self.shared), kiyot.kubelet().await));
        let callers: Vec<_> = (0..CALLERS)
            .map(|caller| {
                let (shared, kubelet, plan) =
                    (Arc::clone(&self.shared), kubelet.clone(), self.plan);
                let runtime = Handle::current();
                // A thread of its own, as it reads and writes files.
                spawn_blocking(move || {
                    runtime.block_on(caller::lead(shared, kubelet, plan, caller));
                })
            })
            .collect();
        let begun = Instant::now();
        let strikes = self.storms(&node, &mut kiyot, length, &mut memory, &callers).await;
        let stormed = begun.elapsed();
        self.shared.calm.store(true, Ordering::SeqCst);
        self.calms_down(callers).await;
        assert!(!watcher.is_finished(), "the watcher watches");
        watcher.abort();
        self.fails_on_findings();

        let left = self.settled(&node, &kiyot, Some(&before)).await;
        let (stranded, differences) =
            inventory::without_stranded(node.directory(), before.differences(&left));
        memory.last = resident(kiyot.pid());
        memory.most = memory.most.max(memory.last);
        witness.ends(&self.shared).await;
        assert!(kiyot.stop().await.success(), "the daemon stops");
        let records_left = records(&kiyot);
        self.sums_up(stormed, strikes, &memory, &differences, stranded);
        self.fails_on_findings();
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

    /// Runs a pod on the node and one in a cell, so that whatever is made once is there.
    async fn warms_up(&self, kubelet: &Kubelet) {
        self.shared.calm.store(true, Ordering::SeqCst);
        for place in [Place::Node, Place::CellByAnnotation] {
            Caller::of(&self.shared, kubelet, self.plan.calm_life(0, place)).live().await;
        }
        self.shared.calm.store(false, Ordering::SeqCst);
        self.fails_on_findings();
    }

    /// Looks until no difference to an earlier look is left, or until two looks are the same.
    async fn settled(
        &self,
        node: &Node,
        kiyot: &Kiyot<'_>,
        before: Option<&Inventory>,
    ) -> Inventory {
        let begun = Instant::now();
        let mut last = Inventory::of(node, kiyot);
        while begun.elapsed() < LIMIT {
            tokio::time::sleep(Duration::from_secs(1)).await;
            let now = Inventory::of(node, kiyot);
            let settled = match before {
                Some(before) => {
                    inventory::without_stranded(node.directory(), before.differences(&now))
                        .1
                        .is_empty()
                }
                None => last.differences(&now).is_empty() && now.differences(&last).is_empty(),
            };
            last = now;
            if settled {
                break;
            }
        }
        last
    }

    /// Kills by the plan until the time is over. Returns how many kills there were.
    async fn storms(
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
            let strike = self.plan.strike(number);
            // Not to wait for something: the moment is what is tried.
            tokio::time::sleep(strike.after).await;
            memory.most = memory.most.max(resident(kiyot.pid()));
            let what = self.strikes(node, kiyot, strike).await;
            eprintln!("strike {number}, after {:?}: {what}", strike.after);
            number += 1;
            if told.elapsed() > PROGRESS {
                told = Instant::now();
                let minutes = begun.elapsed().as_secs() / 60;
                eprintln!("minute {minutes}: {}", self.figures(resident(kiyot.pid())));
                // Before the log is cut, its cells become the node's.
                let _known = Inventory::of(node, kiyot);
                bound_logs(node);
            }
        }
        number
    }

    async fn strikes(&self, node: &Node, kiyot: &mut Kiyot<'_>, strike: Strike) -> String {
        let cells = kiyot.cells();
        let cell = (!cells.is_empty()).then(|| cells[strike.cell % cells.len()].clone());
        let cell = cell.as_deref();
        let words = match (strike.victim, cell) {
            (Victim::Agent, Some(cell)) => vec!["kiyot-cell agent", cell],
            (Victim::CellContainerd, Some(cell)) => vec!["containerd", "containerd.toml", cell],
            (Victim::Cell, Some(cell)) => vec!["kiyot-cell launch", cell],
            (Victim::Agent | Victim::CellContainerd | Victim::Cell, None) => {
                return format!("no cell is there for {:?}", strike.victim);
            }
            (Victim::Daemon, _) => {
                self.shared.kills_one(strike.victim);
                kiyot.kill9();
                kiyot.start_again().await;
                return "the daemon".to_owned();
            }
            (Victim::NodeContainerd, _) => {
                let _none_changes = self.shared.of_node.write().await;
                self.shared.kills_one(strike.victim);
                node.kill_containerd();
                node.start_containerd().await;
                return "the node's containerd".to_owned();
            }
        };
        // What is there of it: it may just be starting, or ending.
        self.shared.kills_one(strike.victim);
        let pids = processes(&words);
        kill_all(&pids);
        format!("{:?} of {} ({} processes)", strike.victim, cell.unwrap_or_default(), pids.len())
    }

    /// Waits until the callers have led their last pods.
    async fn calms_down(&self, callers: Vec<JoinHandle<()>>) {
        wait_until(
            format!("the callers have ended (SEED={})", self.seed),
            CALM_LIMIT,
            async || callers.iter().all(JoinHandle::is_finished).then_some(()),
        )
        .await;
        for caller in callers {
            caller.await.unwrap();
        }
    }

    fn figures(&self, resident: u64) -> String {
        let of = |number: &std::sync::atomic::AtomicU64| number.load(Ordering::Relaxed);
        let shared = &self.shared;
        format!(
            "{} pods, {} refusals, {} calls, {} of them failed, kills {:?}, {resident} KiB resident",
            of(&shared.pods),
            of(&shared.refused),
            of(&shared.calls),
            of(&shared.failed),
            shared.kills()
        )
    }

    fn sums_up(
        &self,
        stormed: Duration,
        strikes: u64,
        memory: &Memory,
        differences: &[String],
        stranded: usize,
    ) {
        let mut text = format!("SEED={}: {} s, {strikes} strikes\n", self.seed, stormed.as_secs());
        let _ = writeln!(text, "  {}", self.figures(memory.last));
        let _ = writeln!(text, "  resident, KiB: {memory:?}");
        let _ = writeln!(
            text,
            "  left: {}; tasks that the node's containerd has forgotten: {stranded}",
            differences.len()
        );
        eprint!("{text}");
    }

    fn fails_on_findings(&self) {
        let findings = self.shared.findings();
        assert!(
            findings.is_empty(),
            "SEED={} found, in this order:\n{}",
            self.seed,
            findings.join("\n")
        );
    }
}

/// Keeps the logs of a long soak from filling the disk: of one that is too long, the rest goes to
/// a second file, which is replaced each time.
fn bound_logs(node: &Node) {
    for log in ["containerd.log", "kiyot/kiyot.log"] {
        let path = node.directory().join(log);
        let too_long = std::fs::metadata(&path).is_ok_and(|metadata| metadata.len() > MAX_LOG);
        if too_long {
            let _ = std::fs::copy(&path, path.with_extension("log.before"));
            // Who writes appends, and goes on at the beginning.
            let _ =
                std::fs::File::options().write(true).open(&path).and_then(|file| file.set_len(0));
        }
    }
}
