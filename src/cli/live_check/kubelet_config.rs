//! The part of a kubelet's configuration that matters to cells, from its files and its flags.

use std::collections::BTreeMap;

use kiyot_kubernetes::capacity::Taint;
use serde::Deserialize;
use serde_json::{Map, Value, json};

/// Flags with a text that are fields too.
const TEXT_FLAGS: [(&str, &str); 6] = [
    ("container-runtime-endpoint", "containerRuntimeEndpoint"),
    ("cpu-manager-policy", "cpuManagerPolicy"),
    ("image-service-endpoint", "imageServiceEndpoint"),
    ("memory-manager-policy", "memoryManagerPolicy"),
    ("node-status-update-frequency", "nodeStatusUpdateFrequency"),
    ("topology-manager-policy", "topologyManagerPolicy"),
];
const FEATURE_GATES: &str = "featureGates";

/// Fields of a `KubeletConfiguration`.
pub(super) type Fields = Map<String, Value>;

/// Configuration of a kubelet; `None` for its defaults.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct KubeletConfig {
    pub(super) container_runtime_endpoint: Option<String>,
    pub(super) image_service_endpoint: Option<String>,
    pub(super) cpu_manager_policy: Option<String>,
    pub(super) memory_manager_policy: Option<String>,
    pub(super) topology_manager_policy: Option<String>,
    pub(super) memory_reservation_policy: Option<String>,
    pub(super) max_pods: Option<u64>,
    pub(super) node_status_update_frequency: Option<String>,
    pub(super) node_status_report_frequency: Option<String>,
    pub(super) register_with_taints: Vec<Taint>,
    pub(super) feature_gates: BTreeMap<String, bool>,
}

impl KubeletConfig {
    /// Merges fields. Later fields replace earlier fields, empty values are defaults.
    pub(super) fn merged(parts: impl IntoIterator<Item = Fields>) -> serde_json::Result<Self> {
        let mut all = Fields::new();
        for (name, value) in parts.into_iter().flatten() {
            match (all.get_mut(&name), value) {
                (Some(Value::Object(gates)), Value::Object(more)) if name == FEATURE_GATES => {
                    gates.extend(more);
                }
                (_, value) => {
                    all.insert(name, value);
                }
            }
        }
        all.retain(|_, value| !value.is_null() && *value != json!("") && *value != json!(0));
        serde_json::from_value(Value::Object(all))
    }
}

/// Flags of a kubelet.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Flags {
    /// `--config`
    pub(super) file: Option<String>,
    /// `--config-dir`
    pub(super) directory: Option<String>,
    /// Flags that are fields too.
    pub(super) fields: Fields,
}

impl Flags {
    /// Reads the arguments of a command line, as pflag does. Other flags are skipped.
    pub(super) fn read<'a>(arguments: impl IntoIterator<Item = &'a str>) -> Self {
        let mut flags = Self::default();
        let mut arguments = arguments.into_iter().skip(1).take_while(|it| *it != "--").peekable();
        while let Some(argument) = arguments.next() {
            let Some(flag) = argument.strip_prefix("--") else { continue };
            match flag.split_once('=') {
                Some((name, value)) => flags.set(name, value),
                None => {
                    if let Some(value) = arguments.next_if(|next| !next.starts_with("--")) {
                        flags.set(flag, value);
                    }
                }
            }
        }
        flags
    }

    fn set(&mut self, name: &str, value: &str) {
        let name = name.replace('_', "-");
        let (field, value) = match name.as_str() {
            "config" => return self.file = Some(value.to_owned()),
            "config-dir" => return self.directory = Some(value.to_owned()),
            "max-pods" => ("maxPods", json!(value.parse::<u64>().unwrap_or_default())),
            "register-with-taints" => {
                let taints: Vec<Value> = value.split(',').map(taint).collect();
                ("registerWithTaints", taints.into())
            }
            "feature-gates" => {
                let gates = value.split(',').filter_map(|gate| gate.split_once('='));
                let gates =
                    gates.map(|(gate, on)| (gate.trim().to_owned(), json!(on.trim() == "true")));
                (FEATURE_GATES, Value::Object(gates.collect()))
            }
            name => match TEXT_FLAGS.iter().find(|(flag, _)| *flag == name) {
                Some((_, field)) => (*field, json!(value)),
                None => return,
            },
        };
        self.fields.insert(field.to_owned(), value);
    }
}

