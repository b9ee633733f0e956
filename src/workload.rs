//! Workloads in files: pods as comma-separated values with a header.
//!
//! docs/milpactl.md describes the columns. A wrong row makes the file unusable, because a
//! simulation without the row would size a pool for another day.

use std::{collections::BTreeMap, time::Duration};

use kiyot_engine::request::keys::{CPU, LAUNCH_TYPE, MEMORY};
use kiyot_sim::WorkloadPod;
use kiyot_values::{
    csv_rows::{CsvRows, WrongRow},
    decimal::{self, Rounding},
    names::{DEFAULT_NAMESPACE, MAX_LABEL_BYTES, is_label},
};

use crate::annotations;

/// Bounds the size of a file.
pub const MAX_FILE_BYTES: usize = 128 * 1024 * 1024;
/// Bounds the number of pods.
const MAX_PODS: usize = 1_000_000;
/// Bounds the times, in seconds: a month.
const MAX_SECONDS: u64 = 31 * 24 * 3600;
/// Bounds the wrong rows that are named.
const MAX_NAMED_ROWS: usize = 8;
/// Bounds a value in an error message, in characters.
const MAX_SHOWN_CHARS: usize = 40;

const ARRIVAL: &str = "arrival_s";
const DURATION: &str = "duration_s";
const NAMESPACE: &str = "namespace";
/// The columns with the grammar of an annotation.
const ANNOTATED: [(&str, &str); 3] =
    [("cpu", CPU), ("memory", MEMORY), ("launch_type", LAUNCH_TYPE)];
/// All columns; the required columns come first.
const COLUMNS: [&str; 6] = [ARRIVAL, DURATION, "cpu", "memory", "launch_type", NAMESPACE];
const REQUIRED: usize = 2;

/// An unusable workload.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WorkloadError {
    /// The file is too large.
    #[error("the file has {0} bytes; allowed: {max}", max = MAX_FILE_BYTES)]
    TooLarge(usize),
    /// The file has too many rows.
    #[error("the file has more than {MAX_PODS} pods")]
    TooManyPods,
    /// The header lacks a column.
    #[error("the header has no column {0}")]
    NoColumn(&'static str),
    /// The header has an unknown column.
    #[error("the header has the unknown column {0:?}; allowed: {all}", all = COLUMNS.join(", "))]
    UnknownColumn(String),
    /// The header has a column twice.
    #[error("the header has the column {0} twice")]
    ColumnTwice(&'static str),
    /// The file has no pod.
    #[error("the file has no pods")]
    Empty,
    /// Rows are wrong.
    #[error("{}", lines(.named, *.all))]
    Rows {
        /// The first wrong rows.
        named: Vec<WrongRow>,
        /// The number of all wrong rows.
        all: usize,
    },
}

fn lines(named: &[WrongRow], all: usize) -> String {
    let mut lines: Vec<String> = named.iter().map(ToString::to_string).collect();
    if all > named.len() {
        lines.push(format!("{} more lines are wrong", all - named.len()));
    }
    lines.join("; ")
}

/// Reads the pods of a file. They may be in any order.
pub fn read_workload(text: &[u8]) -> Result<Vec<WorkloadPod>, WorkloadError> {
    if text.len() > MAX_FILE_BYTES {
        return Err(WorkloadError::TooLarge(text.len()));
    }
    let mut rows = CsvRows::new(text);
    let columns = columns(&rows.header())?;
    let (mut pods, mut named, mut all) = (Vec::new(), Vec::new(), 0);
    for (index, pod) in rows.read(|_, values| pod(&columns, values)).enumerate() {
        if index >= MAX_PODS {
            return Err(WorkloadError::TooManyPods);
        }
        match pod {
            Ok(pod) => pods.push(pod),
            Err(row) => {
                all += 1;
                if named.len() < MAX_NAMED_ROWS {
                    named.push(row);
                }
            }
        }
    }
    if all > 0 {
        return Err(WorkloadError::Rows { named, all });
    }
    if pods.is_empty() { Err(WorkloadError::Empty) } else { Ok(pods) }
}

/// Returns the places of the columns.
fn columns(header: &csv::StringRecord) -> Result<BTreeMap<&'static str, usize>, WorkloadError> {
    let mut columns = BTreeMap::new();
    for (place, name) in header.iter().enumerate() {
        let Some(known) = COLUMNS.into_iter().find(|known| *known == name) else {
            return Err(WorkloadError::UnknownColumn(shown(name)));
        };
        if columns.insert(known, place).is_some() {
            return Err(WorkloadError::ColumnTwice(known));
        }
    }
    match COLUMNS[..REQUIRED].iter().find(|name| !columns.contains_key(*name)) {
        Some(missing) => Err(WorkloadError::NoColumn(missing)),
        None => Ok(columns),
    }
}

