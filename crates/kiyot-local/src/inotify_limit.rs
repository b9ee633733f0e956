//! The kernel's limit of inotify instances for a user. The agents and shims of all netns cells
//! share it, because to the kernel they are the same user.

use std::fs;

const FILE: &str = "/proc/sys/fs/inotify/max_user_instances";
/// The instances of the node's own programs, such as systemd, the kubelet and its containerd.
const OF_NODE: usize = 128;
/// The instances of a cell: of its agent, of its containerd, and with cgroup version 2 of the shims
/// for the sandbox and for a container.
const OF_CELL: usize = 4;

/// Warns if the limit is too low for `max_cells` cells.
pub(crate) fn check(max_cells: usize) {
    // A kernel without inotify has no limit.
    let Ok(content) = fs::read_to_string(FILE) else { return };
    if let Ok(limit) = content.trim().parse() {
        warn_if_low(limit, max_cells);
    }
}

fn warn_if_low(limit: usize, max_cells: usize) {
    let needed = OF_NODE + OF_CELL * max_cells;
    if limit < needed {
        tracing::warn!(
            max_cells,
            "fs.inotify.max_user_instances is {limit}, too low for max_cells; needed: {needed}"
        );
    }
}

#[cfg(test)]
mod tests {
    use kiyot_testkit::log::CapturedLog;

    use super::*;

    /// Verifies C9.
    #[test]
    fn low_limit_is_reported_with_the_needed_limit() {
        let log = CapturedLog::start();
        warn_if_low(1128, 250);
        assert_eq!(log.lines(), Vec::<String>::new());
        warn_if_low(128, 250);
        let lines = log.lines().concat();
        let expected = "fs.inotify.max_user_instances is 128, too low for max_cells; needed: 1128";
        assert!(lines.contains(expected), "{lines}");
    }
}
