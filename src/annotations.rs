//! Pod annotations as a validated request for a cell.

use std::collections::BTreeMap;

use kiyot_config::PROVIDERS;
use kiyot_engine::request::{
    CellRequest,
    keys::{
        ARCHITECTURE, CLOUD_ROUTE, CPU, GPU, HEALTHY_TIMEOUT, INSTANCE_PROFILE, INSTANCE_TYPE,
        ISOLATION, KEYS, LAUNCH_TYPE, MAX_PRICE, MEMORY, PRIVATE_IP_ONLY, PROVIDER,
        SECURITY_GROUPS, SPOT_INSTANCE, START_WITHIN, SUSTAINED_CPU, VOLUME_SIZE,
    },
};
use kiyot_values::problems::{Field, Problem, Problems, Report};
use serde_json::Value;

use self::{
    architecture::architecture,
    gpu::gpu,
    healthy_timeout::healthy_timeout,
    instance_profile::instance_profile,
    instance_type::instance_type,
    isolation::isolation,
    launch_type::launch_type,
    max_price::max_price,
    misspelling::meant_by,
    network::{cloud_routes, security_groups},
    size::{cpu, memory, volume_size},
    start_within::start_within,
    text::boolean,
};

mod architecture;
mod gpu;
mod healthy_timeout;
mod identity;
mod instance_profile;
mod instance_type;
mod isolation;
mod launch_type;
mod max_price;
mod misspelling;
mod network;
mod size;
mod start_within;
mod text;
mod unknown_keys;

pub use identity::identity;
pub use unknown_keys::{shown_keys, unknown_keys};

/// Limit on the misspelt keys that are reported.
const MAX_REPORTED_KEYS: usize = 8;

/// Parses a pod's annotations, or returns all problems. A misspelt key is a problem; other
/// unknown keys are ignored.
pub fn parse<'a>(
    annotations: impl IntoIterator<Item = (&'a String, &'a String)>,
) -> Result<CellRequest, Problems> {
    let (mut known, mut misspelt) = (BTreeMap::new(), BTreeMap::new());
    for (key, value) in annotations {
        if KEYS.contains(&key.as_str()) {
            known.insert(key.as_str(), value.as_str());
        } else if let Some(meant) = meant_by(key) {
            misspelt.insert(key.as_str(), meant);
            if misspelt.len() > MAX_REPORTED_KEYS {
                misspelt.pop_last();
            }
        }
    }
    let report = Report::default();
    let field =
        |key: &str| known.get(key).map(|value| Field::new(key, Value::from(*value), &report));
    let request = CellRequest {
        launch_type: launch_type(field(LAUNCH_TYPE), field(SPOT_INSTANCE), &report),
        instance_type: field(INSTANCE_TYPE).and_then(instance_type),
        milli_cpus: field(CPU).and_then(cpu),
        memory_bytes: field(MEMORY).and_then(memory),
        gpu: field(GPU).and_then(gpu),
        architecture: field(ARCHITECTURE).and_then(architecture),
        max_price: field(MAX_PRICE).and_then(max_price),
        sustained_cpu: field(SUSTAINED_CPU).and_then(boolean).unwrap_or_default(),
        volume_size_gib: field(VOLUME_SIZE).and_then(volume_size),
        private_ip_only: field(PRIVATE_IP_ONLY).and_then(boolean).unwrap_or_default(),
        security_groups: field(SECURITY_GROUPS).and_then(security_groups).unwrap_or_default(),
        instance_profile: field(INSTANCE_PROFILE).and_then(instance_profile),
        healthy_timeout: field(HEALTHY_TIMEOUT).and_then(healthy_timeout),
        cloud_routes: field(CLOUD_ROUTE).and_then(cloud_routes).unwrap_or_default(),
        provider: field(PROVIDER).and_then(|field| field.choice(PROVIDERS)),
        isolation: field(ISOLATION).and_then(isolation),
        start_within: field(START_WITHIN).and_then(start_within),
        rule: None,
    };
    for (key, meant) in misspelt {
        // A misspelt key is about as long as a known key, hence short.
        let at = key.escape_debug().to_string();
        report.add(Problem::new(at, format!("is unknown; did you mean {meant}?")));
    }
    report.finish("the pod's annotations", request)
}

#[cfg(test)]
mod tests;
