//! Heartbeats with the pod's statistics: from containerd, and from the cell's network interfaces.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use kiyot_proto::{
    cell::Heartbeat,
    cri::{
        ContainerStats, CpuUsage, LinuxPodSandboxStats, ListContainerStatsRequest,
        ListPodSandboxStatsRequest, MemoryUsage, NetworkInterfaceUsage, NetworkUsage,
        PodSandboxStats, PodSandboxStatsFilter, UInt64Value,
    },
};

use super::{
    metrics::{self, MetricsSubscription},
    network::{self, Interface},
    runtime::{Runtime, with_timeout},
};

/// Deadline for statistics, after which a heartbeat is sent without them.
const STATS_TIMEOUT: Duration = Duration::from_millis(900);

/// Returns a heartbeat with the statistics that containerd returns in time. `pod` is the id of the
/// pod's sandbox.
pub async fn heartbeat(
    runtime: &Runtime,
    metrics_subscription: &MetricsSubscription,
    pod: Option<&str>,
    own_network: bool,
) -> Heartbeat {
    let (mut containers, mut sandboxes) = (runtime.runtime(), runtime.runtime());
    let containers = containers
        .list_container_stats(with_timeout(STATS_TIMEOUT, ListContainerStatsRequest::default()));
    let sandboxes = async {
        // An unfiltered list fails if a rehearsal could not be removed, because its sandbox has no
        // cgroup.
        let filter = PodSandboxStatsFilter { id: pod?.to_owned(), ..Default::default() };
        let request = ListPodSandboxStatsRequest { filter: Some(filter) };
        sandboxes.list_pod_sandbox_stats(with_timeout(STATS_TIMEOUT, request)).await.ok()
    };
    let both = tokio::time::timeout(STATS_TIMEOUT, futures::future::join(containers, sandboxes));
    let metrics = metrics_subscription.collect(runtime, pod, STATS_TIMEOUT);
    let (both, metrics) = futures::future::join(both, metrics).await;
    let (containers, sandboxes) =
        both.map_or((None, None), |(containers, sandboxes)| (containers.ok(), sandboxes));
    let (now, network) = (now(), if own_network { network::interfaces() } else { Vec::new() });
    let metrics = metrics.map(|metrics| metrics::with_network(metrics, &network, now));
    let beat = assemble(
        containers.map(|answer| answer.into_inner().stats),
        sandboxes.map(|answer| answer.into_inner().stats),
        &network,
        now,
    );
    Heartbeat { metrics, ..beat }
}

/// Builds a heartbeat. The pod's statistics are left out unless containerd returned all of them:
/// the daemon keeps the last complete ones, and missing numbers would read as zero.
fn assemble(
    containers: Option<Vec<ContainerStats>>,
    sandboxes: Option<Vec<PodSandboxStats>>,
    network: &[Interface],
    now: i64,
) -> Heartbeat {
    let sandbox = match (&containers, sandboxes) {
        (Some(containers), Some(sandboxes)) => Some(fill_sandbox_stats(
            sandboxes.into_iter().next().unwrap_or_default(),
            containers,
            network,
            now,
        )),
        _ => None,
    };
    let containers = containers.unwrap_or_default();
    Heartbeat { containers, sandbox, metrics: None, ephemeral_storage: 0 }
}

/// Fills in statistics that containerd omits. It counts the network only for sandboxes with their
/// own network namespace. If it can't read the cgroup of a sandbox, CPU and memory are the sums
/// over the containers.
fn fill_sandbox_stats(
    mut sandbox: PodSandboxStats,
    containers: &[ContainerStats],
    network: &[Interface],
    now: i64,
) -> PodSandboxStats {
    let linux = sandbox.linux.get_or_insert_default();
    if linux.network.is_none() {
        linux.network = network_usage(network, now);
    }
    if linux.cpu.is_none() && !containers.is_empty() {
        sum(linux, containers, now);
    }
    sandbox
}

