use std::collections::BTreeSet;

use crate::{bug::Bug, *};

/// A small, dense day.
fn dense(seed: u64) -> SimulationOptions {
    SimulationOptions {
        seed,
        workload: Workload::Random { pods: 12, duration: Duration::from_secs(2 * 3600) },
        faults: Faults::DENSE,
        bug: None,
    }
}

#[test]
fn world_without_faults_runs_every_pod_once() {
    let (mut warm_starts, mut without_pools) = (0, 0);
    for seed in 0..20 {
        let options = SimulationOptions { faults: Faults::NONE, ..dense(seed) };
        let report = simulate(&options, None);
        assert_eq!(report.violations, Vec::<String>::new());
        assert_eq!((report.pods_run, report.crashes), (12, 0));
        warm_starts += report.usage.warm_starts;
        without_pools += u64::from(report.instances == 12);
    }
    assert!(warm_starts > 20 && without_pools > 2, "{warm_starts} {without_pools}");
}

/// A refused pod has one planned run at a time.
#[test]
fn pods_of_a_full_node_are_run_at_the_pace_of_the_kubelet() {
    for seed in 0..6 {
        let workload = Workload::Random { pods: 300, duration: Duration::from_secs(3600) };
        let options = SimulationOptions { workload, faults: Faults::NONE, ..dense(seed) };
        let report = simulate(&options, None);
        assert_eq!(report.violations, Vec::<String>::new());
        assert!(report.events < 300 * 200, "seed {seed}: {} events", report.events);
    }
}

#[test]
fn cost_of_instances_is_what_the_daemon_counts() {
    for seed in 0..20 {
        let options = SimulationOptions { faults: Faults::NONE, ..dense(seed) };
        let usage = simulate(&options, None).usage;
        let counted: u64 = usage.namespaces.values().map(|cost| cost.micros()).sum();
        // Replies to launches and the evidence of ends arrive some time later.
        let difference = usage.cost.micros().abs_diff(counted) as f64;
        assert!(difference < usage.cost.micros() as f64 * 0.1, "seed {seed}: {usage:?}");
    }
}

#[test]
fn same_seed_makes_the_same_trace() {
    for seed in 0..10 {
        let (mut first, mut second) = (Vec::new(), Vec::new());
        let options = dense(seed);
        let reports = [simulate(&options, Some(&mut first)), simulate(&options, Some(&mut second))];
        assert!(first == second, "the traces of seed {seed} differ");
        assert_eq!(reports[0], reports[1]);
        assert_ne!(reports[0].trace_sha256, simulate(&dense(seed + 1), None).trace_sha256);
    }
}

#[test]
fn dense_days_play_every_fault() {
    let mut played = BTreeSet::new();
    for seed in 0..30 {
        played.extend(simulate(&dense(seed), None).faults.into_keys());
    }
    assert_eq!(played, Faults::NAMES.iter().copied().collect());
}

#[test]
fn each_fault_alone_is_played_without_a_violation() {
    for name in Faults::NAMES {
        let mut played = 0;
        for seed in 0..40 {
            let options = SimulationOptions { faults: Faults::only(name), ..dense(seed) };
            let report = simulate(&options, None);
            assert!(report.violations.is_empty(), "{name}: {}", explained(&options));
            assert!(report.faults.keys().all(|fault| fault == name), "{name}: {report:?}");
            played += report.faults.get(name).copied().unwrap_or_default();
            if played > 0 && seed > 2 {
                break;
            }
        }
        assert!(played > 0, "{name} was not played");
    }
}

#[test]
fn scarce_world_launches_the_next_candidate() {
    let mut next = 0;
    for seed in 0..10 {
        let options = SimulationOptions { faults: Faults::only("scarce"), ..dense(seed) };
        let mut trace = Vec::new();
        simulate(&options, Some(&mut trace));
        let trace = String::from_utf8(trace).unwrap();
        next += trace.lines().filter(|line| line.ends_with("has its next candidate")).count();
    }
    assert!(next > 0, "no launch was repeated without what was refused");
}

#[test]
fn cell_that_no_pod_wants_joins_a_pool_on_one_of_many_days() {
    let joins = |seed: &u64| {
        let mut trace = Vec::new();
        simulate(&dense(*seed), Some(&mut trace));
        String::from_utf8(trace).unwrap().contains("JoinedPool")
    };
    let seed = (0..400).find(joins);
    println!("a cell joins a pool in the world of seed {seed:?}");
    assert!(seed.is_some(), "no cell joined a pool");
}

/// The environment variable `SEEDS` sets the number of days.
#[test]
fn thousand_dense_days_have_no_leak_no_double_and_no_dead_cell() {
    let seeds = std::env::var("SEEDS").map_or(1000, |seeds| seeds.parse().unwrap());
    for seed in 0..seeds {
        let report = simulate(&dense(seed), None);
        assert!(report.violations.is_empty(), "{}", explained(&dense(seed)));
    }
}

/// Returns the violations of a simulation, with the trace lines that name their subjects.
fn explained(options: &SimulationOptions) -> String {
    const MAX_LINES: usize = 80;
    let mut trace = Vec::new();
    let report = simulate(options, Some(&mut trace));
    let text = report.violations.join("\n");
    let is_name = |word: &&str| ["cell-", "pod-", "i-0"].iter().any(|name| word.starts_with(name));
    let names: Vec<&str> = text
        .split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '-')
        .filter(is_name)
        .collect();
    let trace = String::from_utf8(trace).unwrap();
    let lines: Vec<&str> = trace
        .lines()
        .filter(|line| line.contains("daemon ") || names.iter().any(|name| line.contains(name)))
        .take(MAX_LINES)
        .collect();
    format!("seed {}:\n{text}\n{}", options.seed, lines.join("\n"))
}

#[test]
fn planted_bugs_are_found() {
    for bug in Bug::ALL {
        let found = (0..500).find(|seed| {
            let options = SimulationOptions { bug: Some(bug), ..dense(*seed) };
            !simulate(&options, None).violations.is_empty()
        });
        println!("{bug:?} is found by seed {found:?}");
        assert!(found.is_some(), "no seed finds {bug:?}");
    }
}

/// Verifies V104.
#[test]
fn zone_without_a_way_out_pauses_launches_there() {
    let mut pauses = 0;
    for seed in 0..30 {
        let options = SimulationOptions { faults: Faults::only("closed_zone"), ..dense(seed) };
        let mut trace = Vec::new();
        let report = simulate(&options, Some(&mut trace));
        assert!(report.violations.is_empty(), "{}", explained(&options));
        pauses += String::from_utf8(trace).unwrap().matches("LaunchesPaused").count();
    }
    println!("launches pause {pauses} times on 30 days");
    assert!(pauses > 0);
}
