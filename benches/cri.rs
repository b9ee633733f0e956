//! What kiyot costs, and what other forwarders cost in the same run: one private containerd, one
//! client, and rounds that take turns. `make bench` runs it; docs/performance.md keeps the last
//! table.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a bench that can't measure has nothing else to do"
)]

use std::path::PathBuf;

use clap::{Parser, ValueEnum};
use kiyot_testkit::{Container, Node, Pod};

mod cri {
    pub(crate) mod busy;
    pub(crate) mod calls;
    pub(crate) mod cells;
    pub(crate) mod client;
    pub(crate) mod crowd;
    pub(crate) mod logs;
    pub(crate) mod paths;
    pub(crate) mod streams;
    pub(crate) mod volumes;
}

/// What to measure.
#[derive(Debug, Parser)]
struct Options {
    /// The parts to run.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "calls,cells,logs,streams,busy,volumes,crowd"
    )]
    parts: Vec<Part>,
    /// How often each measurement of calls, logs and streams is repeated, in turns.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// How many calls one measurement makes.
    #[arg(long, default_value_t = 2000)]
    calls: usize,
    /// How many cells are started, one after another.
    #[arg(long, default_value_t = 10)]
    cells: usize,
    /// The paths to containerd that are compared.
    #[arg(long, value_delimiter = ',', default_value = "direct,kiyot,nginx,haproxy,socat")]
    only: Vec<cri::paths::Kind>,
    /// How many MiB a log or a stream has that is measured.
    #[arg(long, default_value_t = 64)]
    mib: usize,
    /// How many programs are run beside each load of a cell's link.
    #[arg(long, default_value_t = 100)]
    execs: usize,
    /// How many updates of a volume are timed.
    #[arg(long, default_value_t = 50)]
    updates: usize,
    /// How many cells the crowd has.
    #[arg(long, default_value_t = 1000)]
    crowd: usize,
    /// How many lists of the crowd one measurement asks for.
    #[arg(long, default_value_t = 400)]
    lists: usize,
    /// The process is one that plays agents: so many, of the cells in these directories.
    #[arg(long, hide = true, requires_all = ["agents_spool", "agents_cells"])]
    agents: Option<usize>,
    #[arg(long, hide = true)]
    agents_spool: Option<PathBuf>,
    #[arg(long, hide = true)]
    agents_cells: Option<PathBuf>,
    /// Cargo says it to every bench.
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    Calls,
    Cells,
    Logs,
    Streams,
    Busy,
    Volumes,
    Crowd,
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let options = Options::parse();
    if let (Some(most), Some(spool), Some(cells)) =
        (options.agents, &options.agents_spool, &options.agents_cells)
    {
        return cri::crowd::agents::play(spool, cells, most).await;
    }
    let node = Node::start_for_long().await;
    if options.parts.contains(&Part::Calls) {
        let mut kubelet = node.kubelet(&node.socket()).await.unwrap();
        let pod = Pod::new("resident").container(Container::script("main", "sleep 100000"));
        let running = kubelet.run_pod(&pod).await.expect("a pod runs on the node");
        let paths = cri::paths::start(&node, &options.only).await;
        cri::calls::measure(&paths, &running.sandbox, options.rounds, options.calls).await;
        paths.iter().for_each(cri::paths::Path::print_memory);
        drop(paths);
        kubelet.stop_and_remove(&running).await.expect("a pod ends");
    }
    if options.parts.contains(&Part::Cells) {
        cri::cells::measure(&node, options.cells).await;
    }
    if options.parts.contains(&Part::Logs) {
        cri::logs::measure(&node, options.rounds, options.mib).await;
    }
    if options.parts.contains(&Part::Streams) {
        cri::streams::measure(&node, options.rounds, options.mib).await;
    }
    if options.parts.contains(&Part::Busy) {
        cri::busy::measure(&node, options.execs).await;
    }
    if options.parts.contains(&Part::Volumes) {
        cri::volumes::measure(&node, options.updates).await;
    }
    if options.parts.contains(&Part::Crowd) {
        cri::crowd::measure(&node, options.crowd, options.lists).await;
    }
    let left = node.stop();
    assert!(left.is_empty(), "left:\n{left}");
}
