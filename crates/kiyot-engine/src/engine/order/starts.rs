//! Histograms of starts by kind of cell: the time to each step, and the cost.

use std::{collections::BTreeMap, fmt, time::Duration};

use kiyot_values::price::Cost;

use crate::{
    engine::{
        Engine, Now, Step, Timeline, cell::Cell, histogram::Histogram, order::start_times::family,
    },
    id::CellId,
};

/// The upper bounds of times, in milliseconds: from a warm cell of the node to a slow boot.
const MILLIS: &[u64] = &[
    50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 30_000, 60_000, 120_000, 300_000,
    600_000,
];
/// The upper bounds of costs, in millionths of a dollar: from 0.01 cents to 1000 dollars.
const MICROS: &[u64] =
    &[100, 1_000, 10_000, 100_000, 1_000_000, 10_000_000, 100_000_000, 1_000_000_000];
/// Bounds the kinds of cells; cells of further kinds are counted without a family.
const MAX_KINDS: usize = 100;

/// A kind of cells, as labels of their histograms.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Kind {
    /// The family of the instance type, if known: `t4g` of `t4g.nano`.
    pub family: Option<String>,
    /// True for cells of warm pools.
    pub is_warm: bool,
}

/// The histograms of a kind of cells.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Starts {
    /// The milliseconds until each step of [`Timeline::STEPS`], since the cell was requested, or
    /// its pod took it.
    steps: [Histogram; Timeline::STEPS.len()],
    /// The cost of ended cells, in millionths of a dollar.
    cost: Histogram,
}

/// The histograms of this daemon.
#[derive(Debug, Default)]
pub(in crate::engine) struct AllStarts {
    by_kind: BTreeMap<Kind, Starts>,
}

impl Default for Starts {
    fn default() -> Self {
        Self {
            steps: std::array::from_fn(|_| Histogram::new(MILLIS)),
            cost: Histogram::new(MICROS),
        }
    }
}

impl Starts {
    /// Returns the histograms of the steps, by name, in milliseconds.
    pub fn steps(&self) -> impl Iterator<Item = (&'static str, &Histogram)> {
        Timeline::STEPS.iter().map(|(_, name)| *name).zip(&self.steps)
    }

    /// Returns the histogram of the cost, in millionths of a dollar.
    pub fn cost(&self) -> &Histogram {
        &self.cost
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.family.as_deref().unwrap_or_default())?;
        f.write_str(if self.is_warm { " (warm)" } else { " (cold)" })
    }
}

impl AllStarts {
    fn of(&mut self, kind: Kind) -> &mut Starts {
        let is_kept = self.by_kind.len() < MAX_KINDS || self.by_kind.contains_key(&kind);
        let kind = if is_kept { kind } else { Kind { family: None, ..kind } };
        self.by_kind.entry(kind).or_default()
    }
}

impl AllStarts {
    /// Returns the histogram of each step, for all cold and for all warm starts, under the given
    /// names.
    pub(in crate::engine) fn by_step(
        &self,
        names: [&'static str; Timeline::STEPS.len()],
    ) -> Vec<(&'static str, &'static str, Histogram)> {
        let mut sums = Vec::with_capacity(2 * names.len());
        for (start, is_warm) in [("cold", false), ("warm", true)] {
            let of_start = |(kind, _): &(&Kind, &Starts)| kind.is_warm == is_warm;
            for (index, name) in names.into_iter().enumerate() {
                let mut sum = Histogram::new(MILLIS);
                for (_, starts) in self.by_kind.iter().filter(of_start) {
                    sum.add(&starts.steps[index]);
                }
                sums.push((name, start, sum));
            }
        }
        sums
    }
}

impl Cell {
    /// Returns the kind under which the cell is counted.
    pub(in crate::engine) fn kind(&self) -> Kind {
        let family = self.offering().map(|it| family(&it.offering.instance_type).to_owned());
        Kind { family, is_warm: self.pool.is_some() }
    }
}

impl Engine {
    /// Records a step of a cell's start, once, and counts the time until the step. A previous
    /// daemon's cell is not counted, because its launch waited for this daemon. Returns whether the
    /// step is new.
    pub(in crate::engine) fn reach(&mut self, id: &CellId, step: Step, now: Now) -> bool {
        let Some(cell) = self.cells.get_mut(id) else { return false };
        let is_new = cell.timeline.reach(step, now.unix);
        let cell = &*cell;
        if let Some(requested) = cell.requested.filter(|_| is_new) {
            let time = now.boot.saturating_sub(requested);
            if step == Step::Bound
                && cell.pool.is_none()
                && let Some(offered) = cell.offering()
                && let Some(provider) = self.providers.of(cell)
            {
                self.start_times.add(provider.key(), &offered.offering.instance_type, time);
            }
            let histogram = &mut self.starts.of(cell.kind()).steps[step as usize];
            histogram.observe(millis(time));
        }
        is_new
    }

    /// Counts the cost of a cell, or of its time with a pod.
    pub(in crate::engine) fn count_cost(&mut self, kind: Kind, cost: Cost) {
        self.starts.of(kind).cost.observe(cost.micros());
    }

    pub(in crate::engine) fn starts_of(&self, kind: &Kind) -> Starts {
        self.starts.by_kind.get(kind).cloned().unwrap_or_default()
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
