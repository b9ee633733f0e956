//! Histograms in Prometheus's model: counts by upper bound, a sum, and a count.

/// A histogram with fixed buckets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Histogram {
    /// The upper bounds of the buckets, inclusive and ascending; the last bucket has no bound.
    bounds: &'static [u64],
    /// The number of values in each bucket: one bucket more than bounds.
    counts: Vec<u64>,
    sum: u64,
}

impl Histogram {
    pub(super) fn new(bounds: &'static [u64]) -> Self {
        Self { bounds, counts: vec![0; bounds.len() + 1], sum: 0 }
    }

    pub(super) fn observe(&mut self, value: u64) {
        let bucket = self.bounds.partition_point(|bound| *bound < value);
        if let Some(count) = self.counts.get_mut(bucket) {
            *count = count.saturating_add(1);
        }
        self.sum = self.sum.saturating_add(value);
    }

    /// Returns the number of values.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Returns the sum of the values.
    pub fn sum(&self) -> u64 {
        self.sum
    }

    /// Returns each upper bound with the number of values above the previous bound; `None` is no
    /// bound.
    pub fn counts(&self) -> impl Iterator<Item = (Option<u64>, u64)> {
        let bounds = self.bounds.iter().copied().map(Some).chain([None]);
        bounds.zip(self.counts.iter().copied())
    }

    /// Adds the values of another histogram with the same bounds.
    pub(super) fn add(&mut self, other: &Self) {
        for (count, more) in self.counts.iter_mut().zip(&other.counts) {
            *count = count.saturating_add(*more);
        }
        self.sum = self.sum.saturating_add(other.sum);
    }

    /// Returns each upper bound with the number of values up to it (`le`); `None` is no bound.
    pub fn buckets(&self) -> impl Iterator<Item = (Option<u64>, u64)> {
        let bounds = self.bounds.iter().copied().map(Some).chain([None]);
        bounds.zip(&self.counts).scan(0, |sum, (bound, count)| {
            *sum += count;
            Some((bound, *sum))
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const BOUNDS: &[u64] = &[10, 20, 50];

    proptest! {
        #[test]
        fn bucket_has_the_values_up_to_its_bound(
            values in prop::collection::vec(0..70_u64, 0..50),
        ) {
            let mut histogram = Histogram::new(BOUNDS);
            values.iter().for_each(|value| histogram.observe(*value));
            let up_to = |bound: Option<u64>| {
                let within = |value: &&u64| bound.is_none_or(|bound| **value <= bound);
                (bound, values.iter().filter(within).count() as u64)
            };
            let expected: Vec<_> = [Some(10), Some(20), Some(50), None].map(up_to).to_vec();
            prop_assert_eq!(histogram.buckets().collect::<Vec<_>>(), expected);
            prop_assert_eq!(histogram.count(), values.len() as u64);
            prop_assert_eq!(histogram.sum(), values.iter().sum::<u64>());
        }
    }
}
