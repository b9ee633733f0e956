//! Fuzzing of reports of agents: any bytes become events and responses. For kiyot-fuzz alone.

use std::{collections::BTreeSet, time::Instant};

use bytes::Bytes;
use kiyot_engine::id::{CellId, ContainerId, SandboxId};
use kiyot_proto::{cell, cri, store};
use prost::Message;

use crate::backends::milpa::{
    cell_client::checked_id,
    pods::{
        Pods,
        container_state::{self, Termination},
        filter,
    },
};

/// Most steps of an input.
const MAX_STEPS: usize = 64;

/// Times of the containers by the node's clock.
const TIMES: container_state::Times = container_state::Times { created: 1 << 60, now: 3 << 59 };

fn assert_exit_time(status: &store::ContainerStatus) {
    let (started, finished) = (status.started_unix_nanos, status.finished_unix_nanos);
    let exit_times = started.max(TIMES.created)..=TIMES.now;
    assert!(finished == 0 || exit_times.contains(&finished), "{status:?}");
}

/// Reads length-delimited events, and applies their reports to a container.
///
/// # Panics
/// If its state goes back, or it exits twice.
pub fn events(mut bytes: &[u8]) {
    let mut current = store::ContainerStatus::default();
    while let Ok(event) = cell::Event::decode_length_delimited(&mut bytes) {
        let before = container_state::state(&current);
        let next = match &event.event {
            Some(cell::event::Event::Container(reported)) => {
                container_state::next(&current, reported, TIMES)
            }
            Some(cell::event::Event::ContainerGone(_)) => {
                container_state::ended(&current, &Termination::absent(&current), TIMES)
            }
            Some(cell::event::Event::Snapshot(snapshot)) => snapshot
                .containers
                .iter()
                .find_map(|reported| container_state::next(&current, reported, TIMES)),
            _ => None,
        };
        if let Some(next) = next {
            assert_ne!(before, cri::ContainerState::ContainerExited, "{event:?}");
            assert_exit_time(&next);
            current = next;
        }
        if bytes.is_empty() {
            return;
        }
    }
}

/// Metrics that the node describes, with their labels.
const DESCRIBED: [(&str, &[&str]); 6] = [
    ("a", &["a", "id"]),
    ("container_cpu_usage_seconds_total", &["id", "cpu"]),
    ("container_fs_usage_bytes", &["device", "id"]),
    ("container_network_receive_packets_total", &["id", "interface"]),
    ("container_processes", &["id"]),
    ("container_sockets", &["id", "pod"]),
];

fn described() -> Vec<u8> {
    let descriptors = DESCRIBED.iter().map(|(name, keys)| cri::MetricDescriptor {
        name: (*name).to_owned(),
        label_keys: keys.iter().map(|key| (*key).to_owned()).collect(),
        ..Default::default()
    });
    cri::ListMetricDescriptorsResponse { descriptors: descriptors.collect() }.encode_to_vec()
}

/// Two cells with a pod each, and the expected state of their containers.
struct Model {
    pods: Pods,
    now: Instant,
    cells: Vec<(CellId, SandboxId)>,
    containers: Vec<Expected>,
    made: usize,
}

/// The expected state of a container.
struct Expected {
    id: ContainerId,
    of: usize,
    cell_container: String,
    status: store::ContainerStatus,
}

impl Model {
    fn new() -> Option<Self> {
        let pods = Pods::new();
        let mut cells = Vec::new();
        for n in 0..2 {
            let (id, cell) = (format!("milpa{n:a>59}"), format!("cell-{n:012}"));
            let metadata =
                Some(cri::PodSandboxMetadata { uid: format!("uid-{n}"), ..Default::default() });
            let config = Some(cri::PodSandboxConfig { metadata, ..Default::default() });
            let meta = store::SandboxMeta {
                id,
                cell: cell.clone(),
                cell_sandbox: "s".to_owned(),
                config,
                ..Default::default()
            };
            cells.push((CellId::parse(&cell).ok()?, pods.insert_sandbox(&meta, true).ok()?));
        }
        Some(Self { pods, now: Instant::now(), cells, containers: Vec::new(), made: 0 })
    }

    /// Applies a cell's response to `CreateContainer`.
    fn create(&mut self, of: usize, answer: cri::CreateContainerResponse) {
        let Ok(cell_container) = checked_id(answer.container_id) else { return };
        assert!(!cell_container.is_empty() && cell_container.len() <= 256);
        let id = format!("milpa{:b>59}", self.made);
        self.made += 1;
        let metadata = Some(cri::ContainerMetadata { name: id.clone(), attempt: 0 });
        let meta = store::ContainerMeta {
            id: id.clone(),
            sandbox: self.cells[of].1.as_str().to_owned(),
            cell_container: cell_container.clone(),
            config: Some(cri::ContainerConfig { metadata, ..Default::default() }),
            ..Default::default()
        };
        let status = store::ContainerStatus {
            state: cri::ContainerState::ContainerCreated.into(),
            ..Default::default()
        };
        // A stopped sandbox gets no containers.
        let ready = self.pods.sandbox(self.cells[of].1.as_str()).is_ok_and(|sandbox| sandbox.ready);
        assert_eq!(self.pods.insert_container(&meta, status.clone(), None), Ok(ready));
        if let (Ok(id), true) = (ContainerId::parse(&id), ready) {
            self.containers.push(Expected { id, of, cell_container, status });
        }
    }