fn sum(linux: &mut LinuxPodSandboxStats, containers: &[ContainerStats], timestamp: i64) {
    let cpu = |of: fn(&CpuUsage) -> Option<UInt64Value>| {
        total(containers.iter().filter_map(|stats| of(stats.cpu.as_ref()?)))
    };
    let memory = |of: fn(&MemoryUsage) -> Option<UInt64Value>| {
        total(containers.iter().filter_map(|stats| of(stats.memory.as_ref()?)))
    };
    linux.cpu = Some(CpuUsage {
        timestamp,
        usage_core_nano_seconds: cpu(|cpu| cpu.usage_core_nano_seconds),
        usage_nano_cores: cpu(|cpu| cpu.usage_nano_cores),
        ..Default::default()
    });
    linux.memory = Some(MemoryUsage {
        timestamp,
        working_set_bytes: memory(|memory| memory.working_set_bytes),
        usage_bytes: memory(|memory| memory.usage_bytes),
        rss_bytes: memory(|memory| memory.rss_bytes),
        ..Default::default()
    });
}

fn total(values: impl Iterator<Item = UInt64Value>) -> Option<UInt64Value> {
    values.reduce(|sum, value| UInt64Value { value: sum.value.saturating_add(value.value) })
}

/// Converts counters to CRI's type; `None` without interfaces.
fn network_usage(network: &[Interface], timestamp: i64) -> Option<NetworkUsage> {
    let counters = |value| Some(UInt64Value { value });
    let mut interfaces =
        network.iter().map(|Interface { name, received, sent }| NetworkInterfaceUsage {
            name: name.clone(),
            rx_bytes: counters(received.bytes),
            rx_errors: counters(received.errors),
            tx_bytes: counters(sent.bytes),
            tx_errors: counters(sent.errors),
        });
    let default_interface = Some(interfaces.next()?);
    Some(NetworkUsage { timestamp, default_interface, interfaces: interfaces.collect() })
}

fn now() -> i64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| i64::try_from(since.as_nanos()).unwrap_or(i64::MAX))
}

#[cfg(test)]
mod tests {
    use std::{
        convert::Infallible,
        sync::{Arc, Mutex},
        task::{Context, Poll},
    };

    use futures::future::BoxFuture;
    use http_body_util::BodyExt as _;
    use prost::Message as _;
    use tokio::net::UnixListener;
    use tonic::{Status, body::Body, server::NamedService, transport::Server};
    use tower::Service;

    use super::*;
    use crate::agent::network::Counters;

    fn network() -> Vec<Interface> {
        let counters = |bytes| Counters { bytes, packets: 1, errors: bytes + 1, dropped: 1 };
        ["eth0", "net1"]
            .map(|name| Interface {
                name: name.to_owned(),
                received: counters(3),
                sent: counters(5),
            })
            .into()
    }

    fn value(value: u64) -> Option<UInt64Value> {
        Some(UInt64Value { value })
    }

    #[test]
    fn network_usage_has_eth0_as_default_interface() {
        let usage = network_usage(&network(), 9).unwrap();
        let eth0 = usage.default_interface.unwrap();
        assert_eq!((eth0.name.as_str(), usage.timestamp), ("eth0", 9));
        assert_eq!(
            (eth0.rx_bytes, eth0.rx_errors, eth0.tx_bytes, eth0.tx_errors),
            (value(3), value(4), value(5), value(6))
        );
        assert_eq!(
            usage.interfaces.iter().map(|interface| interface.name.as_str()).collect::<Vec<_>>(),
            ["net1"]
        );
        assert_eq!(network_usage(&[], 9), None);
    }

