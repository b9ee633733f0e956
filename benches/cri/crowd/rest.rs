//! What the daemon does while nobody asks anything of it.

use std::{collections::BTreeMap, fs, time::Duration};

use tokio::time::sleep;

/// How long it is watched.
const WATCHED: Duration = Duration::from_secs(60);
/// Clock ticks of the kernel in a second (`USER_HZ`), in which it counts processor time.
const TICKS_A_SECOND: f64 = 100.0;

/// Of threads of one name: ticks of processor time, and how often they woke.
type Threads = BTreeMap<String, (u64, u64)>;

/// Watches a daemon for a while, and gives a table's rows.
pub(super) async fn rows(cells: usize, pid: u32) -> Vec<String> {
    let before = threads(pid);
    sleep(WATCHED).await;
    let row = |(name, (ticks, switches)): (String, (u64, u64))| {
        let (was, woke) = before.get(&name).copied().unwrap_or_default();
        let percent =
            ticks.saturating_sub(was) as f64 / TICKS_A_SECOND / WATCHED.as_secs_f64() * 100.0;
        format!(
            "| {cells} | `{name}` | {percent:.2} | {:.1} |",
            switches.saturating_sub(woke) as f64 / WATCHED.as_secs_f64()
        )
    };
    threads(pid).into_iter().map(row).collect()
}

fn threads(pid: u32) -> Threads {
    let mut all = Threads::new();
    for task in fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten() {
        // One may just have ended.
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
        // Behind the name, which is in brackets: state is the first, utime the 12th and stime the
        // 13th.
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
