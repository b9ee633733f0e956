use super::*;
use crate::{File, Manifest, PluginVolume, VolumeKind, parse_files};

fn read(text: &str) -> Manifest {
    let file = File { name: "manifest".into(), text: text.into() };
    parse_files(&[file]).unwrap_or_else(|problems| panic!("{problems}"))
}

fn only(text: &str) -> Pod {
    let mut pods = read(text).pods;
    assert_eq!(pods.len(), 1);
    pods.remove(0)
}

fn problems(text: &str) -> Vec<String> {
    let file = File { name: "manifest".into(), text: text.into() };
    let problems = parse_files(&[file]).unwrap_err();
    problems.list.iter().map(ToString::to_string).collect()
}

fn workload(kind: &str, version: &str, spec: &str) -> String {
    format!(
        "apiVersion: {version}\nkind: {kind}\nmetadata: {{name: w, namespace: s}}\nspec:\n  \
         {spec}\n  template:\n    metadata: {{labels: {{app: a}}, annotations: {{k: v}}}}\n    \
         spec: {{containers: [{{name: c, image: i}}]}}\n"
    )
}

fn labels(pod: &Pod) -> Vec<(&str, &str)> {
    pod.metadata.labels.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect()
}

/// Verifies M5.
#[test]
fn pods_of_workloads_have_the_names_and_labels_of_their_controllers() {
    for (text, name, expected) in [
        (
            workload("Deployment", "apps/v1", "replicas: 2"),
            "w-<generated>",
            vec![("app", "a"), ("pod-template-hash", "generated")],
        ),
        (workload("ReplicaSet", "apps/v1", "replicas: 2"), "w-<generated>", vec![("app", "a")]),
        (workload("ReplicationController", "v1", ""), "w-<generated>", vec![("app", "a")]),
        (
            workload("StatefulSet", "apps/v1", "serviceName: w"),
            "w-0",
            vec![
                ("app", "a"),
                ("apps.kubernetes.io/pod-index", "0"),
                ("controller-revision-hash", "w-generated"),
                ("statefulset.kubernetes.io/pod-name", "w-0"),
            ],
        ),
        (
            workload("DaemonSet", "apps/v1", ""),
            "w-<generated>",
            vec![
                ("app", "a"),
                ("controller-revision-hash", "generated"),
                ("pod-template-generation", "1"),
            ],
        ),
    ] {
        let pod = only(&text);
        assert_eq!((pod.metadata.name.as_str(), labels(&pod)), (name, expected));
        assert_eq!(pod.metadata.namespace, "s");
        assert_eq!(pod.metadata.annotations["k"], "v");
        assert_eq!(pod.workload.unwrap().name, "w");
    }
    let template = "apiVersion: v1\nkind: PodTemplate\nmetadata: {name: w}\ntemplate: {spec: \
                    {containers: [{name: c, image: i}]}}\n";
    assert_eq!(only(template).metadata.name, "w-<generated>");
}

/// Verifies M5.
#[test]
fn pods_of_jobs_are_labelled_with_their_job() {
    let job = only(&workload("Job", "batch/v1", "parallelism: 5\n  completions: 3"));
    let job_labels = &job.metadata.labels;
    assert_eq!((job_labels["job-name"].as_str(), job_labels["app"].as_str()), ("w", "a"));
    assert_eq!(job_labels["batch.kubernetes.io/controller-uid"], job_labels["controller-uid"]);
    assert_eq!(job.workload.map(|workload| workload.pods), Some(3));
    let cron_job = only(include_str!("../samples/cronjob.yaml"));
    assert_eq!(cron_job.metadata.labels["job-name"], "backup-generated");
    // Labels of the Job's template belong to the Job.
    assert!(!cron_job.metadata.labels.contains_key("app"));
    let indexed = only(include_str!("../samples/gpu-job.yaml"));
    let index = "batch.kubernetes.io/job-completion-index";
    assert_eq!(indexed.metadata.name, "train-0-<generated>");
    assert_eq!(indexed.hostname.as_deref(), Some("train-0"));
    assert_eq!(
        (&*indexed.metadata.labels[index], &*indexed.metadata.annotations[index]),
        ("0", "0")
    );
    assert_eq!(indexed.workload.map(|workload| workload.pods), Some(4));
}

/// Verifies M5.
#[test]
fn claims_of_a_stateful_set_replace_its_volumes() {
    let pod = only(include_str!("../samples/statefulset.yaml"));
    assert_eq!((pod.metadata.name.as_str(), pod.host_name().as_str()), ("db-1", "db-1"));
    let volumes: Vec<_> = pod.volumes.iter().map(|volume| volume.name.as_str()).collect();
    assert_eq!(volumes, ["seed", "data"]);
    let VolumeKind::Plugin(PluginVolume { source: "persistentVolumeClaim", .. }) =
        pod.volumes[1].kind
    else {
        panic!("{:?}", pod.volumes)
    };
}

/// Verifies M5.
#[test]
fn daemon_set_keeps_the_generation_of_its_template() {
    let pod = only(include_str!("../samples/daemonset.yaml"));
    assert_eq!(pod.metadata.labels["pod-template-generation"], "3");
    assert_eq!((pod.host_network, pod.containers[0].security.privileged), (true, Some(true)));
}

/// Verifies M2, M5.
#[test]
fn problems_of_a_template_name_their_place() {
    let text = workload("Deployment", "apps/v1", "replicsa: 2").replace("image: i", "imgae: i");
    assert_eq!(
        problems(&text),
        ["document 1.spec.template.spec.containers[0].image: is missing; allowed: the name of an \
          image"]
    );
    let not = "is not a field of Kubernetes 1.36; did you mean";
    assert_eq!(
        only(&text.replace("imgae: i", "imgae: i, image: i")).notes,
        [
            format!("document 1.spec.replicsa: {not}: replicas"),
            format!(
                "document 1.spec.template.spec.containers[0].imgae: {not}: image, \
                     imagePullPolicy"
            ),
        ]
    );
    let text = include_str!("../samples/cronjob.yaml").replace("secretKeyRef", "secretRef");
    assert_eq!(
        only(&text).notes,
        [format!(
            "document 1.spec.jobTemplate.spec.template.spec.containers[0].env[0].valueFrom.\
             secretRef: {not}: secretKeyRef"
        )]
    );
    assert_eq!(
        problems(&workload("ReplicaSet", "apps/v1", "replicas: -1")),
        ["document 1.spec.replicas = -1: is invalid; allowed: a whole number from 0 to 2147483647"]
    );
    let missing = "apiVersion: v1\nkind: PodTemplate\nmetadata: {name: w}\n";
    assert_eq!(
        problems(missing),
        ["document 1.template.spec: is missing; allowed: a table with containers"]
    );
}

/// Verifies M5.
#[test]
fn workload_of_a_version_that_is_not_served_is_refused() {
    let rule = |version: &str| {
        format!("document 1.apiVersion = {version:?}: is invalid; allowed: \"apps/v1\"")
    };
    for version in ["extensions/v1beta1", "apps/v1beta2", "v1"] {
        assert_eq!(problems(&workload("Deployment", version, "")), [rule(version)]);
    }
}
