//! Latency and rate of calls of the node, through each forwarder.

use std::time::{Duration, Instant};

use kiyot_testkit::cri;
use tokio::task::JoinSet;

use super::{
    client::{Call, Client},
    forwarders::Forwarder,
};

/// Numbers of concurrent callers on a connection.
pub(crate) const CALLERS: [usize; 2] = [1, 16];

/// Times of one call through one forwarder.
#[derive(Debug, Default)]
struct Times {
    each: Vec<Duration>,
    whole: Duration,
}

impl Times {
    fn quantile(&self, part: f64) -> f64 {
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
    for method in &methods {
        for callers in CALLERS {
            let mut times: Vec<Times> = forwarders.iter().map(|_| Times::default()).collect();
            for round in 0..rounds {
                // Rounds begin with different forwarders, so that the predecessor varies.
                for turn in 0..forwarders.len() {
                    let at = (round + turn) % forwarders.len();
                    run(&forwarders[at], method, callers, calls, &mut times[at]).await;
                }
            }
            times.iter_mut().for_each(|times| times.each.sort_unstable());
            let direct = forwarders
                .iter()
                .position(|forwarder| forwarder.name == "direct")
                .map(|at| times[at].quantile(0.5));
            for (forwarder, times) in forwarders.iter().zip(&times) {
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
}

async fn run(
    forwarder: &Forwarder<'_>,
    method: &Call,
    callers: usize,
    calls: usize,
    times: &mut Times,
) {
    let client = Client::connect(&forwarder.socket)
        .await
        .unwrap_or_else(|| panic!("{} takes no connection", forwarder.name));
    let share = calls.div_ceil(callers);
    // Warm-up.
    callers_at_once(&client, method, callers, share / 10 + 1, forwarder.name).await;
    let begun = Instant::now();
    times.each.extend(callers_at_once(&client, method, callers, share, forwarder.name).await);
    times.whole += begun.elapsed();
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
