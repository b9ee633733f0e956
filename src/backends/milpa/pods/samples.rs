//! Metrics in memory. Most containers have the same names and labels in the same order. These are
//! kept once, and each container has only its values.

use std::{collections::HashSet, sync::Arc, time::Instant};

use kiyot_proto::cell;

use super::{
    MAX_REPORT_BYTES,
    usage::{Received, USAGE_TTL},
};

/// Most metrics of a container or a pod.
const MAX_SERIES: usize = 256;
/// Most labels of a metric besides [`IDENTITY_LABELS`]. containerd 2.3 has four.
const MAX_LABELS: usize = 8;
/// Longest name of a metric or a label, and longest value of a label, in bytes.
const MAX_WORD_BYTES: usize = 128;
/// Labels that identify the container: never accepted from a cell.
const IDENTITY_LABELS: [&str; 6] = ["id", "name", "image", "namespace", "pod", "container"];

/// The name and the labels of a metric, sorted by their keys.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Series {
    pub(super) name: Box<str>,
    /// Keys and values, without duplicates and [`IDENTITY_LABELS`].
    pub(super) labels: Box<[(Box<str>, Box<str>)]>,
}

impl Series {
    /// Returns the series of a sample; `None` for an invalid one.
    fn of(sample: &cell::Sample) -> Option<Self> {
        let is_word = |word: &str| word.len() <= MAX_WORD_BYTES;
        if sample.name.is_empty() || !is_word(&sample.name) || sample.labels.len() > MAX_LABELS {
            return None;
        }
        let mut labels: Box<[(Box<str>, Box<str>)]> = sample
            .labels
            .iter()
            .map(|label| (label.key.as_str().into(), label.value.as_str().into()))
            .collect();
        labels.sort_unstable();
        let good = labels.iter().all(|(key, value)| {
            is_word(key) && is_word(value) && !IDENTITY_LABELS.contains(&&**key)
        });
        (good && labels.is_sorted_by(|one, next| one.0 < next.0))
            .then(|| Self { name: sample.name.as_str().into(), labels })
    }

    fn len(&self) -> usize {
        size_of::<Self>()
            + self.name.len()
            + self
                .labels
                .iter()
                .map(|(key, value)| size_of_val(key) * 2 + key.len() + value.len())
                .sum::<usize>()
    }
}

/// Names and labels of all metrics of a container, sorted and without duplicates: a duplicate would
/// make a kubelet refuse all metrics.
type Shape = Box<[Series]>;

/// All shapes in use.
#[derive(Debug, Default)]
pub(super) struct Shapes(HashSet<Arc<Shape>>);

impl Shapes {
    fn shared(&mut self, shape: Shape) -> Arc<Shape> {
        if let Some(known) = self.0.get(&shape) {
            return Arc::clone(known);
        }
        self.0.retain(|known| Arc::strong_count(known) > 1);
        let shape = Arc::new(shape);
        self.0.insert(Arc::clone(&shape));
        shape
    }
}

/// The metrics of a container or a pod, by the last report of its cell.
#[derive(Debug)]
pub(super) struct Samples {
    shape: Arc<Shape>,
    /// The values of the shape's series.
    values: Box<[u64]>,
    /// Time of the samples, by the cell's clock if its time is possible.
    pub(super) timestamp: i64,
    until: Instant,
}

impl Samples {
    /// Returns the samples of a report, within all limits.
    pub(super) fn new(
        samples: &[cell::Sample],
        timestamp: i64,
        before: Option<&Self>,
        shapes: &mut Shapes,
        now: Received,
    ) -> Self {
        let mut left = MAX_REPORT_BYTES;
        let mut taken: Vec<_> = samples
            .iter()
            .take(MAX_SERIES)
            .filter_map(|sample| Some((Series::of(sample)?, sample.value)))
            .collect();
        taken.retain(|(series, _)| {
            left.checked_sub(series.len()).inspect(|less| left = *less).is_some()
        });
        taken.sort_by(|(one, _), (other, _)| one.cmp(other));
        taken.dedup_by(|(one, _), (other, _)| one == other);
        let (shape, values): (Vec<_>, Vec<_>) = taken.into_iter().unzip();
        Self {
            shape: shapes.shared(shape.into()),
            values: values.into(),
            timestamp: now.time(timestamp, before.map_or(0, |before| before.timestamp)),
            until: now.at + USAGE_TTL,
        }
    }

