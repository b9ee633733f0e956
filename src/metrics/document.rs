//! The page of the documentation, against the metrics of the code.

use std::collections::BTreeSet;

use crate::metrics::{self, Definition, Kind};

const PAGE: &str = "docs/operate.md";

/// Returns the name in queries with the labels, as on the page. The name of a histogram has no
/// suffixes of samples.
fn shown(definition: &Definition) -> String {
    let name = match definition.kind.suffixes() {
        [suffix] => format!("{}{suffix}", definition.family()),
        _ => definition.family(),
    };
    let labels: Vec<&str> = definition.labels.iter().map(|label| label.name).collect();
    if labels.is_empty() { name } else { format!("{name}{{{}}}", labels.join(",")) }
}

/// Verifies O2.
#[test]
fn document_lists_the_metrics_of_the_code() {
    let page = std::fs::read_to_string(PAGE).unwrap();
    let spans = page.lines().flat_map(|line| line.split('`').skip(1).step_by(2));
    let listed: BTreeSet<String> = spans
        .filter(|span| span.starts_with("kiyot_") || span.starts_with("process_"))
        .map(str::to_owned)
        .collect();
    let known: BTreeSet<String> = metrics::ALL.iter().map(|definition| shown(definition)).collect();
    let lacking: Vec<_> = known.difference(&listed).collect();
    assert!(lacking.is_empty(), "{PAGE} lacks {lacking:?}");
    let unknown: Vec<_> = listed.difference(&known).collect();
    assert!(unknown.is_empty(), "{PAGE} has {unknown:?}, which the code lacks");
}

/// Verifies O2.
#[test]
fn names_follow_the_conventions_of_prometheus() {
    const UNITS: [&str; 4] = ["seconds", "bytes", "dollars", "dollars_per_hour"];
    let is_name = |name: &str| {
        name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_')
            && !name.contains("__")
            && !name.ends_with('_')
    };
    let mut families = BTreeSet::new();
    for definition in metrics::ALL {
        let name = definition.name;
        assert!(name.starts_with("kiyot_") || name.starts_with("process_"), "{name}");
        assert!(is_name(name), "{name}");
        for reserved in ["_total", "_count", "_sum", "_bucket", "_info"] {
            assert!(!name.ends_with(reserved), "{name} has the suffix of a kind");
        }
        assert!(definition.unit.is_none_or(|unit| UNITS.contains(&unit)), "{name}");
        assert!(definition.kind != Kind::Histogram || definition.unit.is_some(), "{name}");
        assert!(families.insert(definition.family()), "{name} is defined twice");
        assert!(!definition.help.ends_with('.') && !definition.help.contains('|'), "{name}");
        for label in definition.labels {
            assert!(is_name(label.name) && label.name != "le", "{name} {}", label.name);
            assert!(!label.values.is_empty() && !label.values.contains('|'), "{name}");
        }
    }
}
