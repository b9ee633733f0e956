//! Refusals of launches.

use std::sync::Arc;

use crate::placement::{Market, Offering, RefusedQuota};

/// The refusal of a launch. The offerings that a variant lists are candidates of the launch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LaunchRefusal {
    /// These offerings.
    Offerings(Vec<Offering>),
    /// An instance type that the account or the image does not allow. The provider's code can also
    /// mean a wrong request.
    Type {
        /// The provider's code.
        code: Arc<str>,
        /// The offerings of the type.
        offerings: Vec<Offering>,
    },
    /// A zone without capacity for any instance type.
    Zone(String),
    /// A market, for every instance type.
    Market(Market),
    /// A full quota.
    Quota {
        /// The quota.
        quota: Arc<RefusedQuota>,
        /// The offerings that it counts.
        offerings: Vec<Offering>,
    },
    /// All offerings: the account can launch nothing for a while, for any pod.
    All(Vec<Offering>),
}

impl LaunchRefusal {
    /// Returns whether an offering is refused: the next launch of the order leaves it out.
    pub fn refuses(&self, offering: &Offering) -> bool {
        match self {
            Self::Offerings(offerings)
            | Self::Type { offerings, .. }
            | Self::Quota { offerings, .. }
            | Self::All(offerings) => offerings.contains(offering),
            Self::Zone(zone) => *zone == offering.zone,
            Self::Market(market) => *market == offering.market,
        }
    }
}
