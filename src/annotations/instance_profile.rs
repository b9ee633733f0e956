//! IAM instance profile of a cell.

use kiyot_values::problems::Field;

use super::text::is_name;

/// Reads an ARN.
pub(super) fn instance_profile(field: Field<'_>) -> Option<String> {
    field.read(
        "the ARN of an instance profile such as arn:aws:iam::123456789012:instance-profile/name",
        |text| {
            let [arn, partition, service, region, account, resource] =
                text.splitn(6, ':').collect::<Vec<_>>().try_into().ok()?;
            let account_fits =
                account.len() == 12 && account.bytes().all(|byte| byte.is_ascii_digit());
            let partition_fits =
                partition == "aws" || (partition.starts_with("aws-") && is_name(partition, &['-']));
            let name = resource.strip_prefix("instance-profile/")?;
            // The characters of IAM names and their paths.
            let name_fits =
                !name.ends_with('/') && is_name(name, &['/', '+', '=', ',', '.', '@', '_', '-']);
            (arn == "arn"
                && partition_fits
                && service == "iam"
                && region.is_empty()
                && account_fits
                && name_fits)
                .then(|| text.to_owned())
        },
    )
}
