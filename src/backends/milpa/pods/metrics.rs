//! Metrics of pods (`ListPodSandboxMetrics`), in the form that the node describes: the metrics of
//! the cells' containerds, else the usage under cadvisor's names.
//!
//! The kubelet knows only the metrics of the node's `ListMetricDescriptors`, and reads label values
//! by position. Each runtime has its own labels. So a metric is listed only if all labels that the
//! node describes are known here, and the node describes all its labels and `id`: otherwise metrics
//! of two containers could be the same.

use std::{collections::HashMap, sync::Arc, time::Instant};

use bytes::{Bytes, BytesMut};
use kiyot_proto::cri::{self, MetricType, UInt64Value};
use prost::Message;

use super::{
    Pods,
    samples::{Samples, Series},
};

const NANOS_PER_SECOND: u64 = 1_000_000_000;
/// Number of processes: for a pod from its statistics, for a container from containerd.
const PROCESSES: &str = "container_processes";

/// Most bytes of metrics of the cells' containerds in a response: enough for some 150 pods. A
/// kubelet accepts no response above 16 MiB, and a thousand pods would need twice as much. The last
/// pods by id have only the metrics of their statistics.
const MAX_SAMPLED_BYTES: usize = 4 << 20;

/// The label keys of the metrics that the node describes, by name.
type Described = HashMap<String, Vec<String>>;

/// The values of the labels that identify a container or pod.
#[derive(Debug, Clone, Copy, Default)]
struct Identity<'a> {
    id: &'a str,
    name: &'a str,
    image: &'a str,
    namespace: &'a str,
    pod: &'a str,
    container: &'a str,
    /// Set for a metric of the network.
    interface: Option<&'a str>,
}

impl<'a> Identity<'a> {
    fn label(&self, key: &str) -> Option<&'a str> {
        Some(match key {
            "id" => self.id,
            "name" => self.name,
            "image" => self.image,
            "namespace" => self.namespace,
            "pod" => self.pod,
            "container" => self.container,
            "interface" => self.interface?,
            // cadvisor's value for all processors together.
            "cpu" => "total",
            _ => return None,
        })
    }
}

/// Returns a metric's type by its name. A cell's own type is ignored: two types under a name would
/// make a kubelet refuse all metrics.
fn metric_type(name: &str) -> MetricType {
    match name {
        "container_memory_failcnt" => MetricType::Counter,
        // The capacity, not a counter.
        "container_fs_inodes_total" => MetricType::Gauge,
        _ if name.ends_with("_total") => MetricType::Counter,
        _ => MetricType::Gauge,
    }
}

/// The metrics of a container or pod.
struct Metrics<'a> {
    described: &'a Described,
    /// The metrics of the cell's containerd.
    samples: Option<&'a Samples>,
    metrics: Vec<cri::Metric>,
}

impl<'a> Metrics<'a> {
    /// Begins with the metrics of the cell's containerd.
    fn of(of: Identity<'_>, samples: Option<&'a Samples>, described: &'a Described) -> Self {
        let mut metrics = Self { described, samples, metrics: Vec::new() };
        let Some(samples) = samples else { return metrics };
        for (Series { name, labels }, value) in samples.all() {
            let all_are_described = described.get(&**name).is_some_and(|keys| {
                labels.iter().all(|(own, _)| keys.iter().any(|key| *key == **own))
            });
            if all_are_described {
                let own = |key: &str| {
                    labels.iter().find(|(own, _)| **own == *key).map(|(_, value)| &**value)
                };
                metrics.put(
                    name,
                    |key| own(key).or_else(|| of.label(key)),
                    samples.timestamp,
                    value,
                );
            }
        }
        metrics
    }

    /// Adds a metric unless the cell's containerd has it.
    fn add(&mut self, name: &str, of: Identity<'_>, timestamp: i64, value: Option<UInt64Value>) {
        if let Some(UInt64Value { value }) = value
            && self.samples.is_none_or(|samples| !samples.has(name))
        {
            self.put(name, |key| of.label(key), timestamp, value);
        }
    }

