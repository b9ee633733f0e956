//! Usage of pods, and costs.

use std::time::Instant;

use kiyot_engine::placement::Market;
use kiyot_proto::admin;

use super::{Inventory, PodItem, PodKey};

impl Inventory {
    /// Returns the usage of the pods with these keys, from the last reports of their cells.
    pub fn usage(&self, keys: &[PodKey]) -> Vec<admin::PodUsage> {
        keys.iter().filter_map(|key| self.usage_of(key)).collect()
    }

    fn usage_of(&self, key: &PodKey) -> Option<admin::PodUsage> {
        let PodItem::Sandbox(id) = &key.item else { return None };
        let sandbox = self.pods.sandbox(id.as_str()).ok()?;
        let usage = self.pods.usage_of(id, Instant::now())?.linux?;
        let (namespace, name) = key.name.split_once('/')?;
        let value = |value: Option<kiyot_proto::cri::UInt64Value>| {
            value.map(|value| value.value).unwrap_or_default()
        };
        let cpu = usage.cpu.unwrap_or_default();
        Some(admin::PodUsage {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            unix_nanos: cpu.timestamp,
            cpu_nanocores: value(cpu.usage_nano_cores),
            memory_bytes: value(usage.memory.unwrap_or_default().working_set_bytes),
            disk_bytes: sandbox.ephemeral_storage,
            window_nanos: u64::try_from(self.pods.usage_window(id)).unwrap_or_default(),
        })
    }

    /// Returns hours and cost by instance type, and the costs of namespaces.
    pub fn costs(&self) -> (Vec<admin::TypeUsage>, Vec<admin::NamespaceCost>) {
        let types = self.cells.type_usage().into_iter();
        let types = types.map(|((instance_type, market), usage)| admin::TypeUsage {
            instance_type: instance_type.unwrap_or_default(),
            spot: market == Market::Spot,
            millihours: u64::try_from(usage.time.as_millis() / 3600).unwrap_or(u64::MAX),
            cost_micros: usage.cost.micros(),
            cells: usage.cells,
        });
        let namespaces = self.cells.numbers().namespaces.into_iter();
        let namespaces = namespaces.map(|(namespace, account)| admin::NamespaceCost {
            namespace,
            cells: u32::try_from(account.cells).unwrap_or(u32::MAX),
            price_micros: account.price.micros(),
            cost_micros: account.cost.micros(),
        });
        (types.collect(), namespaces.collect())
    }
}
