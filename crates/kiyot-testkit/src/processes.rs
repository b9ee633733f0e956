//! Processes of the host, found by their command lines, and their memory.

use std::{fmt::Display, fs};

use rustix::process::{Pid, Signal, kill_process};

/// Returns the ids of the processes whose command line contains all of these words.
pub fn processes(words: &[&str]) -> Vec<String> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let named = entries.filter_map(|entry| {
        entry
            .file_name()
            .to_str()
            .filter(|name| name.bytes().all(|byte| byte.is_ascii_digit()))
            .map(str::to_owned)
    });
    named.filter(|pid| words.iter().all(|word| command_line(pid).contains(word))).collect()
}

/// Returns the command line of a process, with spaces between its arguments; empty if the process
/// has ended.
pub fn command_line(pid: &str) -> String {
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&line).replace('\0', " ")
}

/// Returns the resident memory of a process in KiB, or `None` if the process has ended.
pub fn resident_kib(pid: impl Display) -> Option<u64> {
    status_kib(pid, "VmRSS:")
}

/// Returns the peak of a process's resident memory in KiB, or `None` if the process has ended.
pub fn peak_resident_kib(pid: impl Display) -> Option<u64> {
    status_kib(pid, "VmHWM:")
}

fn status_kib(pid: impl Display, key: &str) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let value = status.lines().find_map(|line| line.strip_prefix(key))?;
    value.trim().strip_suffix(" kB")?.parse().ok()
}

/// Sends SIGKILL to these processes. Skips ended processes.
pub fn kill_all(pids: &[String]) {
    for pid in pids.iter().filter_map(|pid| Pid::from_raw(pid.parse().ok()?)) {
        let _ = kill_process(pid, Signal::KILL);
    }
}
