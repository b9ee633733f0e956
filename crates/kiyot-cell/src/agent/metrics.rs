//! Pod metrics of the cell's containerd (2.x) and of the cell's network, sent only while the daemon
//! subscribes, because there are many.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use kiyot_proto::{
    cell::{ContainerSamples, Label, Metrics, Sample},
    cri::{ListMetricDescriptorsRequest, ListPodSandboxMetricsRequest, Metric, PodSandboxMetrics},
};
use tokio::{
    sync::{OnceCell, watch},
    time::Instant,
};
use tonic::Status;

use super::{
    network::{Counters, Interface},
    runtime::{Runtime, with_timeout},
};

/// Longest time of a subscription without a renewal.
const MAX_SUBSCRIPTION: Duration = Duration::from_secs(600);
/// Upper bound on the metrics of a container, or of the pod. containerd 2.3 has about fifty, and a
/// few more per disk.
const MAX_SAMPLES: usize = 256;
/// Labels that identify the container: the daemon sets its own.
const IDENTITY_LABELS: [&str; 6] = ["id", "name", "image", "namespace", "pod", "container"];

/// Label keys by metric name.
type LabelKeys = HashMap<String, Vec<String>>;

/// Subscription of the daemon to metrics, and cached metric descriptors of containerd.
#[derive(Debug)]
pub struct MetricsSubscription {
    until: Mutex<Option<Instant>>,
    activations: watch::Sender<()>,
    /// Descriptors are constant while containerd runs.
    label_keys: OnceCell<LabelKeys>,
}

impl Default for MetricsSubscription {
    fn default() -> Self {
        Self {
            until: Mutex::default(),
            activations: watch::Sender::new(()),
            label_keys: OnceCell::new(),
        }
    }
}

impl MetricsSubscription {
    /// Renews the subscription for a time, ten minutes at most.
    pub fn renew(&self, time: Duration) {
        let now = Instant::now();
        let before = self
            .until
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .replace(now + time.min(MAX_SUBSCRIPTION));
        if before.is_none_or(|until| until <= now) {
            self.activations.send_replace(());
        }
    }

    /// Returns a receiver that is notified when a subscription begins, but not when it is renewed.
    pub fn activations(&self) -> watch::Receiver<()> {
        self.activations.subscribe()
    }

    /// Returns containerd's metrics of the pod with this sandbox, or empty metrics if containerd
    /// does not return them in time; `None` without a subscription.
    pub(super) async fn collect(
        &self,
        runtime: &Runtime,
        pod: Option<&str>,
        time: Duration,
    ) -> Option<Metrics> {
        let is_wanted = self
            .until
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .is_some_and(|until| Instant::now() < until);
        if !is_wanted {
            return None;
        }
        Some(match tokio::time::timeout(time, self.query(runtime, pod, time)).await {
            Ok(Ok(metrics)) => metrics,
            // The daemon keeps the metrics of an earlier heartbeat until they are too old.
            Ok(Err(_)) | Err(_) => Metrics::default(),
        })
    }

    async fn query(
        &self,
        runtime: &Runtime,
        pod: Option<&str>,
        time: Duration,
    ) -> Result<Metrics, Status> {
        let mut client = runtime.runtime();
        let label_keys = self.label_keys.get_or_try_init(async || {
            let label_keys = runtime
                .runtime()
                .list_metric_descriptors(with_timeout(
                    time,
                    ListMetricDescriptorsRequest::default(),
                ))
                .await?
                .into_inner();
            Ok::<_, Status>(
                label_keys
                    .descriptors
                    .into_iter()
                    .map(|metric| (metric.name, metric.label_keys))
                    .collect(),
            )
        });
        let label_keys = label_keys.await?;
        let response = client
            .list_pod_sandbox_metrics(with_timeout(time, ListPodSandboxMetricsRequest::default()))
            .await?
            .into_inner();
        let pod = of_pod(response.pod_metrics, pod);
        let containers = pod.container_metrics.into_iter().map(|one| {
            let (timestamp, samples) = samples(one.metrics, label_keys);
            ContainerSamples { container: one.container_id, timestamp, samples }
        });
        let containers = containers.collect();
        let (timestamp, pod) = samples(pod.metrics, label_keys);
        Ok(Metrics { pod, timestamp, containers })
    }
}

/// Returns the metrics of the pod with this sandbox. The sandbox of a rehearsal that could not be
/// removed may be listed too.
fn of_pod(metrics: Vec<PodSandboxMetrics>, pod: Option<&str>) -> PodSandboxMetrics {
    let mut metrics = metrics.into_iter();
    metrics.find(|metrics| Some(metrics.pod_sandbox_id.as_str()) == pod).unwrap_or_default()
}

/// Converts metrics to samples, and returns their timestamp.
fn samples(metrics: Vec<Metric>, label_keys: &LabelKeys) -> (i64, Vec<Sample>) {
    let timestamp = metrics.first().map(|metric| metric.timestamp).unwrap_or_default();
    (
        timestamp,
        metrics
            .into_iter()
            .filter_map(|metric| sample(metric, label_keys))
            .take(MAX_SAMPLES)
            .collect(),
    )
}

