//! Metrics in memory. Those of most containers have the same names and labels, in the same order:
//! these are kept once, and for each container only its numbers.

use std::{collections::HashSet, sync::Arc, time::Instant};

use kiyot_proto::cell;

use super::{
    LONGEST,
    usage::{FRESH, Received},
};

/// The most metrics of one container, or of a pod.
const SERIES: usize = 256;
/// The most labels of one metric besides those that say whose it is. containerd 2.3 has four.
const LABELS: usize = 8;
/// The longest name of a metric or a label, and the longest value of a label, in bytes.
const WORD: usize = 128;
/// The labels that say whose a metric is: they are never taken from a cell.
const WHOSE: [&str; 6] = ["id", "name", "image", "namespace", "pod", "container"];

/// The name of a metric, and its labels, by the order of their keys.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Series {
    /// The name.
    pub(super) name: Box<str>,
    /// Key and value; no key is there twice, and none of [`WHOSE`].
    pub(super) labels: Box<[(Box<str>, Box<str>)]>,
}

impl Series {
    /// `None` for what no runtime says.
    fn of(sample: &cell::Sample) -> Option<Self> {
        let is_word = |word: &str| word.len() <= WORD;
        if sample.name.is_empty() || !is_word(&sample.name) || sample.labels.len() > LABELS {
            return None;
        }
        let mut labels: Box<[(Box<str>, Box<str>)]> = sample
            .labels
            .iter()
            .map(|label| (label.key.as_str().into(), label.value.as_str().into()))
            .collect();
        labels.sort_unstable();
        let good = labels
            .iter()
            .all(|(key, value)| is_word(key) && is_word(value) && !WHOSE.contains(&&**key));
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

/// Names and labels of all metrics of a container, sorted, none twice: two alike would be an error
/// of all metrics to a kubelet.
type Shape = Box<[Series]>;

/// All shapes that there are.
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

/// The metrics of a container, or of a pod itself, as its cell said them last.
#[derive(Debug)]
pub(super) struct Samples {
    shape: Arc<Shape>,
    /// As many as the shape has.
    values: Box<[u64]>,
    /// When they were taken: by the cell's clock as long as that can be.
    pub(super) timestamp: i64,
    until: Instant,
}

impl Samples {
    /// What came now, as far as it is not beyond all bounds.
    pub(super) fn of(
        samples: &[cell::Sample],
        timestamp: i64,
        before: Option<&Self>,
        shapes: &mut Shapes,
        now: Received,
    ) -> Self {
        let mut left = LONGEST;
        let mut taken: Vec<_> = samples
            .iter()
            .take(SERIES)
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
            until: now.at + FRESH,
        }
    }

    /// Whether they are of now.
    pub(super) fn is_fresh(&self, now: Instant) -> bool {
        now < self.until
    }

    /// Each with its number.
    pub(super) fn all(&self) -> impl Iterator<Item = (&Series, u64)> {
        self.shape.iter().zip(self.values.iter().copied())
    }

    /// Whether a metric of this name is among them.
    pub(super) fn has(&self, name: &str) -> bool {
        let from = self.shape.partition_point(|series| *series.name < *name);
        self.shape.get(from).is_some_and(|series| *series.name == *name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn received() -> Received {
        Received { at: Instant::now(), clock: 9 }
    }

    fn sample(name: &str, labels: &[(&str, &str)], value: u64) -> cell::Sample {
        let labels = labels
            .iter()
            .map(|&(key, value)| cell::Label { key: key.to_owned(), value: value.to_owned() })
            .collect();
        cell::Sample { name: name.to_owned(), value, labels }
    }

    /// Name, labels and number.
    type Told = (String, Vec<(String, String)>, u64);

    fn told(samples: &[cell::Sample]) -> Vec<Told> {
        let samples = Samples::of(samples, 7, None, &mut Shapes::default(), received());
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
    fn what_a_cell_says_is_bounded_and_nothing_is_there_twice() {
        let good = |name: &str, value| (name.to_owned(), Vec::<(String, String)>::new(), value);
        let long = "x".repeat(WORD + 1);
        let mut samples = vec![
            sample("b", &[], 2),
            sample("a", &[], 1),
            sample("b", &[], 3),
            sample("", &[], 1),
            sample(&long, &[], 1),
            sample("c", &[("device", &long)], 1),
            sample("c", &[(&long, "sda")], 1),
            // Whose it is, is not for the cell to say; nor can a label be two.
            sample("c", &[("id", "another's")], 1),
            sample("c", &[("device", "sda"), ("device", "sdb")], 1),
            sample("c", &[("a", ""); LABELS + 1], 1),
        ];
        assert_eq!(told(&samples), [good("a", 1), good("b", 2)]);
        // One metric, whatever the order of its labels.
        samples = vec![
            sample("d", &[("x", "1"), ("y", "2")], 5),
            sample("d", &[("y", "2"), ("x", "1")], 6),
            sample("d", &[("x", "2"), ("y", "2")], 7),
        ];
        assert_eq!(told(&samples).iter().map(|(_, _, value)| *value).collect::<Vec<_>>(), [5, 7]);
        assert_eq!(
            told(&(0..1000).map(|n| sample(&format!("m{n}"), &[], n)).collect::<Vec<_>>()).len(),
            SERIES
        );
        let large = (0..200).map(|n| {
            sample(
                &format!("{n:0>WORD$}"),
                &[("a", &"v".repeat(WORD)), ("b", &"v".repeat(WORD))],
                n,
            )
        });
        let kept: usize = told(&large.collect::<Vec<_>>())
            .iter()
            .map(|(name, labels, _)| name.len() + labels.len() * WORD)
            .sum();
        assert!((LONGEST / 2..LONGEST).contains(&kept), "{kept}");
    }

    #[test]
    fn a_shape_is_there_once_and_goes_with_the_last_who_has_it() {
        let (mut shapes, now) = (Shapes::default(), received());
        let mut of = |value| {
            Samples::of(
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
        Samples::of(&[sample("c", &[], 1)], 0, None, &mut shapes, now);
        assert_eq!(shapes.0.len(), 1);
    }
}