    /// Applies a report of a container, as the watch of its cell does.
    fn report(&mut self, of: usize, reported: &cri::ContainerStatus) {
        self.change(of, &reported.id, Some(reported), |current| {
            container_state::next(current, reported, TIMES)
        });
    }

    fn change(
        &mut self,
        of: usize,
        cell_container: &str,
        reported: Option<&cri::ContainerStatus>,
        decide: impl FnOnce(&store::ContainerStatus) -> Option<store::ContainerStatus>,
    ) {
        let found = self.pods.container_of_cell(&self.cells[of].0, cell_container);
        let Some(made) = self
            .containers
            .iter_mut()
            .find(|made| made.of == of && made.cell_container == cell_container)
        else {
            return assert!(found.is_none(), "{cell_container:?} is of another cell");
        };
        assert_eq!(found.map(|found| found.id), Some(made.id.clone()), "{cell_container:?}");
        if let Some(reported) = reported {
            self.pods.set_reported(&made.id, reported);
        }
        let before = container_state::state(&made.status);
        if let Some(next) = decide(&made.status) {
            assert_ne!(before, cri::ContainerState::ContainerExited, "it exits once");
            assert_exit_time(&next);
            self.pods.set_status(&made.id, next.clone());
            made.status = next;
        }
    }

    fn event(&mut self, of: usize, event: cell::event::Event) {
        let cell = self.cells[of].0.clone();
        match event {
            cell::event::Event::Container(reported) => self.report(of, &reported),
            cell::event::Event::ContainerGone(id) => self.change(of, &id, None, |current| {
                container_state::ended(current, &Termination::absent(current), TIMES)
            }),
            cell::event::Event::Snapshot(snapshot) => {
                snapshot.containers.iter().for_each(|reported| self.report(of, reported))
            }
            cell::event::Event::SandboxGone(_) => self.pods.set_ready(&self.cells[of].1, false),
            cell::event::Event::Heartbeat(beat) => {
                let before = self.usage(1 - of);
                self.pods.heartbeat(&cell, beat, self.now);
                assert_eq!(self.usage(1 - of), before, "a cell reports on its own pod only");
            }
            cell::event::Event::Sandbox(_) | cell::event::Event::Log(_) => {}
        }
    }

    fn remove(&mut self, which: usize) {
        if !self.containers.is_empty() {
            let made = self.containers.remove(which % self.containers.len());
            self.pods.remove_container(&made.id);
        }
    }

    /// Returns the usage and the metrics of a cell's pod.
    fn usage(&self, of: usize) -> (Bytes, Option<Vec<u8>>, Vec<cri::PodSandboxMetrics>) {
        let sandbox = self.cells[of].1.as_str().to_owned();
        let filter = filter::Containers { sandbox: sandbox.clone(), ..Default::default() };
        let of_sandbox = self.pods.usage_of(&self.cells[of].1, self.now);
        let mut metrics = self.metrics();
        metrics.retain(|pod| pod.pod_sandbox_id == sandbox);
        (
            self.pods.list_container_stats(&filter),
            of_sandbox.map(|stats| stats.encode_to_vec()),
            metrics,
        )
    }

    fn metrics(&self) -> Vec<cri::PodSandboxMetrics> {
        let list: cri::ListPodSandboxMetricsResponse =
            decoded(self.pods.list_metrics(&described(), self.now));
        list.pod_metrics
    }

    /// Checks the owners of metrics, and that a kubelet accepts them: a metric that differs from
    /// its description, or is a duplicate, would make it refuse all.
    fn check_metrics(&self, runs: impl Fn(&str) -> Option<usize>) {
        let mut seen = BTreeSet::new();
        for pod in self.metrics() {
            let cell =
                self.cells.iter().position(|(_, sandbox)| sandbox.as_str() == pod.pod_sandbox_id);
            assert!(
                cell.is_some()
                    && pod.container_metrics.iter().all(|of| runs(&of.container_id) == cell),
                "{pod:?}"
            );
            let of_containers =
                pod.container_metrics.into_iter().map(|of| (of.container_id, of.metrics));
            for (id, metrics) in of_containers.chain([(pod.pod_sandbox_id, pod.metrics)]) {
                for metric in metrics {
                    let keys = DESCRIBED
                        .iter()
                        .find(|(name, _)| *name == metric.name)
                        .map_or(&[][..], |(_, keys)| keys);
                    assert_eq!(
                        (keys.len(), metric.value.is_some()),
                        (metric.label_values.len(), true),
                        "{metric:?}"
                    );
                    let mut labels = keys.iter().zip(&metric.label_values);
                    assert!(labels.any(|(key, value)| *key == "id" && *value == id), "{metric:?}");
                    assert!(seen.insert((metric.name, metric.label_values)), "no duplicates");
                }
            }
        }
    }

