//! Phrases that the daemon and milpactl share.

use std::fmt::Display;

use crate::admin::CellPhase;

/// Returns a number with a noun, and a verb if the texts have one: `one` for 1, `other` for all
/// other numbers.
pub fn counted<N: Display + PartialEq + From<u8>>(number: N, one: &str, other: &str) -> String {
    format!("{number} {}", if number == N::from(1) { one } else { other })
}

/// Returns the word of a cell's phase.
pub fn cell_phase(phase: CellPhase) -> &'static str {
    match phase {
        CellPhase::Unspecified => "Unknown",
        CellPhase::CellRequested => "Requested",
        CellPhase::CellLaunching => "Launching",
        CellPhase::CellBooting => "Booting",
        CellPhase::CellIdle => "Idle",
        CellPhase::CellBinding => "Binding",
        CellPhase::CellBound => "Bound",
        CellPhase::CellStopping => "Stopping",
        CellPhase::CellTerminating => "Terminating",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn noun_of_one_is_singular() {
        let texts = [0_u64, 1, 2].map(|number| counted(number, "cell boots", "cells boot"));
        assert_eq!(texts, ["0 cells boot", "1 cell boots", "2 cells boot"]);
    }
}
