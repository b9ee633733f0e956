//! Results of simulations as a table, a column for each configuration.

use std::{collections::BTreeSet, time::Duration};

use kiyot_proto::text::counted;
use kiyot_sim::{Percentiles, SimulationReport, Usage};

/// The most namespaces that are shown.
const MAX_NAMESPACES: usize = 10;
/// The text of an absent value.
const NO_VALUE: &str = "-";

/// Reads a percentile.
type Percentile = fn(&Percentiles) -> Duration;

/// Returns the table, with notes below it.
pub(super) fn table(pods: usize, reports: &[(String, SimulationReport)]) -> String {
    let mut rows: Vec<(String, Vec<String>)> = Vec::new();
    let mut row = |label: &str, value: &dyn Fn(&SimulationReport) -> String| {
        rows.push((label.to_owned(), reports.iter().map(|(_, report)| value(report)).collect()));
    };
    row("pods", &|_| pods.to_string());
    row("started", &|report| report.usage.started.to_string());
    row("started in a warm cell", &|report| {
        let Usage { started, warm_starts, .. } = report.usage;
        part(warm_starts.to_string(), warm_starts, started)
    });
    if reports.iter().any(|(_, report)| report.usage.on_node > 0) {
        row("started on the node", &|report| {
            let Usage { started, on_node, .. } = report.usage;
            part(on_node.to_string(), on_node, started)
        });
        row("failed calls", &|report| report.usage.failed_calls.to_string());
    }
    let percentiles: [(&str, Percentile); 4] = [
        ("start p50", |times| times.p50),
        ("start p90", |times| times.p90),
        ("start p99", |times| times.p99),
        ("longest start", |times| times.most),
    ];
    for (label, of) in percentiles {
        row(label, &|report| {
            let seconds = |times: &Percentiles| format!("{:.1} s", of(times).as_secs_f64());
            report.usage.starts.as_ref().map_or_else(|| NO_VALUE.to_owned(), seconds)
        });
    }
    row("instances", &|report| report.instances.to_string());
    row("most at a time", &|report| report.most_instances.to_string());
    row("cost", &|report| report.usage.cost.to_string());
    row("of it before pods", &|report| {
        let (before, all) = (report.usage.cost_before_pods, report.usage.cost);
        part(before.to_string(), before.micros(), all.micros())
    });
    let namespaces: BTreeSet<&String> =
        reports.iter().flat_map(|(_, report)| report.usage.namespaces.keys()).collect();
    for namespace in namespaces.into_iter().take(MAX_NAMESPACES) {
        let label = match namespace.as_str() {
            "" => "cost without a pod".to_owned(),
            name => format!("cost of {name}"),
        };
        row(&label, &|report| {
            let cost = report.usage.namespaces.get(namespace);
            cost.map_or_else(|| NO_VALUE.to_owned(), ToString::to_string)
        });
    }
    let names = reports.iter().map(|(name, _)| name.clone()).collect();
    rows.insert(0, (String::new(), names));
    aligned(&rows) + &notes(reports)
}

/// Returns a value with its percentage of a whole.
fn part(value: String, part: u64, whole: u64) -> String {
    if whole == 0 {
        return value;
    }
    format!("{value} ({} %)", u128::from(part) * 100 / u128::from(whole))
}

/// Returns rows with aligned columns.
fn aligned(rows: &[(String, Vec<String>)]) -> String {
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|(_, values)| values.get(column));
        cells.map(|value| value.chars().count()).max().unwrap_or_default()
    };
    let labels = rows.iter().map(|(label, _)| label.chars().count()).max().unwrap_or_default();
    let mut text = String::new();
    for (label, values) in rows {
        text += &format!("{label:labels$}");
        for (column, value) in values.iter().enumerate() {
            let width = width(column);
            text += &format!("  {value:>width$}");
        }
        text.push('\n');
    }
    text
}

/// Returns notes about pods that were left out or never started, and violations.
fn notes(reports: &[(String, SimulationReport)]) -> String {
    let mut notes = String::new();
    for (name, report) in reports {
        let Usage { unplaced, unstarted, .. } = &report.usage;
        if unplaced.0 > 0 {
            notes += &format!(
                "note: {name}: {} left out, the first because {}\n",
                counted(unplaced.0, "pod is", "pods are"),
                unplaced.1
            );
        }
        if unstarted.0 > 0 {
            notes += &format!(
                "note: {name}: {} never started, the last error was: {}\n",
                counted(unstarted.0, "pod", "pods"),
                unstarted.1
            );
        }
        for violation in &report.violations {
            notes += &format!("violation: {name}: {violation}\n");
        }
    }
    notes
}
