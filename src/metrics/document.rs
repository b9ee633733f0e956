//! The page of the documentation, generated from the definitions.

use std::fmt::Write;

use super::{ALL, Definition};

/// The text before the table.
const HEAD: &str = "\
# Metrics

Served at `/metrics` in the text format of OpenMetrics; [operating.md](operating.md#metrics) says
where. This page is generated: `UPDATE_DOCUMENTS=1 cargo test --lib metrics` writes it.

Every label has a bounded number of values. A combination of labels may be absent until its first
event. Counters begin at 0 when the daemon starts, but for the cost, which is on disk.

";

/// Returns the page `docs/metrics.md`.
pub fn document() -> String {
    let mut page = HEAD.to_owned();
    page += "| metric | kind | labels | meaning |\n| --- | --- | --- | --- |\n";
    for definition in ALL {
        let Definition { kind, help, labels, .. } = definition;
        let names: Vec<_> = labels.iter().map(|label| format!("`{}`", label.name)).collect();
        // A write to a string does not fail.
        let _ = writeln!(
            page,
            "| `{}` | {} | {} | {help} |",
            shown_name(definition),
            kind.name(),
            names.join(", ")
        );
    }
    page += "\n## Labels\n\n| metric | label | values |\n| --- | --- | --- |\n";
    for definition in ALL {
        for label in definition.labels {
            let name = shown_name(definition);
            let _ = writeln!(page, "| `{name}` | `{}` | {} |", label.name, label.values);
        }
    }
    page
}

/// Returns the name in queries: of a histogram without the suffixes of its samples.
fn shown_name(definition: &Definition) -> String {
    match definition.kind.suffixes() {
        [suffix] => format!("{}{suffix}", definition.family()),
        _ => definition.family(),
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, fs, path::Path};

    use super::*;
    use crate::metrics::Kind;

    /// Verifies O2.
    #[test]
    fn document_lists_the_metrics_of_the_code() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/metrics.md");
        if std::env::var_os("UPDATE_DOCUMENTS").is_some() {
            fs::write(&path, document()).unwrap();
        }
        let is_current = fs::read_to_string(&path).unwrap_or_default() == document();
        assert!(is_current, "docs/metrics.md differs; UPDATE_DOCUMENTS=1 writes it");
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
        for definition in ALL {
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
}
