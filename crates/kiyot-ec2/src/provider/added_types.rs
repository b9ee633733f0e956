//! Instance types that the region has and the built-in file lacks, by DescribeInstanceTypes.
//!
//! The file has sizes and the baselines of burstable types; no call of EC2 shows the baselines. So
//! a type that is newer than the file is used unless it is burstable.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use kiyot_engine::{
    placement::{Catalogue, Gpus, InstanceType, Market},
    provider::{ErrorClass, ProviderError},
    request::Architecture,
};

use crate::{
    CallError, MAX_DESCRIBED_TYPES, TypeDescription, TypeInZone,
    provider::{Ec2, within},
};

/// Bounds the vCPUs of an instance type.
const MAX_CPUS: u64 = 100_000;
/// Bounds the memory of an instance type, in MiB: 64 PiB.
const MAX_MEMORY_MIB: u64 = 1 << 36;
/// Bounds the GPUs of an instance type.
const MAX_GPUS: u32 = 1024;
/// Bounds a name, in bytes.
const MAX_NAME_BYTES: usize = 64;
/// Bounds the types that are described: a region has some 1,400 in all.
const MAX_TYPES: usize = 1000;
/// Time limit for describing types that the built-in file lacks. They are described after the zones
/// of types are read; without descriptions the other types are used.
const TYPES_TIMEOUT: Duration = Duration::from_secs(8);

/// An instance type that the file lacks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct AddedType {
    /// The instance type.
    pub(super) instance_type: InstanceType,
    /// The markets that offer the type.
    pub(super) markets: Vec<Market>,
}

/// Returns the names of types that zones offer and the file lacks.
pub(super) fn names(
    types: &Catalogue,
    in_zones: &[TypeInZone],
    zones: &BTreeSet<String>,
) -> Vec<String> {
    let is_added = |entry: &&TypeInZone| {
        zones.contains(&entry.zone) && types.named(&entry.instance_type).is_none()
    };
    let names = in_zones.iter().filter(is_added).map(|entry| entry.instance_type.clone());
    let names: BTreeSet<String> = names.filter(|name| is_name(name)).collect();
    names.into_iter().take(MAX_TYPES).collect()
}

fn is_name(name: &str) -> bool {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || b".-_".contains(&byte);
    (1..=MAX_NAME_BYTES).contains(&name.len()) && name.bytes().all(fits)
}

impl AddedType {
    /// Returns the type of a description; `None` if it can't be used.
    pub(super) fn new(described: TypeDescription) -> Option<Self> {
        let number = |number: i64, limit: u64| {
            u64::try_from(number).ok().filter(|number| (1..=limit).contains(number))
        };
        let mut architectures: Vec<Architecture> =
            described.architectures.iter().filter_map(|name| Architecture::named(name)).collect();
        architectures.dedup();
        let gpus = match described.gpus {
            None => None,
            Some(gpus) => {
                let count = u32::try_from(gpus.count).ok().filter(|count| *count <= MAX_GPUS)?;
                let bounded = |text: String| text.chars().take(MAX_NAME_BYTES).collect();
                let (manufacturer, name) = (gpus.manufacturer.map(bounded), gpus.name.map(bounded));
                (count > 0).then_some(Gpus { count, manufacturer, name })
            }
        };
        let markets =
            [(described.has_on_demand, Market::OnDemand), (described.has_spot, Market::Spot)];
        let is_usable =
            is_name(&described.name) && !architectures.is_empty() && !described.is_burstable;
        is_usable.then_some(())?;
        Some(Self {
            instance_type: InstanceType {
                milli_cpus: number(described.vcpus, MAX_CPUS)? * 1000,
                memory_mib: number(described.memory_mib, MAX_MEMORY_MIB)?,
                name: described.name,
                architectures,
                baseline_milli_cpus: None,
                gpus,
                is_bare_metal: described.is_bare_metal,
                // A type that is newer than the file belongs to the Nitro System.
                is_nitro: true,
                is_current: described.is_current,
            },
            markets: markets.into_iter().filter(|(has, _)| *has).map(|(_, it)| it).collect(),
        })
    }
}