    fn put<'l>(
        &mut self,
        name: &str,
        label: impl Fn(&str) -> Option<&'l str>,
        timestamp: i64,
        value: u64,
    ) {
        let Some(keys) = self.described.get(name) else { return };
        let Some(label_values) =
            keys.iter().map(|key| label(key).map(str::to_owned)).collect::<Option<Vec<_>>>()
        else {
            return;
        };
        if keys.iter().any(|key| key == "id") {
            let value = Some(UInt64Value { value });
            self.metrics.push(cri::Metric {
                name: name.to_owned(),
                timestamp,
                metric_type: metric_type(name).into(),
                label_values,
                value,
            });
        }
    }

    /// Adds the metrics of all interfaces, or of the default interface if the node describes no
    /// label for interfaces.
    fn add_network(&mut self, of: Identity<'_>, network: &cri::NetworkUsage) {
        for (n, interface) in
            network.default_interface.iter().chain(&network.interfaces).enumerate()
        {
            let of = Identity { interface: Some(&interface.name), ..of };
            for (name, value) in [
                ("container_network_receive_bytes_total", interface.rx_bytes),
                ("container_network_receive_errors_total", interface.rx_errors),
                ("container_network_transmit_bytes_total", interface.tx_bytes),
                ("container_network_transmit_errors_total", interface.tx_errors),
            ] {
                let is_told_apart = self
                    .described
                    .get(name)
                    .is_some_and(|keys| keys.iter().any(|key| key == "interface"));
                if n == 0 || is_told_apart {
                    self.add(name, of, network.timestamp, value);
                }
            }
        }
    }
}

/// Details of a pod's containers, by their ids.
type Containers = HashMap<String, ContainerInfo>;

/// The pod's reference of a container's image, and the metrics of the cell's containerd.
#[derive(Debug, Default)]
struct ContainerInfo {
    image: String,
    samples: Option<Arc<Samples>>,
}

/// Returns the metrics of a pod from its usage and from the cell's containerd.
fn of_pod(
    stats: &cri::PodSandboxStats,
    samples: Option<&Samples>,
    containers: &Containers,
    described: &Described,
) -> cri::PodSandboxMetrics {
    let (attributes, linux) =
        (stats.attributes.clone().unwrap_or_default(), stats.linux.clone().unwrap_or_default());
    let metadata = attributes.metadata.unwrap_or_default();
    let pod = Identity {
        id: &attributes.id,
        name: &metadata.name,
        namespace: &metadata.namespace,
        pod: &metadata.name,
        ..Identity::default()
    };
    let mut of_pod = Metrics::of(pod, samples, described);
    if let Some(network) = &linux.network {
        of_pod.add_network(pod, network);
    }
    // The pod's processes are the sum of its containers'.
    let have_processes = containers
        .values()
        .any(|container| container.samples.as_ref().is_some_and(|samples| samples.has(PROCESSES)));
    if let Some(process) = linux.process.as_ref().filter(|_| !have_processes) {
        of_pod.add(PROCESSES, pod, process.timestamp, process.process_count);
    }
    let container_metrics = linux
        .containers
        .iter()
        .map(|stats| of_container(stats, pod, containers, described))
        .collect();
    cri::PodSandboxMetrics {
        pod_sandbox_id: attributes.id.clone(),
        metrics: of_pod.metrics,
        container_metrics,
    }
}

