//! Quotas of virtual CPUs. Each market and family of instance types has a quota for all zones of a
//! region.

use kiyot_engine::placement::{InstanceType, Offering, RefusedQuota};

use crate::provider::Ec2;

impl Ec2 {
    /// Returns the quota that has no room for an offering. It has fewer vCPUs left than the type
    /// needs, so no type of the family with at least as many vCPUs fits in any zone.
    pub(super) async fn refused_quota(&self, refused: &Offering) -> RefusedQuota {
        let added = self.added_types.last().await.unwrap_or_default();
        let built_in = self.types.entries().iter().map(|entry| &entry.instance_type);
        let known = built_in.chain(added.iter().map(|added| &added.instance_type));
        refused_of(known, refused)
    }
}

/// Returns the quota that has no room for an offering of one of these types. The size of an unknown
/// type is unknown, so its quota refuses only this type.
fn refused_of<'a>(
    known: impl Iterator<Item = &'a InstanceType> + Clone,
    refused: &Offering,
) -> RefusedQuota {
    let Offering { instance_type, market, .. } = refused;
    let family = quota_family(instance_type);
    let size = known.clone().find(|own| own.name == *instance_type).map(|own| own.milli_cpus);
    let is_refused = |own: &&InstanceType| {
        size.is_some_and(|size| own.milli_cpus >= size) && quota_family(&own.name) == family
    };
    let of_family = known.filter(is_refused).map(|own| own.name.clone());
    let types = of_family.chain([instance_type.clone()]).collect();
    RefusedQuota { market: *market, types }
}

/// Returns the family of instance types that share a quota of virtual CPUs ("Amazon EC2 instance
/// quotas"): the standard families A, C, D, H, I, M, R, T and Z share a quota, and so do G and VT;
/// each other family has its own.
fn quota_family(instance_type: &str) -> &str {
    let end = instance_type.find(|char: char| !char.is_ascii_alphabetic());
    match &instance_type[..end.unwrap_or(instance_type.len())] {
        "g" | "gr" | "vt" => "g",
        own @ ("dl" | "hpc" | "inf" | "mac" | "trn") => own,
        standard if standard.starts_with(['a', 'c', 'd', 'h', 'i', 'm', 'r', 't', 'z']) => {
            "standard"
        }
        own => own,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kiyot_engine::placement::{CatalogueFile, Market};

    #[test]
    fn quota_is_of_the_types_family() {
        for (family, types) in [
            ("standard", ["t3.nano", "m7i-flex.large", "is4gen.large"]),
            ("g", ["g5.xlarge", "vt1.3xlarge", "gr6.4xlarge"]),
            ("inf", ["inf1.xlarge", "inf2.xlarge", "inf2.48xlarge"]),
            ("hpc", ["hpc6a.48xlarge", "hpc7g.4xlarge", "hpc7a.12xlarge"]),
            ("x", ["x1.16xlarge", "x2gd.medium", "x2iedn.xlarge"]),
            ("u", ["u-6tb1.metal", "u7i-12tb.224xlarge", "u-3tb1.56xlarge"]),
        ] {
            assert_eq!(types.map(quota_family), [family; 3]);
        }
        assert_eq!((quota_family(""), quota_family("played")), ("", "played"));
    }

    /// Verifies A13.
    #[test]
    fn full_quota_refuses_types_of_its_family_that_are_as_large_or_larger() {
        let catalogue = CatalogueFile::built_in().catalogue;
        let refused = |name: &str| {
            let tried = Offering {
                instance_type: name.to_owned(),
                zone: "us-east-1a".to_owned(),
                market: Market::Spot,
            };
            refused_of(catalogue.entries().iter().map(|entry| &entry.instance_type), &tried)
        };
        let quota = refused("m5.xlarge");
        for (name, zone, market, is_refused) in [
            ("m5.xlarge", "us-east-1b", Market::Spot, true),
            ("c7g.16xlarge", "us-east-1a", Market::Spot, true),
            ("t3.xlarge", "us-east-1a", Market::Spot, true),
            ("m5.large", "us-east-1a", Market::Spot, false),
            ("g5.xlarge", "us-east-1a", Market::Spot, false),
            ("m5.xlarge", "us-east-1a", Market::OnDemand, false),
        ] {
            let (instance_type, zone) = (name.to_owned(), zone.to_owned());
            let offering = Offering { instance_type, zone, market };
            assert_eq!(quota.refuses(&offering), is_refused, "{offering}");
        }
        assert_eq!(refused("m99.large").types, ["m99.large".to_owned()].into());
    }
}
