//! Subnets.

/// A subnet of a VPC.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Subnet {
    /// The id.
    pub id: String,
    /// The id of its VPC.
    pub vpc: String,
    /// The availability zone.
    pub zone: String,
    /// The IPv4 network, such as `10.0.1.0/24`.
    pub network: String,
}
