//! Security groups and routes of a cell.

use kiyot_values::{cidr::Cidr, problems::Field};

use super::text::is_name;

/// The highest limit that EC2 grants on the security groups of an interface. The configured limit
/// is checked together with the groups of every cell.
const MAX_SECURITY_GROUPS: usize = 16;
/// Limit on the routes of a cell. A VPC's route table has room for 50 by default, for all cells
/// together.
const MAX_CLOUD_ROUTES: usize = 5;

/// Reads a comma list of different groups.
pub(super) fn security_groups(field: Field<'_>) -> Option<Vec<String>> {
    let allowed = format!(
        "1 to {MAX_SECURITY_GROUPS} different security groups such as sg-0123456789abcdef0, \
         separated by commas"
    );
    field.read(&allowed, |text| {
        // At most one group more than allowed: each is compared with all others, and a pod's
        // annotations have room for hundreds of thousands.
        let groups: Vec<String> = text
            .split(',')
            .take(MAX_SECURITY_GROUPS + 1)
            .map(|group| group.trim().to_owned())
            .collect();
        let fit = groups.len() <= MAX_SECURITY_GROUPS
            && groups.iter().all(|group| is_name(group, &['.', '-', '_']));
        let different =
            groups.iter().enumerate().all(|(index, group)| !groups[..index].contains(group));
        (fit && different).then_some(groups)
    })
}

/// Reads networks, separated by white space.
pub(super) fn cloud_routes(field: Field<'_>) -> Option<Vec<Cidr>> {
    let allowed = format!(
        "1 to {MAX_CLOUD_ROUTES} networks such as 172.16.0.0/12, separated by white space, \
         without host bits"
    );
    field.read(&allowed, |text| {
        let routes: Vec<Cidr> =
            text.split_whitespace().map(|route| route.parse().ok()).collect::<Option<_>>()?;
        (1..=MAX_CLOUD_ROUTES).contains(&routes.len()).then_some(routes)
    })
}
