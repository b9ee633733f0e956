//! Findings about a kubelet's configuration: values that hurt cells or declared capacity.

use std::{path::Path, time::Duration};

use kiyot_config::{Capacity, Config, MilpaBackend};
use kiyot_kubernetes::capacity::Taint;

use super::kubelet_config::KubeletConfig;

/// The kubelet's default of `maxPods`.
const DEFAULT_MAX_PODS: u64 = 110;
/// The kubelet's default of `nodeStatusUpdateFrequency`.
const STATUS_PERIOD: Duration = Duration::from_secs(10);
/// The kubelet's default of `containerRuntimeEndpoint`.
const DEFAULT_ENDPOINT: &str = "unix:///run/containerd/containerd.sock";

/// Returns the findings: the value, why it hurts, and what is allowed.
pub(super) fn findings(
    kubelet: &KubeletConfig,
    config: &Config,
    milpa: &MilpaBackend,
) -> Vec<String> {
    let mut found = endpoints(kubelet, &config.server.listen);
    let declared = config.kubernetes.capacity.as_ref();
    let pods = declared.and_then(|capacity| capacity.figures.get("pods").copied());
    let max_pods = kubelet.max_pods.unwrap_or(DEFAULT_MAX_PODS);
    let max_cells = milpa.max_cells as u64;
    // A derived number of pods is larger than the number of cells.
    let is_derived = declared.is_some_and(|capacity| capacity.is_derived) && pods.is_none();
    if max_pods.max(pods.unwrap_or_default()) < max_cells && !is_derived {
        found.push(format!(
            "maxPods {max_pods}: is less than max_cells ({max_cells}), so that pods wait while \
             cells are allowed; allowed: {max_cells} at least, here or as kubernetes.capacity.pods"
        ));
    }
    if declared.is_some_and(Capacity::exceeds_machine) {
        found.extend(capacity(kubelet));
    }
    found
}

fn endpoints(kubelet: &KubeletConfig, socket: &Path) -> Vec<String> {
    let own = format!("unix://{}", socket.display());
    let is_own = |endpoint: &str| plain(endpoint) == plain(&own);
    let mut found = Vec::new();
    let runtime = kubelet.container_runtime_endpoint.as_deref().unwrap_or(DEFAULT_ENDPOINT);
    if !is_own(runtime) {
        found.push(format!(
            "containerRuntimeEndpoint {runtime:?}: is not kiyot's socket, which gets no pods; \
             allowed: {own:?}"
        ));
    }
    if let Some(images) = kubelet.image_service_endpoint.as_deref().filter(|it| !is_own(it)) {
        found.push(format!(
            "imageServiceEndpoint {images:?}: is not kiyot's socket, so that images of cells are \
             pulled to the node; allowed: {own:?}, or none"
        ));
    }
    found
}

/// Returns the path of a socket. /var/run is a link to /run.
fn plain(endpoint: &str) -> &str {
    let path = endpoint.strip_prefix("unix://").unwrap_or(endpoint);
    match path.strip_prefix("/var") {
        Some(run) if run.starts_with("/run/") => run,
        _ => path,
    }
}

/// Returns what hurts the capacity that the node declares.
fn capacity(kubelet: &KubeletConfig) -> Vec<String> {
    let mut found = Vec::new();
    let has_tiers = kubelet.feature_gates.get("MemoryQoS") != Some(&false);
    let reservation = kubelet.memory_reservation_policy.as_ref().filter(|_| has_tiers);
    for (field, policy, allowed) in [
        ("cpuManagerPolicy", kubelet.cpu_manager_policy.as_ref(), "\"none\""),
        ("memoryManagerPolicy", kubelet.memory_manager_policy.as_ref(), "\"None\""),
        (
            "topologyManagerPolicy",
            kubelet.topology_manager_policy.as_ref(),
            "\"none\" or \"best-effort\"",
        ),
        ("memoryReservationPolicy", reservation, "\"None\""),
    ] {
        if let Some(policy) = policy.filter(|policy| !allowed.contains(&format!("{policy:?}"))) {
            found.push(format!(
                "{field} {policy:?}: refuses Guaranteed pods that are larger than the machine; \
                 allowed with declared capacity: {allowed}"
            ));
        }
    }
    if !kubelet.register_with_taints.iter().any(Taint::is_of_cells) {
        found.push(
            "registerWithTaints: lacks cri=kiyot:NoSchedule, so that a node that registers again \
             gets pods that share its machine; allowed with declared capacity: this taint"
                .to_owned(),
        );
    }
    let update = kubelet.node_status_update_frequency.as_deref();
    let update = update.and_then(|text| Some((text, duration(text)?)));
    if let Some((text, period)) = update.filter(|(_, period)| !period.is_zero()) {
        if period > STATUS_PERIOD {
            found.push(format!(
                "nodeStatusUpdateFrequency {text:?}: delays Ready and pressure conditions; \
                 allowed: 10s at most"
            ));
        }
        let report = kubelet.node_status_report_frequency.as_deref().and_then(duration);
        if report.is_none_or(|report| report.is_zero()) {
            found.push(format!(
                "nodeStatusReportFrequency: is not set beside nodeStatusUpdateFrequency, and \
                 becomes {text:?}; allowed: a duration of its own, such as \"5m\""
            ));
        }
    }
    found
}

