//! Values of labels that users choose, such as namespaces.

use std::{
    collections::BTreeSet,
    sync::{Mutex, PoisonError},
};

/// The value of a label that stands for all values beyond the limit.
pub(super) const OTHER: &str = "other";

/// A bounded set of values of a label. An admitted value stays. A value that was shown as `other`
/// is never admitted later, because the sums of counters would shrink.
#[derive(Debug)]
pub struct StableLabels {
    limit: usize,
    admitted: Mutex<BTreeSet<String>>,
}

impl StableLabels {
    /// Makes a set of at most `limit` values.
    pub const fn new(limit: usize) -> Self {
        Self { limit, admitted: Mutex::new(BTreeSet::new()) }
    }

    /// Admits values in order while there is room. Returns for each value what to show: the value
    /// itself or `other`.
    pub fn admit<'a>(&self, values: impl IntoIterator<Item = &'a str>) -> Vec<&'a str> {
        let mut admitted = self.admitted.lock().unwrap_or_else(PoisonError::into_inner);
        let mut admit = |value: &'a str| {
            let is_admitted = admitted.contains(value)
                || (admitted.len() < self.limit && admitted.insert(value.to_owned()));
            if is_admitted { value } else { OTHER }
        };
        values.into_iter().map(&mut admit).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn admitted_values_stay_and_the_rest_is_other() {
        let labels = StableLabels::new(2);
        assert_eq!(labels.admit(["b", "a", "c"]), ["b", "a", OTHER]);
        assert_eq!(labels.admit(["c", "a"]), [OTHER, "a"]);
        assert_eq!(labels.admit([]), [] as [&str; 0]);
        assert_eq!(labels.admit(["b"]), ["b"]);
    }
}
