//! The JSON of a pod in the shape of the original milpactl, with more fields.

use kiyot_proto::admin::{Pod, PodPhase, Unit, UnitState};
use serde_json::{Map, Value, json};

use crate::age::time;

/// Returns the object of a pod.
pub(crate) fn of(pod: &Pod) -> Value {
    let offering = pod.offering.clone().unwrap_or_default();
    let resources = pod.resources.unwrap_or_default();
    let labels: Map<String, Value> = sorted(&pod.labels);
    let annotations: Map<String, Value> = sorted(&pod.annotations);
    let addresses: Vec<Value> = pod
        .addresses
        .iter()
        .map(|address| json!({ "type": address.r#type, "address": address.address }))
        .collect();
    let memory = match resources.memory_bytes {
        0 => String::new(),
        bytes => format!("{}Mi", bytes.div_ceil(1 << 20)),
    };
    let all = |object: fn(&Unit) -> Value| -> Vec<Value> { pod.units.iter().map(object).collect() };
    json!({
        "kind": "Pod",
        "apiVersion": "v1",
        "metadata": {
            "name": pod.name,
            "uid": pod.uid,
            "namespace": pod.namespace,
            "labels": labels,
            "annotations": annotations,
            "creationTimestamp": time(pod.created_unix_nanos),
        },
        "spec": {
            "phase": phase(pod.phase()),
            // A kubelet sends neither the policy nor which units are init units. The original ran
            // its own pods with these values.
            "restartPolicy": "Never",
            "units": all(unit),
            "initUnits": [],
            "imagePullSecrets": null,
            "instanceType": offering.instance_type,
            "spot": { "policy": if offering.spot { "Always" } else { "Never" } },
            "resources": {
                "cpu": cpu(resources.cpu_millis),
                "memory": memory,
                "gpu": resources.gpus,
                "sustainedCPU": resources.sustained_cpu,
            },
            "placement": { "availabilityZone": offering.zone },
            "runtimeClass": pod.runtime_handler,
        },
        "status": {
            "phase": phase(pod.phase()),
            "lastPhaseChange": time(pod.phase_since_unix_nanos),
            "boundNodeName": pod.cell,
            "boundInstanceID": pod.instance,
            "addresses": addresses,
            "startFailures": pod.start_failures,
            "spotFailure": pod.spot_failure,
            "unitStatuses": all(unit_status),
            "initUnitStatuses": [],
            "message": pod.message,
            "backend": pod.backend,
            "node": pod.node,
            "sandbox": pod.sandbox,
            "pricePerHourMicros": offering.price_micros,
            "priceIsAtMost": offering.price_is_at_most,
            "priceIsEstimate": offering.price_is_estimate,
            "otherAnnotations": pod.other_annotations,
        },
    })
}

/// Returns the name of a phase.
pub(crate) fn phase(phase: PodPhase) -> &'static str {
    match phase {
        PodPhase::Unspecified => "Unknown",
        PodPhase::Waiting => "Waiting",
        PodPhase::Dispatching => "Dispatching",
        PodPhase::Running => "Running",
        PodPhase::Succeeded => "Succeeded",
        PodPhase::Failed => "Failed",
        PodPhase::Terminated => "Terminated",
    }
}

fn sorted(map: &std::collections::HashMap<String, String>) -> Map<String, Value> {
    map.iter().map(|(key, value)| (key.clone(), value.as_str().into())).collect()
}

/// Returns CPUs such as `0.10`, as the original did.
fn cpu(millis: u64) -> String {
    match millis {
        0 => String::new(),
        millis => {
            let hundredths = millis.div_ceil(10);
            format!("{}.{:02}", hundredths / 100, hundredths % 100)
        }
    }
}

/// Returns a list, or null if it is empty, as Go encodes an absent slice.
fn or_null(texts: &[String]) -> Value {
    if texts.is_empty() { Value::Null } else { texts.into() }
}

fn unit(unit: &Unit) -> Value {
    // The daemon keeps no values.
    let env: Vec<Value> = unit.env.iter().map(|name| json!({ "name": name })).collect();
    json!({
        "name": unit.name,
        "image": unit.image,
        "command": or_null(&unit.command),
        "args": or_null(&unit.args),
        "env": env,
        "workingDir": unit.working_dir,
    })
}

fn unit_status(unit: &Unit) -> Value {
    let state = match unit.state() {
        UnitState::UnitRunning => {
            json!({ "running": { "startedAt": time(unit.started_unix_nanos) } })
        }
        UnitState::UnitTerminated => json!({ "terminated": {
            "exitCode": unit.exit_code,
            "reason": unit.reason,
            "message": unit.message,
            "startedAt": time(unit.started_unix_nanos),
            "finishedAt": time(unit.finished_unix_nanos),
        } }),
        UnitState::UnitWaiting | UnitState::Unspecified => json!({ "waiting": {
            "reason": if unit.message.is_empty() { &unit.reason } else { &unit.message },
            "startFailure": unit.start_failure,
        } }),
    };
    json!({
        "name": unit.name,
        "state": state,
        "restartCount": unit.restarts,
        "image": unit.image,
        "containerID": unit.container,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The example of the original, abridged.
    const ORIGINAL: &str = r#"{"kind":"Pod","apiVersion":"v1",
        "metadata":{"name":"p","uid":"u","namespace":"default","labels":{},"annotations":{}},
        "spec":{"phase":"Running","restartPolicy":"Never",
          "units":[{"name":"kube-proxy-1","image":"i","command":["/bin/sh","-c"],"args":null,
                    "env":[{"name":"KUBE_DNS_SERVICE_HOST"}]}],
          "initUnits":[],"imagePullSecrets":null,"instanceType":"c5.large","spot":{"policy":"Never"},
          "resources":{"cpu":"0.10","sustainedCPU":false},"placement":{"availabilityZone":""}},
        "status":{"phase":"Running","lastPhaseChange":"2018-10-16T17:59:27.894515581Z",
          "boundNodeName":"38c2b0b4","boundInstanceID":"i-0319c832acf318172",
          "addresses":[{"type":"PrivateIP","address":"172.20.33.93"}],
          "startFailures":0,"spotFailure":false,
          "unitStatuses":[{"name":"kube-proxy-1",
            "state":{"running":{"startedAt":"2018-10-16T11:06:57-07:00"}},
            "restartCount":0,"image":"i"}],
          "initUnitStatuses":[]}}"#;

    /// Asserts that every key of the original exists, with a value of its type.
    fn assert_covers(original: &Value, own: &Value, at: &str) {
        match (original, own) {
            (Value::Object(original), Value::Object(own)) => {
                for (key, value) in original {
                    let found = own.get(key);
                    let found = found.unwrap_or_else(|| panic!("{at}.{key} is missing"));
                    assert_covers(value, found, &format!("{at}.{key}"));
                }
            }
            (Value::Array(original), Value::Array(own)) => {
                for (value, found) in original.iter().zip(own) {
                    assert_covers(value, found, &format!("{at}[]"));
                }
                assert!(original.is_empty() || !own.is_empty(), "{at} is empty");
            }
            _ => assert_eq!(
                std::mem::discriminant(original),
                std::mem::discriminant(own),
                "{at}: {original} and {own}"
            ),
        }
    }

    fn unit_of(state: UnitState) -> Unit {
        Unit {
            name: "kube-proxy-1".to_owned(),
            image: "i".to_owned(),
            command: vec!["/bin/sh".to_owned()],
            env: vec!["KUBE_DNS_SERVICE_HOST".to_owned()],
            state: state.into(),
            started_unix_nanos: 1,
            reason: "Error".to_owned(),
            start_failure: true,
            ..Default::default()
        }
    }

    #[test]
    fn object_has_every_field_of_the_original() {
        let pod = Pod {
            name: "p".to_owned(),
            phase: PodPhase::Running.into(),
            units: vec![unit_of(UnitState::UnitRunning)],
            addresses: vec![Default::default()],
            resources: Some(kiyot_proto::admin::Resources {
                cpu_millis: 100,
                ..Default::default()
            }),
            ..Default::default()
        };
        let own = of(&pod);
        assert_covers(&serde_json::from_str(ORIGINAL).unwrap(), &own, "pod");
        assert_eq!(own["spec"]["resources"]["cpu"], "0.10");
        assert!(own["spec"]["units"][0]["env"][0].get("value").is_none());
    }

    #[test]
    fn failed_start_of_a_unit_is_a_waiting_state_with_start_failure() {
        let status = unit_status(&unit_of(UnitState::UnitWaiting));
        assert_eq!(status["state"], json!({"waiting": {"reason": "Error", "startFailure": true}}));
        let status = unit_status(&unit_of(UnitState::UnitTerminated));
        assert_eq!(status["state"]["terminated"]["exitCode"], 0);
    }
}
