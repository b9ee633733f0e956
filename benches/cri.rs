//! Benchmark of kiyot and of other forwarders in the same run: one private containerd, one client,
//! interleaved rounds. `make bench` runs it; docs/performance.md has the goals, docs/reports the
//! results.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a failed setup fails the bench")]

use std::path::{Path, PathBuf};

use clap::{Parser, ValueEnum};
use kiyot_testkit::{Container, Node, Pod, Provider};

mod cri {
    pub(crate) mod batches;
    pub(crate) mod beside;
    pub(crate) mod calls;
    pub(crate) mod client;
    pub(crate) mod concurrent;
    pub(crate) mod density;
    pub(crate) mod forwarders;
    pub(crate) mod instances;
    pub(crate) mod loaded_link;
    pub(crate) mod logs;
    pub(crate) mod operator;
    pub(crate) mod placement;
    pub(crate) mod ratios;
    pub(crate) mod startup;
    pub(crate) mod streams;
    pub(crate) mod vms;
    pub(crate) mod volumes;
}

/// Parts that run by default. The parts of EC2 need its SDK.
const DEFAULT_PARTS: &str = if cfg!(feature = "ec2") {
    "placement,calls,operator,cells,batches,logs,streams,busy,volumes,density,vms,instances,\
     ec2-density"
} else {
    "placement,calls,operator,cells,batches,logs,streams,busy,volumes,density,vms"
};

/// Options of the benchmark.
#[derive(Debug, Parser)]
struct Options {
    /// Parts to run.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = DEFAULT_PARTS
    )]
    parts: Vec<Part>,
    /// Rounds of the parts `calls`, `operator`, `batches`, `logs` and `streams`.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Calls of a measurement.
    #[arg(long, default_value_t = 2000)]
    calls: usize,
    /// Pods that are started, one after another; in the part `operator`, pods that are listed.
    #[arg(long, default_value_t = 10)]
    cells: usize,
    /// Forwarders to compare.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "direct,kiyot,metrics-off,nginx,haproxy,socat"
    )]
    only: Vec<cri::forwarders::ForwarderKind>,
    /// Virtual machines that are started, one after another.
    #[arg(long, default_value_t = 5)]
    vms: usize,
    /// Pods that start together, on the node and in cells.
    #[arg(long, default_value_t = 30)]
    batch: usize,
    /// Short pods that run twelve at a time, on the node and in cells.
    #[arg(long, default_value_t = 120)]
    short_pods: usize,
    /// Idle virtual machines whose memory is measured.
    #[arg(long, default_value_t = 20)]
    idle_vms: usize,
    /// Pods that start together on instances of EC2.
    #[arg(long, default_value_t = 50)]
    together: usize,
    /// Another build of the daemon, with its `kiyot-cell` beside it. The part `calls` measures both
    /// in interleaved rounds, the other parts one after the other.
    #[arg(long)]
    baseline: Option<PathBuf>,
    /// Size of a measured log or stream, in MiB.
    #[arg(long, default_value_t = 64)]
    mib: usize,
    /// ExecSync calls beside each load of a cell's link.
    #[arg(long, default_value_t = 100)]
    execs: usize,
    /// Measured updates of a volume.
    #[arg(long, default_value_t = 50)]
    updates: usize,
    /// Cells of the parts `density` and `ec2-density`.
    #[arg(long, alias = "crowd", default_value_t = 1000)]
    density: usize,
    /// Lists of a measurement of the parts `density` and `ec2-density`.
    #[arg(long, default_value_t = 400)]
    lists: usize,
    /// Runs this process as the agents of this many cells in these directories.
    #[arg(long, hide = true, requires_all = ["agents_spool", "agents_cells"])]
    agents: Option<usize>,
    #[arg(long, hide = true)]
    agents_spool: Option<PathBuf>,
    #[arg(long, hide = true)]
    agents_cells: Option<PathBuf>,
    /// Flag that cargo passes to each bench.
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    Placement,
    Calls,
    Operator,
    Cells,
    Batches,
    Logs,
    Streams,
    Busy,
    Volumes,
    #[value(alias = "crowd")]
    Density,
    Vms,
    Instances,
    Ec2Density,
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let options = Options::parse();
    if let (Some(count), Some(spool), Some(cells)) =
        (options.agents, &options.agents_spool, &options.agents_cells)
    {
        return cri::density::agents::run(spool, cells, count).await;
    }
    if options.parts.contains(&Part::Placement) {
        cri::placement::measure();
    }
    let measured_apart = [Part::Placement, Part::Calls];
    if options.parts.iter().all(|part| *part == Part::Placement) {
        return;
    }
    let node = Node::start_for_long().await;
    if options.parts.contains(&Part::Calls) {
        let mut kubelet = node.kubelet(&node.socket()).await.unwrap();
        let pod = Pod::new("resident").container(Container::script("main", "sleep 100000"));
        let running = kubelet.run_pod(&pod).await.expect("a pod runs on the node");
        let forwarders =
            cri::forwarders::start(&node, &options.only, options.baseline.as_deref()).await;
        cri::calls::measure(&forwarders, &running.sandbox, options.rounds, options.calls).await;
        forwarders.iter().for_each(cri::forwarders::Forwarder::print_memory);
        drop(forwarders);
        kubelet.stop_and_remove(&running).await.expect("a pod ends");
    }
    let this_build = PathBuf::from(env!("CARGO_BIN_EXE_kiyot"));
    for part in options.parts.iter().filter(|part| !measured_apart.contains(part)) {
        for program in std::iter::once(&this_build).chain(&options.baseline) {
            if options.baseline.is_some() {
                println!("\n{}:", program.display());
            }
            measure(*part, &options, &node, program).await;
        }
    }
    let left = node.stop();
    assert!(left.is_empty(), "left on the host:\n{left}");
}

/// Measures a part of a build of the daemon.
async fn measure(part: Part, options: &Options, node: &Node, program: &Path) {
    match part {
        Part::Placement | Part::Calls => {}
        Part::Operator => {
            let Options { rounds, calls, cells, .. } = *options;
            cri::operator::measure(node, program, rounds, calls, cells).await;
        }
        Part::Cells => {
            cri::startup::measure(node, program, Provider::Netns, options.cells).await;
        }
        Part::Batches => {
            let batches = cri::batches::Batches {
                together: options.batch,
                short: options.short_pods,
                rounds: options.rounds,
            };
            cri::batches::measure(node, program, batches).await;
        }
        Part::Logs => cri::logs::measure(node, program, options.rounds, options.mib).await,
        Part::Streams => cri::streams::measure(node, program, options.rounds, options.mib).await,
        Part::Busy => cri::loaded_link::measure(node, program, options.execs).await,
        Part::Volumes => cri::volumes::measure(node, program, options.updates).await,
        Part::Density => {
            let world = cri::density::World::of_netns(node, program);
            cri::density::measure(node, world, options.density, options.lists).await;
        }
        Part::Instances => {
            cri::instances::measure(node, program, options.cells, options.together).await;
        }
        Part::Ec2Density => {
            let world = cri::density::World::of_ec2(node, program).await;
            cri::density::measure(node, world, options.density, options.lists).await;
        }
        Part::Vms => {
            cri::startup::measure(node, program, Provider::Qemu, options.vms).await;
            cri::vms::measure(node, program, options.idle_vms).await;
        }
    }
}
