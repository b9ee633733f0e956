//! Offerings: what a provider can launch.

use std::fmt;

/// The market of an instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Market {
    /// At a fixed price, until it is terminated.
    OnDemand,
    /// At a lower price, until the provider takes it back.
    Spot,
}

impl Market {
    /// Returns the value of the label in metrics.
    pub const fn label(self) -> &'static str {
        match self {
            Self::OnDemand => "on-demand",
            Self::Spot => "spot",
        }
    }
}

impl fmt::Display for Market {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::OnDemand => "On-Demand",
            Self::Spot => "Spot",
        })
    }
}

/// A combination of instance type, zone and market that can be launched.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Offering {
    /// The instance type, by the provider's name.
    pub instance_type: String,
    /// The zone, by the provider's name; empty if unknown.
    pub zone: String,
    /// The market.
    pub market: Market,
}

impl fmt::Display for Offering {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.instance_type)?;
        if !self.zone.is_empty() {
            write!(f, " in {}", self.zone)?;
        }
        write!(f, " ({})", self.market)
    }
}
