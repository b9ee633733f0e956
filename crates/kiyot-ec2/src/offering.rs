//! Instance types by zone, and spot prices.

/// An instance type that a zone has (`InstanceTypeOffering`).
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct TypeInZone {
    /// The instance type.
    pub instance_type: String,
    /// The availability zone.
    pub zone: String,
}

/// The spot price of an instance type in a zone (`SpotPrice`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpotPrice {
    /// The instance type.
    pub instance_type: String,
    /// The availability zone.
    pub zone: String,
    /// Dollars an hour, as a decimal number.
    pub price: String,
}
