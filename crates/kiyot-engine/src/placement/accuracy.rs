//! The accuracy of prices.

use std::fmt;

/// The accuracy of a price.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Accuracy {
    /// The price of the offering.
    #[default]
    Exact,
    /// The price is unknown, and at most this.
    AtMost,
    /// The price is unknown. This is the price of another region, and may be too low or too high.
    Estimate,
}

impl fmt::Display for Accuracy {
    /// Writes the word before a price.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Exact => "at",
            Self::AtMost => "at most",
            Self::Estimate => "at about",
        })
    }
}
