//! Market of an instance.

use kiyot_engine::request::{
    LaunchType,
    keys::{LAUNCH_TYPE, SPOT_INSTANCE},
};
use kiyot_values::problems::{Field, Problem, Report};

use super::text::boolean;

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
