//! The accuracy of prices.

use std::fmt;

/// The accuracy of a price.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Accuracy {
    /// The price of the offering.
    #[default]
    Exact,
    /// The price is not known, and is this at most.
    AtMost,
    /// The price is not known; that of another region stands for it, and may be lower or higher.
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