fn sample(metric: Metric, label_keys: &LabelKeys) -> Option<Sample> {
    let keys = label_keys.get(&metric.name)?;
    if keys.len() != metric.label_values.len() {
        return None;
    }
    let labels = keys
        .iter()
        .zip(metric.label_values)
        .filter(|(key, _)| !IDENTITY_LABELS.contains(&key.as_str()));
    let labels = labels.map(|(key, value)| Label { key: key.clone(), value }).collect();
    Some(Sample { name: metric.name, value: metric.value?.value, labels })
}

/// Adds network metrics. containerd has network metrics only for sandboxes with their own network
/// namespace, but sandboxes in a cell use the cell's.
pub(super) fn with_network(mut metrics: Metrics, network: &[Interface], now: i64) -> Metrics {
    if metrics.pod.is_empty() && !network.is_empty() {
        metrics.timestamp = now;
        metrics.pod = network
            .iter()
            .flat_map(|of| {
                [
                    ("receive", of.name.as_str(), of.received),
                    ("transmit", of.name.as_str(), of.sent),
                ]
            })
            .flat_map(network_samples)
            .collect();
        metrics.pod.truncate(MAX_SAMPLES);
    }
    metrics
}

fn network_samples((direction, interface, counters): (&str, &str, Counters)) -> [Sample; 4] {
    let Counters { bytes, packets, errors, dropped } = counters;
    [("bytes", bytes), ("packets", packets), ("errors", errors), ("packets_dropped", dropped)].map(
        |(what, value)| Sample {
            name: format!("container_network_{direction}_{what}_total"),
            value,
            labels: vec![Label { key: "interface".to_owned(), value: interface.to_owned() }],
        },
    )
}

#[cfg(test)]
mod tests {
    use kiyot_proto::cri::UInt64Value;

    use super::*;

    fn strings(texts: &[&str]) -> Vec<String> {
        texts.iter().map(|&text| text.to_owned()).collect()
    }

    /// Verifies U25.
    #[test]
    fn samples_have_labels_without_identity() {
        let label_keys = HashMap::from([
            (
                "container_fs_usage_bytes".to_owned(),
                strings(&["pod", "namespace", "container", "id", "image", "device"]),
            ),
            ("container_memory_cache".to_owned(), strings(&["id", "name"])),
        ]);
        let metric = |name: &str, labels: &[&str], value| Metric {
            name: name.to_owned(),
            timestamp: 7,
            label_values: strings(labels),
            value: Option::map(value, |value| UInt64Value { value }),
            ..Metric::default()
        };
        let metrics = vec![
            metric(
                "container_fs_usage_bytes",
                &["web", "shop", "main", "c0", "busybox", "/"],
                Some(5),
            ),
            metric("container_memory_cache", &["c0", "main"], Some(0)),
            // Without a value, without a descriptor, and with fewer labels than the descriptor has.
            metric("container_memory_cache", &["c0", "main"], None),
            metric("container_sockets", &["c0", "main"], Some(1)),
            metric("container_memory_cache", &["c0"], Some(1)),
        ];
        let device = Label { key: "device".to_owned(), value: "/".to_owned() };
        let sample = |name: &str, value, labels| Sample { name: name.to_owned(), value, labels };
        let response = vec![
            sample("container_fs_usage_bytes", 5, vec![device]),
            sample("container_memory_cache", 0, vec![]),
        ];
        assert_eq!(samples(metrics, &label_keys), (7, response));
    }

    /// Verifies U25.
    #[test]
    fn metrics_are_of_the_pods_sandbox() {
        let of = |id: &str| PodSandboxMetrics {
            pod_sandbox_id: id.to_owned(),
            ..PodSandboxMetrics::default()
        };
        let metrics = vec![of("rehearsal"), of("pod")];
        assert_eq!(of_pod(metrics.clone(), Some("pod")), of("pod"));
        assert_eq!(of_pod(metrics, None), PodSandboxMetrics::default());
    }

    #[test]
    fn network_metrics_come_from_the_cell() {
        let counters =
            |bytes| Counters { bytes, packets: bytes + 1, errors: bytes + 2, dropped: bytes + 3 };
        let eth0 =
            Interface { name: "eth0".to_owned(), received: counters(10), sent: counters(20) };
        let metrics = with_network(Metrics::default(), &[eth0], 9);
        let interface = Label { key: "interface".to_owned(), value: "eth0".to_owned() };
        let response: Vec<_> =
            metrics.pod.iter().map(|sample| (sample.name.as_str(), sample.value)).collect();
        assert!(
            metrics.timestamp == 9
                && metrics.pod.iter().all(|sample| sample.labels == [interface.clone()])
        );
        let names = ["receive", "transmit"].into_iter().flat_map(|direction| {
            ["bytes", "packets", "errors", "packets_dropped"]
                .map(|what| format!("container_network_{direction}_{what}_total"))
        });
        let names: Vec<_> = names.collect();
        assert_eq!(
            response,
            names
                .iter()
                .map(String::as_str)
                .zip([10, 11, 12, 13, 20, 21, 22, 23])
                .collect::<Vec<_>>()
        );
        // containerd's own network metrics take precedence, and without interfaces there are no
        // metrics.
        assert_eq!(with_network(metrics.clone(), &[], 10), metrics);
        assert_eq!(with_network(Metrics::default(), &[], 10), Metrics::default());
    }
}