    /// Checks the kubelet's responses: all expected containers and no others, with the fields that
    /// the kubelet dereferences without a check.
    fn check(&self) {
        let list: cri::ListContainersResponse =
            decoded(self.pods.list_containers(&filter::Containers::default()));
        assert_eq!(list.containers.len(), self.containers.len());
        for made in &self.containers {
            let state = container_state::state(&made.status);
            let item = list.containers.iter().find(|item| item.id == made.id.as_str());
            assert_eq!(item.map(cri::Container::state), Some(state));
            let Ok(container) = self.pods.container(made.id.as_str()) else {
                panic!("{} is not found", made.id)
            };
            let answer: cri::ContainerStatus = decoded(container.answer().encode_to_vec().into());
            assert_eq!((answer.id.as_str(), answer.state()), (made.id.as_str(), state));
            assert_eq!(
                answer.metadata.map(|metadata| metadata.name).as_deref(),
                Some(made.id.as_str())
            );
        }
        let is = |id: &str, any_of: &[cri::ContainerState]| {
            let made = self.containers.iter().find(|made| made.id.as_str() == id);
            made.filter(|made| any_of.contains(&container_state::state(&made.status)))
                .map(|made| made.of)
        };
        let runs = |id: &str| is(id, &[cri::ContainerState::ContainerRunning]);
        let lives = |id: &str| {
            is(id, &[cri::ContainerState::ContainerCreated, cri::ContainerState::ContainerRunning])
        };
        let stats: cri::ListContainerStatsResponse =
            decoded(self.pods.list_container_stats(&filter::Containers::default()));
        let of = self.check_stats(&stats.stats);
        let all = self.containers.iter().map(|made| made.id.as_str());
        assert!(
            of.iter()
                .map(String::as_str)
                .eq(all.filter(|id| lives(id).is_some()).collect::<BTreeSet<_>>())
        );
        let stats: cri::ListPodSandboxStatsResponse =
            decoded(self.pods.list_sandbox_stats(&filter::Sandboxes::default()));
        assert!(stats.stats.len() <= self.cells.len());
        for stats in stats.stats {
            let attributes = stats.attributes.unwrap_or_default();
            let cell = self.cells.iter().position(|(_, sandbox)| sandbox.as_str() == attributes.id);
            assert!(cell.is_some() && attributes.metadata.is_some(), "{attributes:?}");
            let of = self.check_stats(&stats.linux.unwrap_or_default().containers);
            assert!(of.iter().all(|id| lives(id) == cell), "{of:?}");
        }
        self.check_metrics(runs);
    }

    /// Checks statistics, and returns the ids of their containers.
    fn check_stats(&self, stats: &[cri::ContainerStats]) -> BTreeSet<String> {
        let ids: BTreeSet<String> =
            stats.iter().filter_map(|stats| Some(stats.attributes.as_ref()?.id.clone())).collect();
        assert_eq!(ids.len(), stats.len(), "no duplicates");
        assert!(stats.iter().all(|stats| {
            stats.attributes.as_ref().is_some_and(|attributes| attributes.metadata.is_some())
        }));
        assert!(
            stats.iter().all(|stats| stats
                .writable_layer
                .as_ref()
                .is_none_or(|layer| layer.fs_id.is_none()))
        );
        ids
    }
}

/// Reads responses and events of two cells: a byte that selects the cell and the kind of message,
/// then a length-delimited message.
///
/// # Panics
/// If the kubelet's responses are incomplete, or contain a report on another pod.
pub fn answers(mut bytes: &[u8]) {
    let Some(mut model) = Model::new() else { return };
    for _ in 0..MAX_STEPS {
        let Some((&kind, rest)) = bytes.split_first() else { return };
        bytes = rest;
        let of = usize::from(kind & 1);
        match kind >> 1 & 3 {
            0 => match cri::CreateContainerResponse::decode_length_delimited(&mut bytes) {
                Ok(answer) => model.create(of, answer),
                Err(_) => return,
            },
            1 => model.remove(usize::from(kind >> 3)),
            _ => match cell::Event::decode_length_delimited(&mut bytes) {
                Ok(cell::Event { event: Some(event) }) => model.event(of, event),
                Ok(_) => {}
                Err(_) => return,
            },
        }
        model.check();
    }
}

fn decoded<M: Message + Default>(bytes: Bytes) -> M {
    M::decode(bytes).unwrap_or_else(|error| panic!("the kubelet can't decode it: {error}"))
}
