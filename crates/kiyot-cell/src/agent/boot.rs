//! Time since the boot of the cell.

use std::{fs, time::Duration};

use kiyot_linux::process_stat::{self, START_TIME};
use rustix::{
    param::clock_ticks_per_second,
    time::{ClockId, clock_gettime},
};

/// Returns the milliseconds since the start of the cell's PID 1, if `/proc` shows its start.
pub fn running_millis() -> Option<u64> {
    let began = start(&fs::read_to_string("/proc/1/stat").ok()?, clock_ticks_per_second())?;
    let now = clock_gettime(ClockId::Boottime);
    let now = Duration::try_from(now).unwrap_or_default();
    u64::try_from(now.saturating_sub(began).as_millis()).ok()
}

/// Returns the time from the kernel's boot to the start of a process.
fn start(stat: &str, ticks_per_second: u64) -> Option<Duration> {
    let ticks: u64 = process_stat::fields(stat.as_bytes())?.nth(START_TIME)?.parse().ok()?;
    Some(Duration::from_millis(ticks.checked_mul(1000)?.checked_div(ticks_per_second)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn start_time_after_an_odd_program_name_is_parsed() {
        let stat = "1 (a) b ) S 1 7 7 0 -1 4194560 1 0 0 0 30 12 0 0 20 0 5 0 905 1000 250 1 2";
        assert_eq!(start(stat, 100), Some(Duration::from_millis(9050)));
        assert_eq!(start("1 (a) S 1", 100), None);
        assert_eq!(start("1 (a", 100), None);
        assert_eq!(start(&stat.replace("905", &u64::MAX.to_string()), 100), None);
    }

    #[test]
    fn time_since_the_start_of_pid_1_is_known() {
        let stat = fs::read_to_string("/proc/self/stat").unwrap();
        let began = start(&stat, clock_ticks_per_second()).unwrap();
        let now = Duration::try_from(clock_gettime(ClockId::Boottime)).unwrap();
        assert!(began <= now && running_millis() > Some(0));
    }
}