fn of_container(
    stats: &cri::ContainerStats,
    pod: Identity<'_>,
    containers: &Containers,
    described: &Described,
) -> cri::ContainerMetrics {
    let attributes = stats.attributes.clone().unwrap_or_default();
    let name = attributes.metadata.unwrap_or_default().name;
    let known = containers.get(&attributes.id);
    let image = known.map(|known| known.image.as_str()).unwrap_or_default();
    let of = Identity { id: &attributes.id, name: &name, image, container: &name, ..pod };
    let mut metrics = Metrics::of(of, known.and_then(|known| known.samples.as_deref()), described);
    if let Some(cpu) = &stats.cpu {
        let seconds = cpu
            .usage_core_nano_seconds
            .map(|nanos| UInt64Value { value: nanos.value / NANOS_PER_SECOND });
        metrics.add("container_cpu_usage_seconds_total", of, cpu.timestamp, seconds);
    }
    if let Some(memory) = &stats.memory {
        for (name, value) in [
            ("container_memory_usage_bytes", memory.usage_bytes),
            ("container_memory_working_set_bytes", memory.working_set_bytes),
            ("container_memory_rss", memory.rss_bytes),
        ] {
            metrics.add(name, of, memory.timestamp, value);
        }
    }
    if let Some(layer) = &stats.writable_layer {
        metrics.add("container_fs_usage_bytes", of, layer.timestamp, layer.used_bytes);
    }
    cri::ContainerMetrics { container_id: attributes.id.clone(), metrics: metrics.metrics }
}

impl Pods {
    /// Returns a `ListPodSandboxMetricsResponse` of the ready pods with recent usage, by the node's
    /// encoded `ListMetricDescriptorsResponse`.
    pub(crate) fn list_metrics(&self, descriptors: &[u8], now: Instant) -> Bytes {
        // An invalid response describes nothing.
        let described =
            cri::ListMetricDescriptorsResponse::decode(descriptors).unwrap_or_default().descriptors;
        let described: Described =
            described.into_iter().map(|metric| (metric.name, metric.label_keys)).collect();
        let (mut list, mut left) = (BytesMut::new(), MAX_SAMPLED_BYTES);
        for pod in self.all_sandboxes() {
            let Some(stats) = self.usage_of(&pod.id, now) else { continue };
            let fresh = |samples: Option<Arc<Samples>>| {
                samples.filter(|samples| left > 0 && samples.is_fresh(now))
            };
            let of_containers = self.containers_of(&pod.id).into_iter();
            let known = of_containers.map(|one| {
                (
                    one.id.as_str().to_owned(),
                    ContainerInfo { image: image(one.item()), samples: fresh(one.samples) },
                )
            });
            let (samples, containers) = (fresh(pod.samples), known.collect());
            let pod_metrics = vec![of_pod(&stats, samples.as_deref(), &containers, &described)];
            // Encodes pod by pod: all decoded metrics would take some hundred MB.
            let before = list.len();
            let _ = cri::ListPodSandboxMetricsResponse { pod_metrics }.encode(&mut list);
            if samples.is_some() {
                left = left.saturating_sub(list.len() - before);
            }
        }
        list.freeze()
    }
}

/// Returns the pod's reference of a container's image.
fn image(item: cri::Container) -> String {
    let image = item.image.unwrap_or_default();
    if image.user_specified_image.is_empty() { image.image } else { image.user_specified_image }
}

#[cfg(test)]
mod tests {
    use super::{
        super::{samples::Shapes, tests::sample},
        *,
    };

    fn value(value: u64) -> Option<UInt64Value> {
        Some(UInt64Value { value })
    }

