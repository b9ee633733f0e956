//! `ListPodSandboxMetrics`: the usage of pods in cells by the names that cadvisor gives it, in the shape in which the node describes them.
//!
//! The kubelet knows only what the node's `ListMetricDescriptors` named, takes label values by their place, and each runtime has labels of its own. So a metric
//! is told if the node describes it with labels that are all known here, and one of them is `id`: without it, metrics of two containers would be one.

use std::{collections::HashMap, time::Instant};

use bytes::Bytes;
use kiyot_proto::cri::{self, MetricType, UInt64Value};
use prost::Message;

use super::View;

const NANOS_PER_SECOND: u64 = 1_000_000_000;

/// What the node describes: the label keys of each metric, by its name.
type Described = HashMap<String, Vec<String>>;

/// Whose a metric is: label values by their keys.
#[derive(Debug, Clone, Copy, Default)]
struct Of<'a> {
    id: &'a str,
    name: &'a str,
    image: &'a str,
    namespace: &'a str,
    pod: &'a str,
    container: &'a str,
    /// Of a metric of the network.
    interface: Option<&'a str>,
}

impl<'a> Of<'a> {
    fn label(&self, key: &str) -> Option<&'a str> {
        Some(match key {
            "id" => self.id,
            "name" => self.name,
            "image" => self.image,
            "namespace" => self.namespace,
            "pod" => self.pod,
            "container" => self.container,
            "interface" => self.interface?,
            // What cadvisor says for all processors together.
            "cpu" => "total",
            _ => return None,
        })
    }
}

/// Metrics of one container or pod.
struct Metrics<'a> {
    described: &'a Described,
    told: Vec<cri::Metric>,
}

impl<'a> Metrics<'a> {
    const fn new(described: &'a Described) -> Self {
        Self { described, told: Vec::new() }
    }

    fn add(&mut self, name: &str, of: Of<'_>, kind: MetricType, timestamp: i64, value: Option<UInt64Value>) {
        let (Some(value), Some(keys)) = (value, self.described.get(name)) else { return };
        let Some(label_values) = keys.iter().map(|key| of.label(key).map(str::to_owned)).collect::<Option<Vec<_>>>() else { return };
        if keys.iter().any(|key| key == "id") {
            self.told.push(cri::Metric { name: name.to_owned(), timestamp, metric_type: kind.into(), label_values, value: Some(value) });
        }
    }

    /// Of all interfaces, if they are told apart.
    fn add_network(&mut self, of: Of<'_>, network: &cri::NetworkUsage) {
        for (n, interface) in network.default_interface.iter().chain(&network.interfaces).enumerate() {
            let of = Of { interface: Some(&interface.name), ..of };
            for (name, value) in [
                ("container_network_receive_bytes_total", interface.rx_bytes),
                ("container_network_receive_errors_total", interface.rx_errors),
                ("container_network_transmit_bytes_total", interface.tx_bytes),
                ("container_network_transmit_errors_total", interface.tx_errors),
            ] {
                let told_apart = self.described.get(name).is_some_and(|keys| keys.iter().any(|key| key == "interface"));
                if n == 0 || told_apart {
                    self.add(name, of, MetricType::Counter, network.timestamp, value);
                }
            }
        }
    }
}

/// What the metrics of a pod are by its usage and the images of its containers.
fn of_pod(stats: &cri::PodSandboxStats, images: &HashMap<String, String>, described: &Described) -> cri::PodSandboxMetrics {
    let (attributes, linux) = (stats.attributes.clone().unwrap_or_default(), stats.linux.clone().unwrap_or_default());
    let metadata = attributes.metadata.unwrap_or_default();
    let pod = Of { id: &attributes.id, name: &metadata.name, namespace: &metadata.namespace, pod: &metadata.name, ..Of::default() };
    let mut of_pod = Metrics::new(described);
    if let Some(network) = &linux.network {
        of_pod.add_network(pod, network);
    }
    if let Some(process) = &linux.process {
        of_pod.add("container_processes", pod, MetricType::Gauge, process.timestamp, process.process_count);
    }
    let container_metrics = linux.containers.iter().map(|stats| of_container(stats, pod, images, described)).collect();
    cri::PodSandboxMetrics { pod_sandbox_id: attributes.id.clone(), metrics: of_pod.told, container_metrics }
}

fn of_container(stats: &cri::ContainerStats, pod: Of<'_>, images: &HashMap<String, String>, described: &Described) -> cri::ContainerMetrics {
    let attributes = stats.attributes.clone().unwrap_or_default();
    let name = attributes.metadata.unwrap_or_default().name;
    let image = images.get(&attributes.id).map(String::as_str).unwrap_or_default();
    let of = Of { id: &attributes.id, name: &name, image, container: &name, ..pod };
    let mut metrics = Metrics::new(described);
    if let Some(cpu) = &stats.cpu {
        let seconds = cpu.usage_core_nano_seconds.map(|nanos| UInt64Value { value: nanos.value / NANOS_PER_SECOND });
        metrics.add("container_cpu_usage_seconds_total", of, MetricType::Counter, cpu.timestamp, seconds);
    }
    if let Some(memory) = &stats.memory {
        for (name, value) in [
            ("container_memory_usage_bytes", memory.usage_bytes),
            ("container_memory_working_set_bytes", memory.working_set_bytes),
            ("container_memory_rss", memory.rss_bytes),
        ] {
            metrics.add(name, of, MetricType::Gauge, memory.timestamp, value);
        }
    }
    if let Some(layer) = &stats.writable_layer {
        metrics.add("container_fs_usage_bytes", of, MetricType::Gauge, layer.timestamp, layer.used_bytes);
    }
    cri::ContainerMetrics { container_id: attributes.id.clone(), metrics: metrics.told }
}

