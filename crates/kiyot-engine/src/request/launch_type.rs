//! Market of an instance.

/// Market of an instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LaunchType {
    /// On-demand: at the list price, without interruption.
    #[default]
    OnDemand,
    /// Spot: at the market's price, until EC2 reclaims it.
    Spot,
    /// Spot where there is capacity at an allowed price, otherwise on-demand.
    SpotPreferred,
}

impl std::fmt::Display for LaunchType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::OnDemand => "On-Demand",
            Self::Spot => "Spot",
            Self::SpotPreferred => "Spot-Preferred",
        })
    }
}
