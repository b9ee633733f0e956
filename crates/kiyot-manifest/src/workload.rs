//! Workloads, and the pods that controllers create from their templates.

use std::fmt;

use kiyot_values::problems::Report;
use serde_json::{Map, Value};

use super::{Metadata, Pod, Volume, metadata::GENERATED, place::Place};

mod labels;
mod spec;

use spec::Spec;

/// Kind of a workload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WorkloadKind {
    /// `CronJob` of `batch/v1`.
    CronJob,
    /// `DaemonSet` of `apps/v1`.
    DaemonSet,
    /// `Deployment` of `apps/v1`.
    Deployment,
    /// `Job` of `batch/v1`.
    Job,
    /// `PodTemplate` of `v1`.
    PodTemplate,
    /// `ReplicaSet` of `apps/v1`.
    ReplicaSet,
    /// `ReplicationController` of `v1`.
    ReplicationController,
    /// `StatefulSet` of `apps/v1`.
    StatefulSet,
}

/// Workload that creates a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Workload {
    /// Kind.
    pub kind: WorkloadKind,
    /// Name.
    pub name: String,
    /// Number of pods at the same time. A DaemonSet has one pod on each node.
    pub pods: u32,
}

impl WorkloadKind {
    /// All kinds, with their names and versions.
    pub(super) const ALL: [(Self, &'static str, &'static str); 8] = [
        (Self::CronJob, "CronJob", "batch/v1"),
        (Self::DaemonSet, "DaemonSet", "apps/v1"),
        (Self::Deployment, "Deployment", "apps/v1"),
        (Self::Job, "Job", "batch/v1"),
        (Self::PodTemplate, "PodTemplate", "v1"),
        (Self::ReplicaSet, "ReplicaSet", "apps/v1"),
        (Self::ReplicationController, "ReplicationController", "v1"),
        (Self::StatefulSet, "StatefulSet", "apps/v1"),
    ];

    /// Returns the field with the number of pods.
    pub fn count_key(self) -> &'static str {
        match self {
            Self::CronJob | Self::Job => "parallelism",
            _ => "replicas",
        }
    }
}

impl fmt::Display for WorkloadKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Self::ALL.iter().find(|(kind, ..)| kind == self).map_or("", |(_, name, _)| name);
        f.write_str(name)
    }
}

/// Reads a workload as the pod that it creates. Its pods differ only by name, so the first pod
/// explains all.
pub(super) fn read(
    kind: WorkloadKind,
    at: &Place<'_>,
    fields: Map<String, Value>,
    notes: &Report,
) -> Option<Pod> {
    let spec = Spec::read(kind, at, fields, notes)?;
    let own = Metadata::read(&at.of("metadata"), spec.metadata);
    let name = match kind {
        WorkloadKind::StatefulSet => format!("{}-{}", own.name, spec.first_ordinal),
        WorkloadKind::Job | WorkloadKind::CronJob if spec.is_indexed => {
            format!("{}-0-{GENERATED}", own.name)
        }
        _ => format!("{}-{GENERATED}", own.name),
    };
    let template = spec.template.metadata.unwrap_or_default();
    let mut metadata = Metadata::of_template(template, name, own.namespace.clone());
    labels::add(&mut metadata, kind, &own, spec.is_indexed);
    let claimed = spec.claims.into_iter().map(Volume::of_claim).collect();
    let mut pod = Pod::read_spec(metadata, &spec.at.of("spec"), spec.template.spec, claimed)?;
    match kind {
        WorkloadKind::StatefulSet => pod.hostname = Some(pod.metadata.name.clone()),
        WorkloadKind::Job if spec.is_indexed => pod.hostname = Some(format!("{}-0", own.name)),
        _ => {}
    }
    pod.workload = Some(Workload { kind, name: own.name, pods: spec.pods });
    Some(pod)
}

#[cfg(test)]
mod tests;