    /// Verifies U1.
    #[test]
    fn sandbox_stats_are_filled_in_only_where_missing() {
        let of_container = ContainerStats {
            cpu: Some(CpuUsage { usage_core_nano_seconds: value(5), ..Default::default() }),
            memory: Some(MemoryUsage { working_set_bytes: value(7), ..Default::default() }),
            ..Default::default()
        };
        let linux = fill_sandbox_stats(
            PodSandboxStats::default(),
            &[of_container.clone(), of_container.clone()],
            &network(),
            9,
        )
        .linux
        .unwrap();
        assert_eq!(linux.cpu.unwrap().usage_core_nano_seconds, value(10));
        assert_eq!(linux.memory.unwrap().working_set_bytes, value(14));
        let theirs = LinuxPodSandboxStats {
            cpu: Some(CpuUsage { usage_core_nano_seconds: value(1), ..Default::default() }),
            network: Some(NetworkUsage { timestamp: 1, ..Default::default() }),
            ..Default::default()
        };
        let sandbox = PodSandboxStats { linux: Some(theirs.clone()), ..Default::default() };
        assert_eq!(
            fill_sandbox_stats(sandbox, &[of_container], &network(), 9).linux.unwrap(),
            theirs
        );
        assert_eq!(
            fill_sandbox_stats(PodSandboxStats::default(), &[], &[], 9).linux.unwrap(),
            LinuxPodSandboxStats::default()
        );
    }

    /// Records the requests of statistics of sandboxes, and refuses all calls.
    #[derive(Clone, Default)]
    struct FakeContainerd(Arc<Mutex<Vec<ListPodSandboxStatsRequest>>>);

    impl NamedService for FakeContainerd {
        const NAME: &'static str = "runtime.v1.RuntimeService";
    }

    impl Service<http::Request<Body>> for FakeContainerd {
        type Response = http::Response<Body>;
        type Error = Infallible;
        type Future = BoxFuture<'static, Result<Self::Response, Infallible>>;

        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
            Poll::Ready(Ok(()))
        }

        fn call(&mut self, request: http::Request<Body>) -> Self::Future {
            let requests = Arc::clone(&self.0);
            Box::pin(async move {
                if request.uri().path().ends_with("/ListPodSandboxStats") {
                    let body = request.into_body().collect().await.unwrap().to_bytes();
                    // The message follows the flag and the length.
                    let request = ListPodSandboxStatsRequest::decode(body.slice(5..)).unwrap();
                    requests.lock().unwrap().push(request);
                }
                Ok(Status::aborted("fake").into_http())
            })
        }
    }

    /// Verifies U1.
    #[tokio::test]
    async fn sandbox_stats_are_requested_only_for_the_pod() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("containerd.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let containerd = FakeContainerd::default();
        let incoming = futures::stream::unfold(listener, |listener| async {
            Some((listener.accept().await.map(|(stream, _)| stream), listener))
        });
        let server = tokio::spawn(
            Server::builder().add_service(containerd.clone()).serve_with_incoming(incoming),
        );
        let runtime = Runtime::new(socket);
        // On a busy machine, the first heartbeats may exceed their deadline.
        while containerd.0.lock().unwrap().is_empty() {
            heartbeat(&runtime, &MetricsSubscription::default(), Some("pod"), false).await;
        }
        let filter = PodSandboxStatsFilter { id: "pod".to_owned(), ..Default::default() };
        let of_the_pod = ListPodSandboxStatsRequest { filter: Some(filter) };
        let requests = containerd.0.lock().unwrap().clone();
        assert!(requests.iter().all(|request| *request == of_the_pod), "{requests:?}");
        server.abort();
    }

    /// Verifies U3.
    #[test]
    fn incomplete_statistics_are_left_out() {
        let (containers, sandboxes) =
            (Some(vec![ContainerStats::default()]), Some(vec![PodSandboxStats::default()]));
        for (containers, sandboxes) in
            [(None, None), (containers.clone(), None), (None, sandboxes.clone())]
        {
            assert_eq!(assemble(containers, sandboxes, &network(), 9).sandbox, None);
        }
        let beat = assemble(containers, sandboxes, &network(), 9);
        assert!(
            beat.containers.len() == 1 && beat.sandbox.unwrap().linux.unwrap().network.is_some()
        );
    }
}
