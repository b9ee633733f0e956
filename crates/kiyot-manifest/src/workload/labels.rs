//! Labels and annotations that controllers add to their pods.

use super::WorkloadKind;
use crate::Metadata;

/// Value of a label that the API server or a controller chooses.
const GENERATED: &str = "generated";
/// Annotation of a DaemonSet with the value of the label `pod-template-generation`.
const TEMPLATE_GENERATION: &str = "deprecated.daemonset.template.generation";
/// Label and annotation of a pod of an indexed Job.
const COMPLETION_INDEX: &str = "batch.kubernetes.io/job-completion-index";

/// Adds the labels and annotations of a workload's first pod to its template's.
pub(super) fn add(metadata: &mut Metadata, kind: WorkloadKind, own: &Metadata, is_indexed: bool) {
    let generated = || GENERATED.to_owned();
    let labels = match kind {
        WorkloadKind::Deployment => vec![("pod-template-hash", generated())],
        WorkloadKind::DaemonSet => {
            let generation = own.annotations.get(TEMPLATE_GENERATION);
            vec![
                ("controller-revision-hash", generated()),
                ("pod-template-generation", generation.map_or("1".to_owned(), String::clone)),
            ]
        }
        WorkloadKind::StatefulSet => {
            let ordinal = metadata.name.rsplit('-').next().unwrap_or_default().to_owned();
            vec![
                ("controller-revision-hash", format!("{}-{GENERATED}", own.name)),
                ("statefulset.kubernetes.io/pod-name", metadata.name.clone()),
                ("apps.kubernetes.io/pod-index", ordinal),
            ]
        }
        WorkloadKind::Job | WorkloadKind::CronJob => {
            let job = match kind {
                WorkloadKind::Job => own.name.clone(),
                _ => format!("{}-{GENERATED}", own.name),
            };
            if is_indexed {
                metadata.labels.insert(COMPLETION_INDEX.into(), "0".into());
                metadata.annotations.insert(COMPLETION_INDEX.into(), "0".into());
            }
            vec![
                ("batch.kubernetes.io/controller-uid", own.uid.clone()),
                ("batch.kubernetes.io/job-name", job.clone()),
                ("controller-uid", own.uid.clone()),
                ("job-name", job),
            ]
        }
        WorkloadKind::PodTemplate
        | WorkloadKind::ReplicaSet
        | WorkloadKind::ReplicationController => Vec::new(),
    };
    metadata.labels.extend(labels.into_iter().map(|(key, value)| (key.to_owned(), value)));
}
