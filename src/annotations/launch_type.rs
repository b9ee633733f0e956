//! Market of an instance.

use kiyot_values::problems::{Field, Problem, Report};

use super::{LAUNCH_TYPE, SPOT_INSTANCE, text::boolean};

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

/// Reads the launch type, or its deprecated alias.
pub(super) fn launch_type(
    kind: Option<Field<'_>>,
    spot: Option<Field<'_>>,
    report: &Report,
) -> LaunchType {
    let kind = kind.and_then(|field| {
        let types = [LaunchType::OnDemand, LaunchType::Spot, LaunchType::SpotPreferred];
        field.read("Spot, On-Demand or Spot-Preferred", |text| {
            types.into_iter().find(|kind| kind.to_string().eq_ignore_ascii_case(text))
        })
    });
    let spot = spot
        .and_then(boolean)
        .map(|spot| if spot { LaunchType::Spot } else { LaunchType::OnDemand });
    if let (Some(kind), Some(spot)) = (kind, spot)
        && kind != spot
    {
        report.add(Problem::new(
            SPOT_INSTANCE,
            format!("says {spot} where {LAUNCH_TYPE} says {kind}; allowed: {LAUNCH_TYPE} alone"),
        ));
    }
    kind.or(spot).unwrap_or_default()
}
