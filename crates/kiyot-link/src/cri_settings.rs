//! Settings of the node's CRI plugin that also apply to pods in a cell.

use serde::{Deserialize, Serialize};

/// The settings, by containerd's names. The default is containerd's own.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct CriSettings {
    /// The most bytes of a log line; longer lines are split. Not positive: no limit.
    pub max_container_log_line_size: i64,
    /// The time that ExecSync waits for output after its program has exited, in Go's notation of
    /// durations; empty: no limit.
    pub drain_exec_sync_io_timeout: String,
    /// Containers get no volumes for the directories that their image declares.
    pub ignore_image_defined_volumes: bool,
    /// The resource limits of containers, from `base_runtime_spec`; empty: the runtime's limits.
    pub rlimits: Vec<Rlimit>,
}

/// A limit of setrlimit(2), in the form of an OCI runtime spec.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rlimit {
    /// Its name, such as `RLIMIT_NOFILE`.
    #[serde(rename = "type")]
    pub name: String,
    /// The hard limit.
    pub hard: u64,
    /// The soft limit.
    pub soft: u64,
}

impl CriSettings {
    /// Returns whether all settings are the default. A cell file omits default settings, so that a
    /// later version that replays a launch makes the same user data.
    pub(crate) fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

impl Default for CriSettings {
    fn default() -> Self {
        Self {
            max_container_log_line_size: 16384,
            drain_exec_sync_io_timeout: String::new(),
            ignore_image_defined_volumes: false,
            rlimits: Vec::new(),
        }
    }
}