    fn stats() -> cri::PodSandboxStats {
        let interface = |name: &str, rx: u64| cri::NetworkInterfaceUsage {
            name: name.to_owned(),
            rx_bytes: value(rx),
            ..Default::default()
        };
        let container = cri::ContainerStats {
            attributes: Some(cri::ContainerAttributes {
                id: "milpac".to_owned(),
                metadata: Some(cri::ContainerMetadata { name: "main".to_owned(), attempt: 0 }),
                ..Default::default()
            }),
            cpu: Some(cri::CpuUsage {
                timestamp: 5,
                usage_core_nano_seconds: value(3_900_000_000),
                ..Default::default()
            }),
            memory: Some(cri::MemoryUsage {
                timestamp: 6,
                working_set_bytes: value(42),
                ..Default::default()
            }),
            writable_layer: Some(cri::FilesystemUsage {
                timestamp: 7,
                used_bytes: value(8),
                ..Default::default()
            }),
            ..Default::default()
        };
        cri::PodSandboxStats {
            attributes: Some(cri::PodSandboxAttributes {
                id: "milpap".to_owned(),
                metadata: Some(cri::PodSandboxMetadata {
                    name: "web".to_owned(),
                    namespace: "shop".to_owned(),
                    ..Default::default()
                }),
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

    fn metrics_by(described: &[(&str, &[&str])]) -> (Vec<cri::Metric>, Vec<cri::Metric>) {
        metrics_with(&[], &[], described)
    }

    type Sample<'a> = (&'a str, &'a [(&'a str, &'a str)], u64);

    fn samples(samples: &[Sample<'_>]) -> Arc<Samples> {
        let samples: Vec<_> =
            samples.iter().map(|&(name, labels, value)| sample(name, labels, value)).collect();
        Arc::new(Samples::new(
            &samples,
            20,
            None,
            &mut Shapes::default(),
            super::super::usage::Received { at: Instant::now(), clock: 20 },
        ))
    }

    fn metrics_with(
        pod: &[Sample<'_>],
        container: &[Sample<'_>],
        described: &[(&str, &[&str])],
    ) -> (Vec<cri::Metric>, Vec<cri::Metric>) {
        let described = described
            .iter()
            .map(|(name, keys)| {
                ((*name).to_owned(), keys.iter().map(|key| (*key).to_owned()).collect())
            })
            .collect();
        let containers = HashMap::from([(
            "milpac".to_owned(),
            ContainerInfo { image: "busybox".to_owned(), samples: Some(samples(container)) },
        )]);
        let mut metrics = of_pod(&stats(), Some(&samples(pod)), &containers, &described);
        assert_eq!(
            (&*metrics.pod_sandbox_id, &*metrics.container_metrics[0].container_id),
            ("milpap", "milpac")
        );
        (metrics.metrics, metrics.container_metrics.remove(0).metrics)
    }

    fn metric(
        name: &str,
        timestamp: i64,
        kind: MetricType,
        labels: &[&str],
        of: u64,
    ) -> cri::Metric {
        let label_values = labels.iter().map(|&label| label.to_owned()).collect();
        cri::Metric {
            name: name.to_owned(),
            timestamp,
            metric_type: kind.into(),
            label_values,
            value: value(of),
        }
    }

    #[test]
    fn labels_have_the_order_of_the_nodes_descriptors() {
        let (pod, container) = metrics_by(&[
            (
                "container_cpu_usage_seconds_total",
                &["pod", "namespace", "container", "id", "image", "cpu"],
            ),
            ("container_memory_working_set_bytes", &["id", "name"]),
            ("container_network_receive_bytes_total", &["interface", "id", "container"]),
            ("container_processes", &["id", "pod"]),
        ]);
        let cpu = metric(
            "container_cpu_usage_seconds_total",
            5,
            MetricType::Counter,
            &["web", "shop", "main", "milpac", "busybox", "total"],
            3,
        );
        let memory = metric(
            "container_memory_working_set_bytes",
            6,
            MetricType::Gauge,
            &["milpac", "main"],
            42,
        );
        assert_eq!(container, [cpu, memory]);
        let received = |interface, of| {
            metric(
                "container_network_receive_bytes_total",
                9,
                MetricType::Counter,
                &[interface, "milpap", ""],
                of,
            )
        };
        let processes = metric("container_processes", 12, MetricType::Gauge, &["milpap", "web"], 2);
        assert_eq!(pod, [received("eth0", 10), received("net1", 11), processes]);
    }

    /// Verifies U9.
    #[test]
    fn ambiguous_or_unknown_metrics_are_left_out() {
        let (pod, container) = metrics_by(&[
            // An unknown label, no `id`, and usage that was not measured.
            ("container_fs_usage_bytes", &["id", "device"]),
            ("container_memory_working_set_bytes", &["name"]),
            ("container_memory_rss", &["id"]),
            ("container_of_another_kind", &["id"]),
            // No label for the interface.
            ("container_network_receive_bytes_total", &["id"]),
        ]);
        assert_eq!(container, []);
        assert_eq!(
            pod,
            [metric(
                "container_network_receive_bytes_total",
                9,
                MetricType::Counter,
                &["milpap"],
                10
            )]
        );
        assert_eq!(metrics_by(&[]), (Vec::new(), Vec::new()));
    }

    /// Verifies U25.
    #[test]
    fn metrics_of_containerd_replace_metrics_of_statistics() {
        let pod: &[Sample<'_>] = &[
            ("container_network_receive_bytes_total", &[("interface", "eth0")], 30),
            ("container_network_receive_packets_total", &[("interface", "eth0")], 31),
        ];
        let container: &[Sample<'_>] = &[
            (
                "container_blkio_device_usage_total",
                &[("device", "/dev/vda"), ("operation", "Read")],
                40,
            ),
            (
                "container_blkio_device_usage_total",
                &[("device", "/dev/vda"), ("operation", "Write")],
                41,
            ),
            ("container_memory_cache", &[], 0),
            ("container_memory_failcnt", &[], 3),
            ("container_memory_working_set_bytes", &[], 43),
            ("container_processes", &[], 1),
            // The node describes these without their label, with an absent label, and not at all.
            ("container_fs_usage_bytes", &[("device", "/")], 9),
            ("container_fs_reads_total", &[], 9),
            ("container_sockets", &[], 9),
        ];
        let (pod, container) = metrics_with(
            pod,
            container,
            &[
                ("container_blkio_device_usage_total", &["id", "operation", "image", "device"]),
                ("container_memory_cache", &["pod", "id"]),
                ("container_memory_failcnt", &["id"]),
                ("container_memory_working_set_bytes", &["id"]),
                ("container_memory_rss", &["id"]),
                ("container_cpu_usage_seconds_total", &["id"]),
                ("container_processes", &["id", "container"]),
                ("container_fs_usage_bytes", &["id"]),
                ("container_fs_reads_total", &["id", "device"]),
                ("container_network_receive_bytes_total", &["id", "interface"]),
                ("container_network_receive_packets_total", &["id", "interface"]),
                ("container_network_transmit_bytes_total", &["id", "interface"]),
            ],
        );
        let (counter, gauge) = (MetricType::Counter, MetricType::Gauge);
        assert_eq!(
            container,
            [
                metric(
                    "container_blkio_device_usage_total",
                    20,
                    counter,
                    &["milpac", "Read", "busybox", "/dev/vda"],
                    40
                ),
                metric(
                    "container_blkio_device_usage_total",
                    20,
                    counter,
                    &["milpac", "Write", "busybox", "/dev/vda"],
                    41
                ),
                metric("container_memory_cache", 20, gauge, &["web", "milpac"], 0),
                metric("container_memory_failcnt", 20, counter, &["milpac"], 3),
                metric("container_memory_working_set_bytes", 20, gauge, &["milpac"], 43),
                metric("container_processes", 20, gauge, &["milpac", "main"], 1),
                metric("container_cpu_usage_seconds_total", 5, counter, &["milpac"], 3),
            ]
        );
        let received = |what, of| {
            metric(
                &format!("container_network_receive_{what}_total"),
                20,
                counter,
                &["milpap", "eth0"],
                of,
            )
        };
        assert_eq!(pod, [received("bytes", 30), received("packets", 31)]);
    }

    /// Types of containerd 2.3 (internal/cri/server/list_pod_sandbox_metrics_linux.go) and
    /// cadvisor.
    #[test]
    fn metric_types_equal_the_types_of_the_nodes_runtime() {
        for name in [
            "container_cpu_cfs_periods_total",
            "container_memory_failures_total",
            "container_memory_failcnt",
            "container_oom_events_total",
        ] {
            assert_eq!(metric_type(name), MetricType::Counter, "{name}");
        }
        for name in [
            "container_fs_inodes_total",
            "container_fs_inodes_free",
            "container_memory_cache",
            "container_spec_cpu_period",
            "container_last_seen",
        ] {
            assert_eq!(metric_type(name), MetricType::Gauge, "{name}");
        }
    }
}
