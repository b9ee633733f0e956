//! Latency and rate of calls of the node, through each forwarder.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use kiyot_testkit::cri;
use tokio::task::JoinSet;

use super::{
    client::{Call, Client},
    forwarders::Forwarder,
    ratios::Ratios,
};

/// Numbers of concurrent callers on a connection.
pub(crate) const CALLERS: [usize; 2] = [1, 16];

/// Pairs of forwarders that are compared round by round: the daemon with and without metrics, and
/// this build and another build.
const PAIRS: [[&str; 2]; 2] = [["kiyot", "metrics-off"], ["kiyot", "baseline"]];

/// Times of one call through one forwarder.
#[derive(Debug, Default)]
pub(crate) struct Times {
    each: Vec<Duration>,
    whole: Duration,
    /// The median of each round, in microseconds.
    pub(crate) medians: Vec<f64>,
}

impl Times {
    /// Returns a quantile of all rounds, in microseconds.
    pub(crate) fn quantile(&mut self, part: f64) -> f64 {
        self.each.sort_unstable();
        quantile(&self.each, part)
    }
}

/// Returns a quantile of sorted times, in microseconds.
pub(crate) fn quantile(sorted: &[Duration], part: f64) -> f64 {
    let at = ((sorted.len() - 1) as f64 * part).round() as usize;
    sorted[at].as_secs_f64() * 1e6
}

/// Measures in interleaved rounds, and prints a table.
pub(crate) async fn measure(
    forwarders: &[Forwarder<'_>],
    sandbox: &str,
    rounds: usize,
    calls: usize,
) {
    let methods = [
        Call::new("Version", &cri::VersionRequest::default()),
        Call::new(
            "PodSandboxStatus",
            &cri::PodSandboxStatusRequest { pod_sandbox_id: sandbox.to_owned(), verbose: false },
        ),
        Call::new("ListPodSandbox", &cri::ListPodSandboxRequest::default()),
    ];
    println!("| call | callers | path | p50 us | p99 us | calls/s | p50 to direct |");
    println!("| --- | --- | --- | --- | --- | --- | --- |");
    let mut compared = Vec::new();
    for method in &methods {
        for callers in CALLERS {
            let mut times: Vec<Times> = forwarders.iter().map(|_| Times::default()).collect();
            for round in 0..rounds {
                // Rounds begin with different forwarders, so that the predecessor varies.
                for turn in 0..forwarders.len() {
                    let at = (round + turn) % forwarders.len();
                    let Forwarder { socket, name, .. } = &forwarders[at];
                    run(socket, name, method, callers, calls, &mut times[at]).await;
                }
            }
            let place = |name: &str| forwarders.iter().position(|it| it.name == name);
            let direct = place("direct").map(|at| times[at].quantile(0.5));
            for [name, other] in PAIRS {
                if let (Some(row), Some(other_row)) = (place(name), place(other)) {
                    let ratios = Ratios::of(&times[row].medians, &times[other_row].medians);
                    let method = method.name;
                    compared
                        .push(format!("| {method} | {callers} | {name} to {other} | {ratios} |"));
                }
            }
            for (forwarder, times) in forwarders.iter().zip(&mut times) {
                let (p50, p99, rate) = (
                    times.quantile(0.5),
                    times.quantile(0.99),
                    times.each.len() as f64 / times.whole.as_secs_f64(),
                );
                let ratio =
                    direct.map_or_else(String::new, |direct| format!("{:.2}", p50 / direct));
                println!(
                    "| {} | {callers} | {} | {p50:.0} | {p99:.0} | {rate:.0} | {ratio} |",
                    method.name, forwarder.name
                );
            }
        }
    }
    if !compared.is_empty() {
        println!("\n| call | callers | p50 of | median of {rounds} rounds | least | greatest |");
        println!("| --- | --- | --- | --- | --- | --- |");
        compared.iter().for_each(|row| println!("{row}"));
    }
}

/// Makes the calls of a round through a forwarder, by its socket.
pub(crate) async fn run(
    socket: &Path,
    forwarder: &'static str,
    method: &Call,
    callers: usize,
    calls: usize,
    times: &mut Times,
) {
    let client =
        Client::connect(socket).await.unwrap_or_else(|| panic!("{forwarder} takes no connection"));
    let share = calls.div_ceil(callers);
    // Warm-up.
    callers_at_once(&client, method, callers, share / 10 + 1, forwarder).await;
    let begun = Instant::now();
    let mut each = callers_at_once(&client, method, callers, share, forwarder).await;
    times.whole += begun.elapsed();
    each.sort_unstable();
    times.medians.push(quantile(&each, 0.5));
    times.each.append(&mut each);
}

/// Makes calls over one connection, and returns their times.
pub(crate) async fn callers_at_once(
    client: &Client,
    method: &Call,
    callers: usize,
    calls: usize,
    forwarder: &'static str,
) -> Vec<Duration> {
    let mut tasks = JoinSet::new();
    for _ in 0..callers {
        let (mut client, method) = (client.clone(), method.clone());
        tasks.spawn(async move {
            let mut times = Vec::with_capacity(calls);
            for _ in 0..calls {
                let begun = Instant::now();
                client
                    .call(&method)
                    .await
                    .unwrap_or_else(|| panic!("{} through {forwarder} failed", method.name));
                times.push(begun.elapsed());
            }
            times
        });
    }
    tasks.join_all().await.concat()
}
