//! `spec` of a workload.

use super::WorkloadKind;
use crate::{
    manifest::Metadata,
    problems::{Field, Table},
};

/// Largest count: the API has 32 bits with a sign.
const MAX_COUNT: u32 = i32::MAX.unsigned_abs();

/// Fields of each kind that shape no pod.
const DEPLOYMENT: [&str; 6] = [
    "minReadySeconds",
    "paused",
    "progressDeadlineSeconds",
    "revisionHistoryLimit",
    "selector",
    "strategy",
];
const DAEMON_SET: [&str; 4] =
    ["minReadySeconds", "revisionHistoryLimit", "selector", "updateStrategy"];
const STATEFUL_SET: [&str; 7] = [
    "minReadySeconds",
    "persistentVolumeClaimRetentionPolicy",
    "podManagementPolicy",
    "revisionHistoryLimit",
    "selector",
    "serviceName",
    "updateStrategy",
];
/// Fields of ReplicaSets and ReplicationControllers.
const REPLICA_SET: [&str; 2] = ["minReadySeconds", "selector"];
const JOB: [&str; 13] = [
    "activeDeadlineSeconds",
    "backoffLimit",
    "backoffLimitPerIndex",
    "managedBy",
    "manualSelector",
    "maxFailedIndexes",
    "podFailurePolicy",
    "podReplacementPolicy",
    "scheduling",
    "selector",
    "successPolicy",
    "suspend",
    "ttlSecondsAfterFinished",
];
const CRON_JOB: [&str; 7] = [
    "concurrencyPolicy",
    "failedJobsHistoryLimit",
    "schedule",
    "startingDeadlineSeconds",
    "successfulJobsHistoryLimit",
    "suspend",
    "timeZone",
];

/// Parts of a workload's `spec` that shape its pods.
#[derive(Debug)]
pub(super) struct Spec<'r> {
    /// Template of its pods.
    pub(super) template: Option<Field<'r>>,
    /// Pods at the same time.
    pub(super) pods: u32,
    /// Number of a StatefulSet's first pod.
    pub(super) first_ordinal: u32,
    /// Names of a StatefulSet's claims.
    pub(super) claims: Vec<String>,
    /// Set for a Job with `completionMode: Indexed`.
    pub(super) is_indexed: bool,
}

impl<'r> Spec<'r> {
    pub(super) fn read(kind: WorkloadKind, document: &mut Table<'r>) -> Option<Self> {
        if kind == WorkloadKind::PodTemplate {
            let mut spec = Self::of_template(document);
            spec.pods = 1;
            return Some(spec);
        }
        let mut table = document.need("spec", "a table with a template")?.table()?;
        if kind == WorkloadKind::CronJob {
            table.ignore(&CRON_JOB);
            let job = table.need("jobTemplate", "a Job's spec").and_then(Field::table);
            table.finish();
            let mut job = job?;
            job.take("metadata");
            let spec = Self::read(WorkloadKind::Job, &mut job);
            job.finish();
            return spec;
        }
        let mut spec = Self::of_template(&mut table);
        let mut count = |key| table.take(key).and_then(|field| field.number(0..=MAX_COUNT));
        spec.pods = match kind {
            WorkloadKind::Job => {
                let completions = count("completions").unwrap_or(MAX_COUNT);
                count("parallelism").unwrap_or(1).min(completions)
            }
            WorkloadKind::DaemonSet => 1,
            _ => count("replicas").unwrap_or(1),
        };
        match kind {
            WorkloadKind::Job => {
                let modes = [("NonIndexed", false), ("Indexed", true)];
                let mode = table.take("completionMode").and_then(|field| field.choice(&modes));
                spec.is_indexed = mode.unwrap_or_default();
                table.ignore(&JOB);
            }
            WorkloadKind::StatefulSet => {
                let claims = table.take("volumeClaimTemplates").map(Field::items);
                spec.claims = claims.unwrap_or_default().into_iter().filter_map(claim).collect();
                spec.first_ordinal =
                    table.take("ordinals").and_then(first_ordinal).unwrap_or_default();
                table.ignore(&STATEFUL_SET);
            }
            WorkloadKind::DaemonSet => table.ignore(&DAEMON_SET),
            WorkloadKind::Deployment => table.ignore(&DEPLOYMENT),
            _ => table.ignore(&REPLICA_SET),
        }
        table.finish();
        Some(spec)
    }

    fn of_template(table: &mut Table<'r>) -> Self {
        Self {
            template: table.need("template", "the metadata and spec of its pods"),
            pods: 0,
            first_ordinal: 0,
            claims: Vec::new(),
            is_indexed: false,
        }
    }
}

/// Reads the name of a claim's template, whose other fields are for its plugin.
fn claim(field: Field<'_>) -> Option<String> {
    let mut table = field.table()?;
    let Metadata { name, .. } = Metadata::read(&mut table);
    table.ignore(&["apiVersion", "kind", "spec", "status"]);
    table.finish();
    Some(name)
}

fn first_ordinal(field: Field<'_>) -> Option<u32> {
    let mut table = field.table()?;
    let start = table.take("start").and_then(|field| field.number(0..=MAX_COUNT));
    table.finish();
    start
}