impl Ec2 {
    /// Returns the types that the zones offer and the built-in file lacks; empty if they were never
    /// read.
    pub(super) async fn added_types(
        &self,
        in_zones: &[TypeInZone],
        zones: &BTreeSet<String>,
    ) -> Arc<Vec<AddedType>> {
        let names = names(&self.types, in_zones, zones);
        if names.is_empty() {
            return Arc::default();
        }
        let read = || within(TYPES_TIMEOUT, "DescribeInstanceTypes", self.read_types(&names));
        self.added_types.get_or_default("types of the built-in file are used", read).await
    }

    async fn read_types(&self, names: &[String]) -> Result<Vec<AddedType>, CallError> {
        let mut types = Vec::new();
        for part in names.chunks(MAX_DESCRIBED_TYPES) {
            types.extend(self.api.instance_types(part).await?);
        }
        Ok(types.into_iter().filter_map(AddedType::new).collect())
    }

    /// Returns the instance type with a name. An unknown type that the built-in file lacks is
    /// described again, for example at the replay of a previous daemon's launch.
    pub(super) async fn instance_type(
        &self,
        name: &str,
    ) -> Result<Option<InstanceType>, ProviderError> {
        if let Some(entry) = self.types.named(name) {
            return Ok(Some(entry.instance_type.clone()));
        }
        let named = |types: &[AddedType]| {
            let found = types.iter().find(|added| added.instance_type.name == name);
            found.map(|added| added.instance_type.clone())
        };
        if let Some(known) = self.added_types.last().await.as_deref().and_then(|it| named(it)) {
            return Ok(Some(known));
        }
        let name = name.to_owned();
        let read = self.read_types(std::slice::from_ref(&name));
        let read = within(TYPES_TIMEOUT, "DescribeInstanceTypes", read).await;
        let described = read.map_err(|error| {
            // This call launched nothing, even if an earlier call did.
            ProviderError::new(ErrorClass::Transient, format!("describe {name}"), error)
        })?;
        Ok(described.into_iter().next().map(|added| added.instance_type))
    }
}

#[cfg(test)]
mod tests {
    use crate::TypeGpus;

    use super::{super::fake_api, *};
    use kiyot_engine::placement::CatalogueFile;

    fn described(name: &str) -> TypeDescription {
        TypeDescription {
            vcpus: 4,
            memory_mib: 16_384,
            architectures: vec!["i386".to_owned(), "x86_64".to_owned()],
            ..fake_api::described(name)
        }
    }

    /// Verifies V79.
    #[test]
    fn described_type_is_used_unless_it_is_burstable_or_broken() {
        let added = AddedType::new(described("z9.xlarge")).unwrap();
        assert_eq!(added.markets, [Market::OnDemand, Market::Spot]);
        let InstanceType { milli_cpus, memory_mib, architectures, .. } = added.instance_type;
        assert_eq!((milli_cpus, memory_mib), (4000, 16_384));
        assert_eq!(architectures, [Architecture::Amd64]);
        let gpus = TypeGpus { count: 2, manufacturer: Some("NVIDIA".into()), name: None };
        let with_gpus = TypeDescription { gpus: Some(gpus), ..described("z9g.xlarge") };
        assert_eq!(AddedType::new(with_gpus).unwrap().instance_type.gpus.unwrap().count, 2);
        for unusable in [
            TypeDescription { is_burstable: true, ..described("t9.nano") },
            TypeDescription { vcpus: 0, ..described("z9.xlarge") },
            TypeDescription { vcpus: -1, ..described("z9.xlarge") },
            TypeDescription { memory_mib: i64::MAX, ..described("z9.xlarge") },
            TypeDescription { architectures: vec!["i386".into()], ..described("z9.xlarge") },
            described("z9 xlarge"),
        ] {
            assert_eq!(AddedType::new(unusable.clone()), None, "{unusable:?}");
        }
    }

    /// Verifies V79.
    #[test]
    fn types_of_the_zones_are_described_only_if_the_file_lacks_them() {
        let types = CatalogueFile::built_in().catalogue;
        let in_zone = |name: &str, zone: &str| TypeInZone {
            instance_type: name.to_owned(),
            zone: zone.to_owned(),
        };
        let in_zones = [
            in_zone("t3.nano", "a"),
            in_zone("z9.large", "b"),
            in_zone("z9.large", "a"),
            in_zone("z9.xlarge", "c"),
            in_zone("z9 broken", "a"),
        ];
        let zones = ["a", "b"].map(str::to_owned).into();
        assert_eq!(names(&types, &in_zones, &zones), ["z9.large"]);
    }
}
