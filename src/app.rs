//! The one place that wires the parts together.

use crate::config::Config;

/// Runs the daemon until it is told to stop.
pub fn run(_config: Config) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    Err("the parts are not wired together yet".into())
}
