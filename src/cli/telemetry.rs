//! Logs to the standard error.

use std::io::{self, IsTerminal};

use clap::ValueEnum;
#[cfg(feature = "otel")]
use tracing::Level;
use tracing::Subscriber;
#[cfg(feature = "otel")]
use tracing_subscriber::filter::Targets;
use tracing_subscriber::{
    EnvFilter, Layer,
    filter::{FilterFn, filter_fn},
    fmt,
    layer::SubscriberExt,
    registry::LookupSpan,
    util::{SubscriberInitExt, TryInitError},
};

#[cfg(feature = "otel")]
use super::trace_export::TraceExport;

use crate::recent_log::RecentLog;

/// Variable with the log filter.
const FILTER: &str = "KIYOT_LOG";

/// Default log filter.
const DEFAULT_FILTER: &str = "info";

/// Prefix of the log targets of libraries whose lines may have secrets: lines of the AWS SDK quote
/// answers of the metadata service. A call's error says what failed.
const INDISCREET: &str = "aws_";

/// Format of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub(super) enum LogFormat {
    /// Text for humans.
    #[default]
    Text,
    /// JSON for log collectors, an object a line.
    Json,
}

/// The log, and the export of traces while it lives.
#[derive(Debug)]
pub(super) struct Telemetry {
    /// The recent lines of the log.
    pub(super) recent_log: RecentLog,
    #[cfg(feature = "otel")]
    _traces: Option<TraceExport>,
}

/// Starts logging and, if variables configure it, the export of traces. Fails if the filter in the
/// variable is malformed.
pub(super) fn init(format: LogFormat) -> Result<Telemetry, String> {
    let filter = std::env::var(FILTER).unwrap_or_else(|_| DEFAULT_FILTER.to_owned());
    let filter = EnvFilter::try_new(&filter).map_err(|error| {
        format!(
            "environment variable {FILTER} = {filter:?}: {error}; allowed: a level such as \
                 info, or a list such as warn,kiyot=debug"
        )
    })?;
    let recent_log = RecentLog::default();
    #[cfg(feature = "otel")]
    let traces = TraceExport::start()?;
    #[cfg(feature = "otel")]
    let begun = match &traces {
        Some(traces) => {
            // Spans have the level debug, independent of the log's filter.
            let spans = Targets::new().with_target("kiyot", Level::DEBUG);
            let exported = tracing_opentelemetry::layer().with_tracer(traces.tracer());
            let layers = lines(format, &recent_log)
                .with_filter(filter)
                .and_then(exported.with_filter(spans));
            tracing_subscriber::registry().with(discreet()).with(layers).try_init()
        }
        None => begin(filter, format, &recent_log),
    };
    #[cfg(not(feature = "otel"))]
    let begun = begin(filter, format, &recent_log);
    begun.map_err(|error| format!("the log: {error}"))?;
    Ok(Telemetry {
        recent_log,
        #[cfg(feature = "otel")]
        _traces: traces,
    })
}

/// Begins to log with one filter for all layers: a span that no line shows costs nothing.
fn begin(filter: EnvFilter, format: LogFormat, recent_log: &RecentLog) -> Result<(), TryInitError> {
    let registry = tracing_subscriber::registry().with(discreet());
    registry.with(filter).with(lines(format, recent_log)).try_init()
}

/// Returns the filter that holds back the lines of [`INDISCREET`] libraries at every level.
fn discreet() -> FilterFn {
    filter_fn(|line| !line.target().starts_with(INDISCREET))
}

/// Returns the layer that writes lines to the standard error.
fn lines<S>(format: LogFormat, recent_log: &RecentLog) -> Box<dyn Layer<S> + Send + Sync>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
{
    let tee = recent_log.clone();
    let lines = fmt::layer().with_writer(move || tee.tee());
    match format {
        LogFormat::Text => lines.with_ansi(io::stderr().is_terminal()).boxed(),
        LogFormat::Json => lines.json().boxed(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Verifies V85.
    #[test]
    fn lines_of_the_sdk_are_held_back_at_every_level() {
        let recent_log = RecentLog::default();
        let filter = EnvFilter::try_new("trace,aws_config=trace").unwrap();
        let registry = tracing_subscriber::registry().with(discreet());
        let log = registry.with(filter).with(lines(LogFormat::Json, &recent_log));
        tracing::subscriber::with_default(log, || {
            tracing::warn!(target: "aws_config::meta::credentials::chain", "planted");
            tracing::trace!(target: "aws_smithy_runtime", "planted");
            tracing::info!(target: "kiyot::cli", "shown");
        });
        let text = recent_log.lines().text();
        assert!(text.contains("shown") && !text.contains("planted"), "{text}");
    }
}
