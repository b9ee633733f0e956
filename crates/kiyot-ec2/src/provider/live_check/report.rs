//! Report of a live check.

use std::{collections::BTreeSet, fmt};

use crate::provider::live_check::policy::{self, Values};

/// The outcome of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    /// Proved.
    Ok,
    /// Works, but perhaps not as intended.
    Warning,
    /// Does not work.
    Failed,
    /// Not proved.
    NotChecked,
}

impl Outcome {
    fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warning => "warning",
            Self::Failed => "failed",
            Self::NotChecked => "not checked",
        }
    }
}

/// The report of a live check: a line for each check, and the missing part of the policy.
#[derive(Debug, Clone)]
pub struct LiveReport {
    lines: Vec<(Outcome, String)>,
    /// The denied actions, with their service.
    denied: BTreeSet<String>,
    values: Values,
}

impl LiveReport {
    pub(super) fn new(values: Values) -> Self {
        Self { lines: Vec::new(), denied: BTreeSet::new(), values }
    }

    /// Adds a line.
    pub(super) fn add(&mut self, outcome: Outcome, name: &str, text: &str) {
        self.lines.push((outcome, format!("{name}: {text}")));
    }

    /// Adds an action that the policy does not permit.
    pub(super) fn deny(&mut self, action: String) {
        self.denied.insert(action);
    }

    /// Returns whether every check was made and succeeded, perhaps with warnings.
    pub fn is_fine(&self) -> bool {
        let is_proved = |outcome| matches!(outcome, Outcome::Ok | Outcome::Warning);
        self.lines.iter().all(|(outcome, _)| is_proved(*outcome))
    }
}

impl fmt::Display for LiveReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (outcome, text) in &self.lines {
            writeln!(f, "{:<11}  {text}", outcome.name())?;
        }
        if self.denied.is_empty() {
            return Ok(());
        }
        writeln!(
            f,
            "\nThe policy of the node's role lacks this (docs/ec2.md):\n{}",
            policy::part(&self.denied, &self.values)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn report_is_fine_if_everything_was_proved() {
        let mut report = LiveReport::new(Values::default());
        report.add(Outcome::Ok, "DescribeSubnets", "subnet-1 in us-east-1a");
        report.add(Outcome::Warning, "network", "odd");
        assert!(report.is_fine());
        assert_eq!(
            report.to_string(),
            "ok           DescribeSubnets: subnet-1 in us-east-1a\nwarning      network: odd\n"
        );
        for outcome in [Outcome::Failed, Outcome::NotChecked] {
            let mut report = report.clone();
            report.add(outcome, "RunInstances", "why");
            assert!(!report.is_fine(), "{outcome:?}");
        }
    }
}