/// Reads a taint such as `cri=kiyot:NoSchedule`.
fn taint(text: &str) -> Value {
    let (key, effect) = text.split_once(':').unwrap_or((text, ""));
    let (key, value) = key.split_once('=').unwrap_or((key, ""));
    json!({ "key": key, "value": value, "effect": effect })
}

#[cfg(test)]
mod tests {
    use proptest::{option, prelude::*};

    use super::*;

    proptest! {
        #[test]
        fn flags_are_read_as_the_same_fields_of_a_file(
            endpoint in option::of("[a-z:/.]{1,20}"),
            cpu in option::of("none|static"),
            topology in option::of("none|restricted"),
            pods in option::of(1..1000_u64),
            frequency in option::of("[1-9]s"),
            gate: Option<bool>,
            is_joined: bool,
        ) {
            let pods_text = pods.map(|pods| pods.to_string());
            let gate_text = gate.map(|on| format!("Other=true,MemoryQoS={on}"));
            let all = [
                ("container-runtime-endpoint", endpoint.as_ref()),
                ("cpu-manager-policy", cpu.as_ref()),
                ("topology_manager_policy", topology.as_ref()),
                ("max-pods", pods_text.as_ref()),
                ("node-status-update-frequency", frequency.as_ref()),
                ("feature-gates", gate_text.as_ref()),
            ];
            let mut line = vec!["kubelet".to_owned(), "--v".to_owned(), "--unknown=1".to_owned()];
            for (name, value) in all {
                let Some(value) = value else { continue };
                if is_joined {
                    line.push(format!("--{name}={value}"));
                } else {
                    line.extend([format!("--{name}"), value.clone()]);
                }
            }
            line.extend(["--".to_owned(), "--max-pods=7".to_owned()]);
            let flags = Flags::read(line.iter().map(String::as_str));
            let gates = gate.map(|on| json!({ "Other": true, "MemoryQoS": on }));
            let file = json!({
                "kind": "KubeletConfiguration",
                "containerRuntimeEndpoint": endpoint,
                "cpuManagerPolicy": cpu,
                "topologyManagerPolicy": topology,
                "maxPods": pods,
                "nodeStatusUpdateFrequency": frequency,
                "featureGates": gates,
            });
            let Value::Object(file) = file else { unreachable!() };
            prop_assert_eq!((&flags.file, &flags.directory), (&None, &None));
            let [flags, file] = [flags.fields, file].map(|one| KubeletConfig::merged([one]));
            prop_assert_eq!(flags.unwrap(), file.unwrap());
        }
    }

    #[test]
    fn later_fields_replace_earlier_ones_and_empty_values_are_defaults() {
        let line = "kubelet --config /etc/a.yaml --config-dir=/etc/a.d --max-pods=5 \
                    --register-with-taints=a=b:NoSchedule,cri=kiyot:NoSchedule \
                    --feature-gates A=true --image-service-endpoint=";
        let flags = Flags::read(line.split_whitespace());
        assert_eq!(
            (flags.file.as_deref(), flags.directory.as_deref()),
            (Some("/etc/a.yaml"), Some("/etc/a.d"))
        );
        let file = json!({
            "maxPods": 250,
            "cpuManagerPolicy": "",
            "memoryManagerPolicy": "Static",
            "imageServiceEndpoint": "unix:///a.sock",
            "featureGates": { "A": false, "B": false },
            "registerWithTaints": [{ "key": "c", "effect": "NoExecute", "timeAdded": null }],
            "authentication": { "anonymous": { "enabled": false } },
        });
        let Value::Object(file) = file else { unreachable!() };
        let merged = KubeletConfig::merged([file, flags.fields]).unwrap();
        let own = Taint { key: "cri".into(), value: "kiyot".into(), effect: "NoSchedule".into() };
        assert_eq!(merged.register_with_taints[1], own);
        let gates = [("A".to_owned(), true), ("B".to_owned(), false)];
        let expected = KubeletConfig {
            max_pods: Some(5),
            memory_manager_policy: Some("Static".to_owned()),
            feature_gates: gates.into(),
            register_with_taints: merged.register_with_taints.clone(),
            ..KubeletConfig::default()
        };
        assert_eq!(merged, expected);
        let wrong = Fields::from_iter([("maxPods".to_owned(), json!("many"))]);
        assert!(KubeletConfig::merged([wrong]).is_err());
    }
}