impl View {
    /// A `ListPodSandboxMetricsResponse` of the pods that run and had a heartbeat lately, by the node's encoded `ListMetricDescriptorsResponse`.
    pub(in super::super) fn list_metrics(&self, descriptors: &[u8], now: Instant) -> Bytes {
        // What can't be read describes nothing.
        let described = cri::ListMetricDescriptorsResponse::decode(descriptors).unwrap_or_default().descriptors;
        let described: Described = described.into_iter().map(|metric| (metric.name, metric.label_keys)).collect();
        let metrics = self.all_sandboxes().into_iter().filter_map(|pod| {
            let images = self.containers_of(&pod.id).into_iter().map(|one| (one.id.as_str().to_owned(), image(one.item()))).collect();
            Some(of_pod(&self.usage_of(&pod.id, now)?, &images, &described))
        });
        cri::ListPodSandboxMetricsResponse { pod_metrics: metrics.collect() }.encode_to_vec().into()
    }
}

/// The pod's own word for a container's image.
fn image(item: cri::Container) -> String {
    let image = item.image.unwrap_or_default();
    if image.user_specified_image.is_empty() { image.image } else { image.user_specified_image }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(value: u64) -> Option<UInt64Value> {
        Some(UInt64Value { value })
    }

    fn stats() -> cri::PodSandboxStats {
        let interface = |name: &str, rx: u64| cri::NetworkInterfaceUsage { name: name.to_owned(), rx_bytes: value(rx), ..Default::default() };
        let container = cri::ContainerStats {
            attributes: Some(cri::ContainerAttributes {
                id: "milpac".to_owned(),
                metadata: Some(cri::ContainerMetadata { name: "main".to_owned(), attempt: 0 }),
                ..Default::default()
            }),
            cpu: Some(cri::CpuUsage { timestamp: 5, usage_core_nano_seconds: value(3_900_000_000), ..Default::default() }),
            memory: Some(cri::MemoryUsage { timestamp: 6, working_set_bytes: value(42), ..Default::default() }),
            writable_layer: Some(cri::FilesystemUsage { timestamp: 7, used_bytes: value(8), ..Default::default() }),
            ..Default::default()
        };
        cri::PodSandboxStats {
            attributes: Some(cri::PodSandboxAttributes {
                id: "milpap".to_owned(),
                metadata: Some(cri::PodSandboxMetadata { name: "web".to_owned(), namespace: "shop".to_owned(), ..Default::default() }),
                ..Default::default()
            }),
            linux: Some(cri::LinuxPodSandboxStats {
                network: Some(cri::NetworkUsage {
                    timestamp: 9,
                    default_interface: Some(interface("eth0", 10)),
                    interfaces: vec![interface("net1", 11)],
                }),
                process: Some(cri::ProcessUsage { timestamp: 12, process_count: value(2) }),
                containers: vec![container],
                ..Default::default()
            }),
            windows: None,
        }
    }

    fn told(described: &[(&str, &[&str])]) -> (Vec<cri::Metric>, Vec<cri::Metric>) {
        let described = described.iter().map(|(name, keys)| ((*name).to_owned(), keys.iter().map(|key| (*key).to_owned()).collect())).collect();
        let mut metrics = of_pod(&stats(), &HashMap::from([("milpac".to_owned(), "busybox".to_owned())]), &described);
        assert_eq!((&*metrics.pod_sandbox_id, &*metrics.container_metrics[0].container_id), ("milpap", "milpac"));
        (metrics.metrics, metrics.container_metrics.remove(0).metrics)
    }

    fn metric(name: &str, timestamp: i64, kind: MetricType, labels: &[&str], of: u64) -> cri::Metric {
        let label_values = labels.iter().map(|&label| label.to_owned()).collect();
        cri::Metric { name: name.to_owned(), timestamp, metric_type: kind.into(), label_values, value: value(of) }
    }

    #[test]
    fn labels_are_in_the_order_in_which_the_node_describes_them() {
        let (pod, container) = told(&[
            ("container_cpu_usage_seconds_total", &["pod", "namespace", "container", "id", "image", "cpu"]),
            ("container_memory_working_set_bytes", &["id", "name"]),
            ("container_network_receive_bytes_total", &["interface", "id", "container"]),
            ("container_processes", &["id", "pod"]),
        ]);
        let cpu = metric("container_cpu_usage_seconds_total", 5, MetricType::Counter, &["web", "shop", "main", "milpac", "busybox", "total"], 3);
        let memory = metric("container_memory_working_set_bytes", 6, MetricType::Gauge, &["milpac", "main"], 42);
        assert_eq!(container, [cpu, memory]);
        let received = |interface, of| metric("container_network_receive_bytes_total", 9, MetricType::Counter, &[interface, "milpap", ""], of);
        let processes = metric("container_processes", 12, MetricType::Gauge, &["milpap", "web"], 2);
        assert_eq!(pod, [received("eth0", 10), received("net1", 11), processes]);
    }

    #[test]
    fn what_would_be_wrong_or_twice_is_not_told() {
        let (pod, container) = told(&[
            // A label that is not known here, none that says whose it is, and usage that nobody measured.
            ("container_fs_usage_bytes", &["id", "device"]),
            ("container_memory_working_set_bytes", &["name"]),
            ("container_memory_rss", &["id"]),
            ("container_of_another_kind", &["id"]),
            // Interfaces that are not told apart.
            ("container_network_receive_bytes_total", &["id"]),
        ]);
        assert_eq!(container, []);
        assert_eq!(pod, [metric("container_network_receive_bytes_total", 9, MetricType::Counter, &["milpap"], 10)]);
        assert_eq!(told(&[]), (Vec::new(), Vec::new()));
    }
}