    /// Returns whether the samples are recent enough.
    pub(super) fn is_fresh(&self, now: Instant) -> bool {
        now < self.until
    }

    /// Returns each series with its value.
    pub(super) fn all(&self) -> impl Iterator<Item = (&Series, u64)> {
        self.shape.iter().zip(self.values.iter().copied())
    }

    /// Returns whether the samples have a metric of this name.
    pub(super) fn has(&self, name: &str) -> bool {
        let from = self.shape.partition_point(|series| *series.name < *name);
        self.shape.get(from).is_some_and(|series| *series.name == *name)
    }
}

#[cfg(test)]
mod tests {
    use super::{super::tests::sample, *};

    fn received() -> Received {
        Received { at: Instant::now(), clock: 9 }
    }

    /// Name, labels and value.
    type Accepted = (String, Vec<(String, String)>, u64);

    fn accepted(samples: &[cell::Sample]) -> Vec<Accepted> {
        let samples = Samples::new(samples, 7, None, &mut Shapes::default(), received());
        let label = |(key, value): &(Box<str>, Box<str>)| (key.to_string(), value.to_string());
        samples
            .all()
            .map(|(series, value)| {
                (series.name.to_string(), series.labels.iter().map(label).collect(), value)
            })
            .collect()
    }

    /// Verifies U9.
    #[test]
    fn samples_of_a_cell_are_bounded_and_without_duplicates() {
        let good = |name: &str, value| (name.to_owned(), Vec::<(String, String)>::new(), value);
        let long = "x".repeat(MAX_WORD_BYTES + 1);
        let mut samples = vec![
            sample("b", &[], 2),
            sample("a", &[], 1),
            sample("b", &[], 3),
            sample("", &[], 1),
            sample(&long, &[], 1),
            sample("c", &[("device", &long)], 1),
            sample("c", &[(&long, "sda")], 1),
            // A label that identifies the container, and a duplicate label.
            sample("c", &[("id", "another's")], 1),
            sample("c", &[("device", "sda"), ("device", "sdb")], 1),
            sample("c", &[("a", ""); MAX_LABELS + 1], 1),
        ];
        assert_eq!(accepted(&samples), [good("a", 1), good("b", 2)]);
        // The same metric in any order of its labels.
        samples = vec![
            sample("d", &[("x", "1"), ("y", "2")], 5),
            sample("d", &[("y", "2"), ("x", "1")], 6),
            sample("d", &[("x", "2"), ("y", "2")], 7),
        ];
        assert_eq!(
            accepted(&samples).iter().map(|(_, _, value)| *value).collect::<Vec<_>>(),
            [5, 7]
        );
        assert_eq!(
            accepted(&(0..1000).map(|n| sample(&format!("m{n}"), &[], n)).collect::<Vec<_>>())
                .len(),
            MAX_SERIES
        );
        let large = (0..200).map(|n| {
            sample(
                &format!("{n:0>MAX_WORD_BYTES$}"),
                &[("a", &"v".repeat(MAX_WORD_BYTES)), ("b", &"v".repeat(MAX_WORD_BYTES))],
                n,
            )
        });
        let kept: usize = accepted(&large.collect::<Vec<_>>())
            .iter()
            .map(|(name, labels, _)| name.len() + labels.len() * MAX_WORD_BYTES)
            .sum();
        assert!((MAX_REPORT_BYTES / 2..MAX_REPORT_BYTES).contains(&kept), "{kept}");
    }

    #[test]
    fn shape_is_shared_and_dropped_with_its_last_samples() {
        let (mut shapes, now) = (Shapes::default(), received());
        let mut of = |value| {
            Samples::new(
                &[sample("a", &[], value), sample("b", &[("x", "y")], value)],
                0,
                None,
                &mut shapes,
                now,
            )
        };
        let (one, other) = (of(1), of(2));
        assert!(
            Arc::ptr_eq(&one.shape, &other.shape)
                && one.has("b")
                && !one.has("aa")
                && !one.has("c")
        );
        drop((one, other));
        Samples::new(&[sample("c", &[], 1)], 0, None, &mut shapes, now);
        assert_eq!(shapes.0.len(), 1);
    }
}
