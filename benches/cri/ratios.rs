//! Ratios of two rows that are measured in turns: a slow round slows both rows.

use std::fmt;

/// Ratios of rounds, sorted.
#[derive(Debug)]
pub(crate) struct Ratios(Vec<f64>);

impl Ratios {
    /// Divides the value of each round of a row by the value of the same round of another row.
    pub(crate) fn of(row: &[f64], other: &[f64]) -> Self {
        let mut ratios: Vec<f64> = row.iter().zip(other).map(|(row, other)| row / other).collect();
        ratios.sort_unstable_by(f64::total_cmp);
        Self(ratios)
    }
}

/// The median, the least and the greatest, as columns of a table.
impl fmt::Display for Ratios {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(ratios) = self;
        let (least, most) = (ratios.first(), ratios.last());
        match (ratios.get(ratios.len() / 2), least, most) {
            (Some(median), Some(least), Some(most)) => {
                write!(f, "{median:.3} | {least:.3} | {most:.3}")
            }
            _ => write!(f, " |  | "),
        }
    }
}
