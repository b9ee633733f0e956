//! The daemon's own process and build.

use std::{fmt, fs};

use kiyot_linux::process_stat::{self, START_TIME};

use super::{
    BUILD, PROCESS_CPU, PROCESS_FDS, PROCESS_MAX_FDS, PROCESS_MEMORY, PROCESS_START, Page, Source,
};

/// Indices among the [`process_stat::fields`].
const UTIME: usize = 14 - 3;
const STIME: usize = 15 - 3;
const RSS_PAGES: usize = 24 - 3;

/// The source of the process's metrics. Metrics that can't be read are left out.
#[derive(Debug, Default)]
pub struct Process;

/// Numbers of `/proc/self/stat`.
#[derive(Debug, PartialEq)]
struct Stat {
    cpu_ticks: u64,
    start_ticks: u64,
    resident_pages: u64,
}

fn parse(stat: &str) -> Option<Stat> {
    let fields: Vec<&str> = process_stat::fields(stat.as_bytes())?.collect();
    let number = |index: usize| fields.get(index)?.parse::<u64>().ok();
    Some(Stat {
        cpu_ticks: number(UTIME)? + number(STIME)?,
        start_ticks: number(START_TIME)?,
        resident_pages: number(RSS_PAGES)?,
    })
}

/// Returns the time of the machine's boot, in seconds since 1970.
fn boot_time() -> Option<f64> {
    let stat = fs::read_to_string("/proc/stat").ok()?;
    stat.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()
}

/// Returns the limit of open files.
fn max_files() -> Option<f64> {
    let limits = fs::read_to_string("/proc/self/limits").ok()?;
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    line.split_whitespace().next()?.parse().ok()
}

impl Source for Process {
    fn write(&self, page: &mut Page<'_>) -> fmt::Result {
        page.family(&BUILD)?.info(&[env!("CARGO_PKG_VERSION"), std::env::consts::ARCH])?;
        let ticks = rustix::param::clock_ticks_per_second() as f64;
        let stat = fs::read_to_string("/proc/self/stat").ok().and_then(|stat| parse(&stat));
        if let Some(Stat { cpu_ticks, start_ticks, resident_pages }) = stat {
            page.family(&PROCESS_CPU)?.counter_f64(&[], cpu_ticks as f64 / ticks)?;
            let resident = resident_pages as f64 * rustix::param::page_size() as f64;
            page.family(&PROCESS_MEMORY)?.gauge(&[], resident)?;
            if let Some(boot) = boot_time() {
                page.family(&PROCESS_START)?.gauge(&[], boot + start_ticks as f64 / ticks)?;
            }
        }
        if let Ok(open) = fs::read_dir("/proc/self/fd") {
            // The directory itself is open while it is read.
            let count = open.count().saturating_sub(1);
            page.family(&PROCESS_FDS)?.gauge(&[], count as f64)?;
        }
        if let Some(most) = max_files() {
            page.family(&PROCESS_MAX_FDS)?.gauge(&[], most)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stat_of_a_program_with_an_odd_name_is_parsed() {
        let stat = "7 (a) b ) S 1 7 7 0 -1 4194560 1 0 0 0 30 12 0 0 20 0 5 0 900 1000 250 1 2";
        let parsed = Stat { cpu_ticks: 42, start_ticks: 900, resident_pages: 250 };
        assert_eq!(parse(stat), Some(parsed));
        assert_eq!(parse("7 (a"), None);
        assert_eq!(parse("7 (a) S 1"), None);
    }
}