/// Reads a duration of Go, such as `1m30s`.
fn duration(text: &str) -> Option<Duration> {
    let mut rest = text;
    let mut sum = Duration::ZERO;
    while !rest.is_empty() && rest != "0" {
        let number = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let (digits, more) = rest.split_at(number);
        let unit = more.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(more.len());
        let (unit, more) = more.split_at(unit);
        let seconds = match unit {
            "h" => 3600.0,
            "m" => 60.0,
            "s" => 1.0,
            "ms" => 1e-3,
            "us" | "µs" | "μs" => 1e-6,
            "ns" => 1e-9,
            _ => return None,
        };
        let part = Duration::try_from_secs_f64(digits.parse::<f64>().ok()? * seconds).ok()?;
        sum = sum.checked_add(part)?;
        rest = more;
    }
    (!text.is_empty()).then_some(sum)
}

#[cfg(test)]
mod tests {
    use kiyot_config::BackendConfig;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    /// Returns the findings about a kubelet.
    fn found(kubelet: Value, section: &str) -> Vec<String> {
        let Value::Object(fields) = kubelet else { unreachable!() };
        let text = format!(
            "[server]\nlisten = \"/run/kiyot/kiyot.sock\"\n{section}[backends.containerd]\n\
             type = \"cri\"\n[backends.milpa]\ntype = \"milpa\"\n"
        );
        let config = kiyot_config::parse("test", &text, []).unwrap();
        let Some(BackendConfig::Milpa(milpa)) = config.backends.get("milpa") else { panic!() };
        findings(&KubeletConfig::merged([fields]).unwrap(), &config, milpa)
    }

    const DECLARED: &str = "[kubernetes]\nkubeconfig = \"in-cluster\"\n[kubernetes.capacity]\n\
                            pods = 250\n";

    /// Returns a configuration without findings, changed by the fields of `other`.
    fn with(other: &Value) -> Value {
        let taint = json!({ "key": "cri", "value": "kiyot", "effect": "NoSchedule" });
        let mut fields = json!({
            "containerRuntimeEndpoint": "unix:///var/run/kiyot/kiyot.sock",
            "maxPods": 110,
            "registerWithTaints": [taint],
        });
        let all = fields.as_object_mut().unwrap();
        all.extend(other.as_object().unwrap().clone());
        fields
    }

    /// Verifies K31.
    #[test]
    fn each_field_that_hurts_is_named_with_value_reason_and_what_is_allowed() {
        assert_eq!(found(with(&json!({})), DECLARED), Vec::<String>::new());
        for (other, expected) in [
            (json!({ "containerRuntimeEndpoint": null }), "containerd.sock\": is not kiyot's"),
            (json!({ "imageServiceEndpoint": "unix:///a.sock" }), "unix:///a.sock\": is not"),
            (json!({ "cpuManagerPolicy": "static" }), "cpuManagerPolicy \"static\": refuses"),
            (json!({ "memoryManagerPolicy": "Static" }), "memoryManagerPolicy \"Static\": ref"),
            (json!({ "topologyManagerPolicy": "restricted" }), "\"none\" or \"best-effort\""),
            (json!({ "topologyManagerPolicy": "single-numa-node" }), "topologyManagerPolicy"),
            (
                json!({ "memoryReservationPolicy": "TieredReservation" }),
                "memoryReservationPolicy \"TieredReservation\": refuses",
            ),
            (json!({ "registerWithTaints": null }), "lacks cri=kiyot:NoSchedule"),
            (json!({ "nodeStatusUpdateFrequency": "5s" }), "becomes \"5s\"; allowed"),
            (
                json!({ "nodeStatusUpdateFrequency": "1m0s", "nodeStatusReportFrequency": "5m" }),
                "nodeStatusUpdateFrequency \"1m0s\": delays",
            ),
        ] {
            let lines = found(with(&other), DECLARED);
            let [line] = lines.as_slice() else { panic!("{other}: {lines:?}") };
            assert!(line.contains(expected) && line.contains("allowed"), "{other}: {line}");
        }
        for other in [
            json!({ "topologyManagerPolicy": "best-effort" }),
            json!({ "imageServiceEndpoint": "unix:///run/kiyot/kiyot.sock" }),
            json!({ "nodeStatusUpdateFrequency": "10s", "nodeStatusReportFrequency": "5m" }),
            json!({ "nodeStatusUpdateFrequency": "0s" }),
            json!({
                "memoryReservationPolicy": "TieredReservation",
                "featureGates": { "MemoryQoS": false },
            }),
        ] {
            assert_eq!(found(with(&other), DECLARED), Vec::<String>::new(), "{other}");
        }
    }

    /// Verifies K31.
    #[test]
    fn most_findings_need_declared_capacity() {
        let all = json!({
            "cpuManagerPolicy": "static",
            "topologyManagerPolicy": "restricted",
            "registerWithTaints": null,
            "nodeStatusUpdateFrequency": "1m",
        });
        let [line] = found(with(&all), "").try_into().unwrap();
        assert!(line.starts_with("maxPods 110: is less than max_cells (250)"), "{line}");
        assert_eq!(found(with(&json!({ "maxPods": 250 })), ""), Vec::<String>::new());
        let extended = DECLARED.replace("pods", "\"pod.elotl.co/cpu\"");
        assert_eq!(found(with(&all), &extended), [line]);
    }

    #[test]
    fn durations_of_go_are_read() {
        for (text, millis) in [
            ("0", Some(0)),
            ("10s", Some(10_000)),
            ("1m30s", Some(90_000)),
            ("1.5h", Some(5_400_000)),
            ("250ms", Some(250)),
            ("", None),
            ("10", None),
            ("s", None),
            ("1d", None),
            ("-1s", None),
            ("99999999999999999999h", None),
        ] {
            assert_eq!(duration(text), millis.map(Duration::from_millis), "{text}");
        }
    }

    proptest! {
        #[test]
        fn any_text_of_a_duration_is_read_or_refused(text in "[0-9.]{0,9}[a-zµ0-9.]{0,9}") {
            let _ = duration(&text);
        }
    }
}
