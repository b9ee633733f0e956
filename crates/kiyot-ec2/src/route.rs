//! Route tables of a VPC.

/// The route tables to list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RouteTableFilter {
    /// All tables of a VPC.
    Vpc(String),
    /// Tables with a route whose target is one of these instances, which may have ended. EC2
    /// accepts at most 200 values of a filter.
    Targets(Vec<String>),
}

/// A route table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RouteTable {
    /// The id.
    pub id: String,
    /// True for the main table, which serves the VPC's subnets without an association.
    pub is_main: bool,
    /// The subnets that are associated with it.
    pub subnets: Vec<String>,
    /// The IPv4 routes.
    pub routes: Vec<Route>,
}

/// An IPv4 route.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Route {
    /// The network, such as `10.8.0.0/16`.
    pub network: String,
    /// The id of its target: an instance, a gateway or an interface; `local` for a network of the
    /// VPC itself; `None` for any other target.
    pub target: Option<String>,
}

/// The target of the networks of the VPC itself.
pub const LOCAL_TARGET: &str = "local";
