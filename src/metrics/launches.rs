//! Launches of cells.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Mutex, MutexGuard, PoisonError},
};

use super::{LAUNCHES, Page, Source, labels::OTHER};

/// Bounds the combinations of labels. Launches of further instance types are counted as `other`
/// with their other labels, which have few values.
const MAX_COMBINATIONS: usize = 400;

/// The labels of a launch.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct LaunchLabels {
    /// The provider.
    pub provider: &'static str,
    /// The instance type.
    pub instance_type: String,
    /// The market: `on-demand` or `spot`.
    pub market: &'static str,
    /// The outcome: `launched`, or the class of the error.
    pub outcome: &'static str,
}

/// Counters of launches. A launch takes long, so that the cost of a lock does not matter.
#[derive(Debug, Default)]
pub struct Launches(Mutex<BTreeMap<LaunchLabels, u64>>);

impl Launches {
    /// Counts a launch.
    pub fn count(&self, labels: LaunchLabels) {
        let mut counts = self.lock();
        let is_kept = counts.len() < MAX_COMBINATIONS || counts.contains_key(&labels);
        let instance_type = if is_kept { labels.instance_type } else { OTHER.to_owned() };
        *counts.entry(LaunchLabels { instance_type, ..labels }).or_default() += 1;
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<LaunchLabels, u64>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Source for Launches {
    fn write(&self, page: &mut Page<'_>) -> fmt::Result {
        let counts = self.lock().clone();
        let mut family = page.family(&LAUNCHES)?;
        for (LaunchLabels { provider, instance_type, market, outcome }, count) in &counts {
            family.counter(&[provider, instance_type, market, outcome], *count)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launches_of_many_types_have_bounded_labels() {
        let launches = Launches::default();
        for number in 0..10_000 {
            launches.count(LaunchLabels {
                provider: "sim",
                instance_type: format!("t{number}"),
                market: "spot",
                outcome: "launched",
            });
        }
        let counts = launches.lock();
        assert_eq!(counts.len(), MAX_COMBINATIONS + 1);
        assert_eq!(counts.values().sum::<u64>(), 10_000);
    }
}
