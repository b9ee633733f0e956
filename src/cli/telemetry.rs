//! Logs to the standard error.

use std::io::{self, IsTerminal};

use clap::ValueEnum;
use tracing_subscriber::{EnvFilter, fmt};

use crate::recent_log::RecentLog;

/// Variable with the log filter.
const FILTER: &str = "KIYOT_LOG";

/// Default log filter.
const DEFAULT_FILTER: &str = "info";

/// Format of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub(super) enum LogFormat {
    /// Text for humans.
    #[default]
    Text,
    /// JSON for log collectors, an object a line.
    Json,
}

/// Starts logging, and returns the recent lines. Fails for a malformed filter in the variable.
pub(super) fn init(format: LogFormat) -> Result<RecentLog, String> {
    let filter = std::env::var(FILTER).unwrap_or_else(|_| DEFAULT_FILTER.to_owned());
    let filter = EnvFilter::try_new(&filter).map_err(|error| {
        format!(
            "environment variable {FILTER} = {filter:?}: {error}; allowed: a level such as \
                 info, or a list such as warn,kiyot=debug"
        )
    })?;
    let recent = RecentLog::default();
    let tee = recent.clone();
    let lines = fmt().with_env_filter(filter).with_writer(move || tee.tee());
    let begun = match format {
        LogFormat::Text => lines.with_ansi(io::stderr().is_terminal()).try_init(),
        LogFormat::Json => lines.json().try_init(),
    };
    begun.map_err(|error| format!("the log: {error}"))?;
    Ok(recent)
}
