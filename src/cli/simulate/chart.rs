//! Instances over time, as a chart for terminals.

use kiyot_sim::Usage;

/// Lines of a chart.
const LINES: u64 = 8;

/// Returns the chart of a simulation. Its highest line is `most`, in thousandths of an instance.
pub(super) fn chart(name: &str, usage: &Usage, most: u64) -> String {
    let mut text =
        format!("{name}: instances with a pod (#), and those that boot or wait for one (.)\n");
    let label = most.div_ceil(1000).to_string();
    let width = label.len();
    for line in (0..LINES).rev() {
        // The middle of the line.
        let height = (2 * line + 1) * most / (2 * LINES);
        let columns = usage.shares.iter().map(|share| {
            if share.with_pod > height {
                '#'
            } else if share.with_pod + share.without_pod > height {
                '.'
            } else {
                ' '
            }
        });
        let label = if line + 1 == LINES { label.as_str() } else { "" };
        let columns: String = columns.collect();
        text += &format!("{label:>width$} |{}\n", columns.trim_end());
    }
    let end = usage.slot * u32::try_from(usage.shares.len()).unwrap_or(u32::MAX);
    let axis = "-".repeat(usage.shares.len());
    let end = format!("{:.1} h", end.as_secs_f64() / 3600.0);
    let right = usage.shares.len();
    text += &format!(
        "{:>width$} +{axis}\n{:>width$}  0 h{end:>right$}\n",
        "0",
        "",
        right = right.saturating_sub(3)
    );
    text
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use kiyot_sim::Share;

    #[test]
    fn chart_has_instances_with_pods_at_the_bottom() {
        let share = |with_pod, without_pod| Share { with_pod, without_pod };
        let usage = Usage {
            slot: Duration::from_secs(1800),
            shares: vec![share(0, 2000), share(4000, 4000), share(8000, 0), share(0, 0)],
            ..Usage::default()
        };
        let text = chart("a", &usage, 8000);
        let columns: Vec<&str> = text.lines().skip(1).collect();
        assert_eq!(columns[0], "8 | .#");
        assert_eq!(columns[3], "  | .#");
        assert_eq!(columns[4], "  | ##");
        assert_eq!(columns[7], "  |.##");
        assert_eq!(columns[8], "0 +----");
        assert!(columns[9].ends_with("2.0 h"), "{text}");
    }
}
