//! Parts of a workload that shape its pods.

use k8s_openapi::{
    api::{
        apps::v1::{DaemonSet, Deployment, ReplicaSet, StatefulSet},
        batch::v1::{CronJob, Job, JobSpec},
        core::v1::{PersistentVolumeClaim, PodTemplate, PodTemplateSpec, ReplicationController},
    },
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use kiyot_values::problems::Report;
use serde_json::{Map, Value};

use super::WorkloadKind;
use crate::{Metadata, place::Place, typed};

/// Largest count: the API uses signed 32-bit integers.
const MAX_COUNT: u32 = i32::MAX.unsigned_abs();

/// Parts of a workload that shape its pods.
#[derive(Debug)]
pub(super) struct Spec<'r> {
    /// The workload's own metadata.
    pub(super) metadata: ObjectMeta,
    /// Place of the template.
    pub(super) at: Place<'r>,
    /// Template of its pods.
    pub(super) template: PodTemplateSpec,
    /// Number of pods at the same time.
    pub(super) pods: u32,
    /// Number of a StatefulSet's first pod.
    pub(super) first_ordinal: u32,
    /// Names of a StatefulSet's claims.
    pub(super) claims: Vec<String>,
    /// True for a Job with `completionMode: Indexed`.
    pub(super) is_indexed: bool,
}

impl<'r> Spec<'r> {
    pub(super) fn read(
        kind: WorkloadKind,
        at: &Place<'r>,
        fields: Map<String, Value>,
        notes: &Report,
    ) -> Option<Self> {
        let spec_at = at.of("spec");
        let of = |metadata, replicas: Option<i32>, template| Self {
            metadata,
            at: spec_at.of("template"),
            template,
            pods: count(&spec_at, "replicas", replicas).unwrap_or(1),
            first_ordinal: 0,
            claims: Vec::new(),
            is_indexed: false,
        };
        Some(match kind {
            WorkloadKind::CronJob => {
                let CronJob { metadata, spec, .. } = typed::read(at, fields, notes)?;
                let job = spec.job_template.spec.unwrap_or_default();
                Self::of_job(&spec_at.of("jobTemplate.spec"), metadata, job)
            }
            WorkloadKind::Job => {
                let Job { metadata, spec, .. } = typed::read(at, fields, notes)?;
                Self::of_job(&spec_at, metadata, spec.unwrap_or_default())
            }
            WorkloadKind::DaemonSet => {
                let DaemonSet { metadata, spec, .. } = typed::read(at, fields, notes)?;
                of(metadata, None, spec.unwrap_or_default().template)
            }
            WorkloadKind::Deployment => {
                let Deployment { metadata, spec, .. } = typed::read(at, fields, notes)?;
                let spec = spec.unwrap_or_default();
                of(metadata, spec.replicas, spec.template)
            }
            WorkloadKind::ReplicaSet => {
                let ReplicaSet { metadata, spec, .. } = typed::read(at, fields, notes)?;
                let spec = spec.unwrap_or_default();
                of(metadata, spec.replicas, spec.template.unwrap_or_default())
            }
            WorkloadKind::ReplicationController => {
                let ReplicationController { metadata, spec, .. } = typed::read(at, fields, notes)?;
                let spec = spec.unwrap_or_default();
                of(metadata, spec.replicas, spec.template.unwrap_or_default())
            }
            WorkloadKind::PodTemplate => {
                let PodTemplate { metadata, template } = typed::read(at, fields, notes)?;
                Self { at: at.of("template"), ..of(metadata, None, template.unwrap_or_default()) }
            }
            WorkloadKind::StatefulSet => {
                let StatefulSet { metadata, spec, .. } = typed::read(at, fields, notes)?;
                let spec = spec.unwrap_or_default();
                let claim = |at: Place<'_>, claim: PersistentVolumeClaim| {
                    Some(Metadata::read(&at.of("metadata"), claim.metadata).name)
                };
                let start = spec.ordinals.and_then(|ordinals| ordinals.start);
                let first = count(&spec_at.of("ordinals"), "start", start);
                Self {
                    first_ordinal: first.unwrap_or_default(),
                    claims: spec_at.items(
                        "volumeClaimTemplates",
                        spec.volume_claim_templates,
                        claim,
                    ),
                    ..of(metadata, spec.replicas, spec.template)
                }
            }
        })
    }

    fn of_job(at: &Place<'r>, metadata: ObjectMeta, job: JobSpec) -> Self {
        let modes = [("NonIndexed", false), ("Indexed", true)];
        let mode = at.take("completionMode", job.completion_mode);
        let completions = count(at, "completions", job.completions).unwrap_or(MAX_COUNT);
        Self {
            metadata,
            at: at.of("template"),
            template: job.template,
            pods: count(at, "parallelism", job.parallelism).unwrap_or(1).min(completions),
            first_ordinal: 0,
            claims: Vec::new(),
            is_indexed: mode.and_then(|field| field.choice(&modes)).unwrap_or_default(),
        }
    }
}

fn count(at: &Place<'_>, key: &str, value: Option<i32>) -> Option<u32> {
    at.take(key, value)?.number(0..=MAX_COUNT)
}