fn pod(
    columns: &BTreeMap<&'static str, usize>,
    values: &csv::StringRecord,
) -> Result<WorkloadPod, String> {
    let value =
        |name: &str| columns.get(name).and_then(|place| values.get(*place)).unwrap_or_default();
    let annotations: BTreeMap<String, String> = ANNOTATED
        .into_iter()
        .filter(|(column, _)| !value(column).is_empty())
        .map(|(column, key)| (key.to_owned(), value(column).to_owned()))
        .collect();
    let request = annotations::parse(&annotations).map_err(|problems| problems.to_string())?;
    let namespace = match value(NAMESPACE) {
        "" => DEFAULT_NAMESPACE,
        named if is_label(named) => named,
        other => {
            let other = shown(other);
            return Err(format!(
                "{NAMESPACE} {other:?} is not a namespace name; allowed: 1 to \
                 {MAX_LABEL_BYTES} of a-z, 0-9 and -, not - at either end"
            ));
        }
    };
    Ok(WorkloadPod {
        arrival: seconds(ARRIVAL, value(ARRIVAL))?,
        duration: seconds(DURATION, value(DURATION))?,
        request,
        namespace: namespace.to_owned(),
    })
}

fn seconds(column: &str, text: &str) -> Result<Duration, String> {
    let millis = decimal::parse(text, 1000, Rounding::Up);
    let allowed = millis.and_then(|millis| u64::try_from(millis).ok()).map(Duration::from_millis);
    let allowed = allowed.filter(|time| *time <= Duration::from_secs(MAX_SECONDS));
    allowed.ok_or_else(|| {
        let text = shown(text);
        format!("{column} {text:?} is not a time; allowed: seconds from 0 to {MAX_SECONDS}")
    })
}

fn shown(value: &str) -> String {
    value.chars().take(MAX_SHOWN_CHARS).collect()
}

#[cfg(test)]
mod tests {
    use kiyot_engine::request::{CellRequest, LaunchType};

    use super::*;

    #[test]
    fn pods_have_the_values_of_their_columns() {
        let text = "namespace,arrival_s,duration_s,launch_type,cpu,memory\n\
                    web,0.25,60,Spot,1500m,2Gi\n\
                    ,7,0,,,\n";
        let pods = read_workload(text.as_bytes()).unwrap();
        assert_eq!(pods[0].arrival, Duration::from_millis(250));
        assert_eq!(pods[0].duration, Duration::from_secs(60));
        assert_eq!((&*pods[0].namespace, &*pods[1].namespace), ("web", "default"));
        let CellRequest { launch_type, milli_cpus, memory_bytes, .. } = pods[0].request;
        assert_eq!(
            (launch_type, milli_cpus, memory_bytes),
            (LaunchType::Spot, Some(1500), Some(2 << 30))
        );
        assert_eq!(pods[1].request, CellRequest::default());
    }

    #[test]
    fn wrong_file_is_refused_with_the_reason() {
        let header = "arrival_s,duration_s,cpu,namespace\n";
        let of_rows = |rows: &str| format!("{header}{rows}");
        for (text, reason) in [
            ("duration_s\n1\n".to_owned(), "the header has no column arrival_s"),
            ("arrival_s,duration_s,gpus\n".to_owned(), "the unknown column \"gpus\"; allowed:"),
            ("arrival_s,duration_s,arrival_s\n".to_owned(), "has the column arrival_s twice"),
            (of_rows(""), "the file has no pods"),
            (of_rows("-1,2,,\n"), "line 2: arrival_s \"-1\" is not a time; allowed: seconds from"),
            (of_rows("1,2,,\n1,2678401,,\n"), "line 3: duration_s \"2678401\" is not a time"),
            (of_rows("1,2,two,\n"), "pod.elotl.co/cpu"),
            (of_rows("1,2,,Web\n"), "namespace \"Web\" is not a namespace name"),
            (of_rows("1,2\n"), "line 2"),
            (of_rows(&"x,2,,\n".repeat(10)), "; 2 more lines are wrong"),
        ] {
            let error = read_workload(text.as_bytes()).unwrap_err().to_string();
            assert!(error.contains(reason), "{text:?}: {error}");
        }
    }
}
