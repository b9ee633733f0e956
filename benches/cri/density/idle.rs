//! Processor time and wake-ups of the idle daemon.

use std::{collections::BTreeMap, fs, time::Duration};

use tokio::time::sleep;

/// Time of a measurement.
const MEASURED_TIME: Duration = Duration::from_secs(60);
/// Clock ticks in a second (`USER_HZ`), the unit of processor time in `/proc`.
const TICKS_PER_SECOND: f64 = 100.0;

/// Ticks of processor time and voluntary context switches, by thread name.
type Threads = BTreeMap<String, (u64, u64)>;

/// Measures a daemon, and returns the rows of a table.
pub(super) async fn rows(cells: usize, pid: u32) -> Vec<String> {
    let before = threads(pid);
    sleep(MEASURED_TIME).await;
    let row = |(name, (ticks, switches)): (String, (u64, u64))| {
        let (ticks_before, switches_before) = before.get(&name).copied().unwrap_or_default();
        let percent = ticks.saturating_sub(ticks_before) as f64
            / TICKS_PER_SECOND
            / MEASURED_TIME.as_secs_f64()
            * 100.0;
        format!(
            "| {cells} | `{name}` | {percent:.2} | {:.1} |",
            switches.saturating_sub(switches_before) as f64 / MEASURED_TIME.as_secs_f64()
        )
    };
    threads(pid).into_iter().map(row).collect()
}

fn threads(pid: u32) -> Threads {
    let mut all = Threads::new();
    for task in fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten() {
        // A thread may have ended meanwhile.
        let read = |file: &str| fs::read_to_string(task.path().join(file)).unwrap_or_default();
        let (status, stat) = (read("status"), read("stat"));
        let line = |name: &str| {
            status
                .lines()
                .find_map(|line| line.strip_prefix(name))
                .unwrap_or_default()
                .trim()
                .to_owned()
        };
        // Fields behind the name, which is in brackets: state is the first, utime the 12th, stime
        // the 13th.
        let ticks = stat
            .rsplit_once(')')
            .map_or("", |(_, rest)| rest)
            .split_whitespace()
            .skip(11)
            .take(2)
            .filter_map(|ticks| ticks.parse::<u64>().ok());
        let of_name = all.entry(line("Name:")).or_default();
        of_name.0 += ticks.sum::<u64>();
        of_name.1 += line("voluntary_ctxt_switches:").parse::<u64>().unwrap_or_default();
    }
    all
}
