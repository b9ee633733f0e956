use kiyot_config as config;
use kiyot_engine::placement::ApiRequests;
use kiyot_engine::{
    placement::{
        CatalogueFile, Entry, LaunchRefusal, Market, Offering, Refusal, RefusedQuota, Rules, Size,
        Unoffered, rank,
    },
    request::{
        Architecture,
        keys::{
            ARCHITECTURE, GPU, HEALTHY_TIMEOUT, ISOLATION, PREFIX, PROVIDER, START_WITHIN,
            TARGET_RUNTIME,
        },
    },
};
use kiyot_manifest::{self as manifest, File};
use proptest::{
    collection::vec,
    option,
    prelude::{Strategy, any},
    prop_assert_eq, proptest,
};
use serde_json::json;

use super::*;

mod admission;
mod examples;
mod hostile;
mod starts;
mod variables;

const OPT_IN: &str = include_str!("../../examples/opt-in.toml");
const OPT_OUT: &str = include_str!("../../examples/opt-out.toml");
const CRON_JOB: &str = include_str!("../../crates/kiyot-manifest/src/samples/cronjob.yaml");
const DAEMON_SET: &str = include_str!("../../crates/kiyot-manifest/src/samples/daemonset.yaml");
const DEPLOYMENT: &str = include_str!("../../crates/kiyot-manifest/src/samples/deployment.yaml");
const EVERY_FIELD: &str = include_str!("../../crates/kiyot-manifest/src/samples/every-field.yaml");
const GPU_JOB: &str = include_str!("../../crates/kiyot-manifest/src/samples/gpu-job.yaml");
const LIST: &str = include_str!("../../crates/kiyot-manifest/src/samples/list.json");
const STATEFUL_SET: &str = include_str!("../../crates/kiyot-manifest/src/samples/statefulset.yaml");

fn explained(config: &str, text: &str) -> (String, bool) {
    let config = config::parse("config", config, []).unwrap();
    let file = File { name: "manifest".into(), text: text.into() };
    let manifest = manifest::parse_files(&[file]).unwrap_or_else(|problems| panic!("{problems}"));
    of(&explain(&config, &manifest, Prices::BuiltIn))
}

fn of(explained: &Explanation) -> (String, bool) {
    (explained.to_string(), explained.pods.iter().all(|pod| !pod.is_refused))
}

/// Verifies C7, M5, M6.
#[test]
fn daemon_set_is_routed_by_its_controllers_labels() {
    let (text, fine) = explained(OPT_OUT, DAEMON_SET);
    let expected = "DaemonSet kube-system/kube-proxy\n  pod: kube-proxy-<generated>\n  goes to \
                    containerd: rule daemonsets-stay matches first\nnote: ServiceAccount \
                    kube-system/kube-proxy skipped: it has no pod\nnote: ClusterRoleBinding \
                    kubeadm:node-proxier skipped: it has no pod\n";
    assert_eq!((text.as_str(), fine), (expected, true));
    // Without its controller's labels the pod would go to a cell.
    let deployment = DAEMON_SET
        .replace("kind: DaemonSet", "kind: Deployment")
        .replace("updateStrategy", "strategy")
        .replace("  namespace: kube-system\n", "");
    let (text, _) = explained(OPT_OUT, &deployment);
    assert!(text.contains("goes to containerd instead of milpa: it asks for"), "{text}");
}

/// Verifies M5.
#[test]
fn pods_of_a_workload_are_counted() {
    let (text, fine) = explained(OPT_OUT, DEPLOYMENT);
    let start = "Deployment shop/web\n  pod: web-<generated>\n  replicas: 3\n  goes to milpa: no \
                 rule matches";
    assert!(fine && text.starts_with(start), "{text}");
    let (text, fine) = explained(OPT_IN, CRON_JOB);
    let start =
        "CronJob default/backup\n  pod: backup-<generated>\n  goes to milpa: its annotation";
    assert!(fine && text.starts_with(start), "{text}");
    let (text, fine) = explained(OPT_IN, GPU_JOB);
    let start = "Job research/train\n  pod: train-0-<generated>\n  parallelism: 4\n  goes to milpa";
    assert!(fine && text.starts_with(start), "{text}");
}

/// Verifies M6, M8.
#[test]
fn list_of_mixed_kinds_is_explained_item_by_item() {
    let (text, fine) = explained(OPT_IN, LIST);
    let expected = "Pod shop/debug-<generated>\n  goes to containerd: no rule matches; this is \
                    routing.default\nReplicationController default/old\n  pod: old-<generated>\n  \
                    replicas: 0\n  goes to containerd: no rule matches; this is \
                    routing.default\nnote: Namespace shop skipped: it has no pod\nnote: \
                    ConfigMap shop/m skipped: it has no pod\nnote: Certificate shop/web skipped: \
                    its kind is no workload of Kubernetes\n";
    assert_eq!((text.as_str(), fine), (expected, true));
}

/// Verifies M7.
#[test]
fn resources_outside_the_request_are_noted_for_cells_alone() {
    let gpu = "note: nvidia.com/gpu is not in the CRI request, and pods in cells have no devices \
               yet; with kubernetes.kubeconfig the daemon refuses such a pod";
    let storage = "note: ephemeral-storage is not in the CRI request; the annotation \
                   pod.elotl.co/volume-size chooses the size of the cell's disk";
    let (text, _) = explained(OPT_IN, GPU_JOB);
    for note in [gpu, storage, "note: hugepages-2Mi is in the CRI request, and chooses no cell"] {
        assert!(text.contains(note), "{text}");
    }
    let target = "kubernetes.io/target-runtime: kiyot";
    let annotated = format!("{target}, pod.elotl.co/volume-size: 40Gi");
    let in_one_line = GPU_JOB.replace(&format!("\n        {target}"), &format!(" {{{annotated}}}"));
    let (text, _) = explained(OPT_IN, &in_one_line);
    assert!(!text.contains("ephemeral-storage"), "{text}");
    let on_the_node = GPU_JOB.replace(target, "a: b");
    let (text, _) = explained(OPT_IN, &on_the_node);
    assert!(text.contains("goes to containerd") && !text.contains("note:"), "{text}");
    let none = GPU_JOB.replace("nvidia.com/gpu: 1", "nvidia.com/gpu: 0");
    assert!(!explained(OPT_IN, &none).0.contains("nvidia.com/gpu"));
    let other = GPU_JOB.replace("nvidia.com/gpu: 1", "smarter-devices/fuse: 1");
    let (text, _) = explained(OPT_IN, &other);
    let note = "note: smarter-devices/fuse is not in the CRI request, and chooses no cell";
    assert!(text.contains(note), "{text}");
}

/// Verifies U28.
#[test]
fn pod_with_gpus_is_refused_by_name() {
    let why = "pods in cells have no devices yet; allowed: 0, or the pod on the node";
    let target = "kubernetes.io/target-runtime: kiyot";
    let annotated = |gpus: &str| {
        let both = format!(" {{{target}, pod.elotl.co/gpu: \"{gpus}\"}}");
        GPU_JOB.replace(&format!("\n        {target}"), &both)
    };
    let (text, fine) = explained(OPT_IN, &annotated("2 nvidia"));
    let refused = format!("refused: pod.elotl.co/gpu (2 GPUs (nvidia)): {why}");
    assert!(!fine && text.contains(&refused), "{text}");
    let (text, fine) = explained(OPT_IN, &annotated("0"));
    assert!(fine && text.contains("no GPU"), "{text}");
    let reads_requests = format!("{OPT_IN}[kubernetes]\nkubeconfig = \"/etc/kubeconfig\"\n");
    let (text, fine) = explained(&reads_requests, GPU_JOB);
    assert!(!fine && text.contains(&format!("refused: nvidia.com/gpu: {why}")), "{text}");
}

/// Verifies C7, M9.
#[test]
fn volumes_of_plugins_are_explained_as_paths_of_the_node() {
    let what = "container \"postgres\" mounts the volume \"data\" (persistentVolumeClaim) of the \
                node";
    let (text, fine) = explained(OPT_IN, STATEFUL_SET);
    let refused = format!("refused: {what}, and policy.host_path is \"refuse\"");
    assert!(!fine && text.contains(&refused), "{text}");
    let image = "note: container \"postgres\" mounts the image \"ghcr.io/example/seed:1\", which \
                 needs containerd 2.1 in the cell";
    assert!(text.contains(image), "{text}");
    let copying = format!("{OPT_IN}[backends.milpa.policy]\nhost_path = \"copy-read-only\"\n");
    let (text, fine) = explained(&copying, STATEFUL_SET);
    let writable = format!("refused: {what} writable, and policy.host_path allows read-only");
    assert!(!fine && text.contains(&writable), "{text}");
    let read_only = STATEFUL_SET
        .replace("          subPathExpr", "          readOnly: true\n          subPathExpr");
    let (text, fine) = explained(&copying, &read_only);
    assert!(fine && text.contains("gets a copy of the volume \"data\""), "{text}");
}

/// Verifies C7, M9.
#[test]
fn every_field_of_kubernetes_is_explained() {
    let (text, fine) = explained(OPT_IN, EVERY_FIELD);
    for part in [
        "refused: container \"c\" asks for the device",
        "at \"/dev/x\" (a device or a block volume, which no policy gives)",
        "mounts the volume \"csi\" (csi) of the node, and policy.host_path is \"refuse\"",
        "note: container \"c\" mounts /a recursively read-only, which needs containerd 2.0",
        "note: cells have no resource claims (gpu), and refuse their devices",
    ] {
        assert!(!fine && text.contains(part), "{part} is not in {text}");
    }
    // The volumes that are not mounted.
    assert!(!text.contains("nfs") && !text.contains("hostPath"), "{text}");
}

/// Verifies M2, M13, M14.
#[test]
fn manifests_that_the_api_server_takes_are_explained() {
    let pod = |metadata: &str, spec: &str| {
        format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: p, {metadata}}}\nspec: {{containers: \
             [{{name: c, image: i}}], {spec}}}\n"
        )
    };
    for text in [
        pod("labels: {tier: }, annotations: {example.org/empty: }", ""),
        pod("labels: ", "volumes: [{name: v, emptyDir: }], nodeSelector: , securityContext: "),
        pod("", "terminationGracePeriodSeconds: -1, hostname: \"\", enableServiceLinks: off"),
        pod("", "volumes: [{name: v, configMap: {name: m, defaultMode: 0755}}]"),
        pod("annotations: {\"a.b/c\": \"1.10\"}", "overhead: {cpu: 0.1, memory: 1e9}"),
        pod("", "imagePullSecrets: [{name: \"\"}], tolerations: "),
        format!("# a comment\n---\n{}---\n{}", pod("", ""), "# another\n"),
    ] {
        let (explained, fine) = explained(OPT_IN, &text);
        assert!(fine && !explained.contains("note:"), "{text}: {explained}");
    }
    let label = manifest::parse_files(&[File {
        name: "p".into(),
        text: pod("labels: {version: 1.10}", ""),
    }]);
    let rule = "document 1.metadata.labels.version = 1.1: is invalid; allowed: a text in quotes";
    assert!(label.unwrap_err().to_string().contains(rule));
}

/// Verifies M2.
#[test]
fn unknown_fields_of_a_pod_are_noted_on_the_node_and_in_a_cell() {
    for annotation in ["kubernetes.io/target-runtime: kiyot", "a: b"] {
        let text = format!(
            "apiVersion: v1\nkind: Pod\nmetadata:\n  name: p\n  annotations: \
             {{{annotation}}}\nspec: {{hostNetwrk: true, containers: \
             [{{name: c, image: i}}]}}\n"
        );
        let (explained, fine) = explained(OPT_IN, &text);
        let note = "note: document 1.spec.hostNetwrk: is not a field of Kubernetes 1.36; did you \
                    mean: hostNetwork";
        assert!(fine && explained.contains(note), "{explained}");
    }
}

/// Verifies C7.
#[test]
fn variable_in_a_file_of_a_volume_is_refused_in_a_cell_by_name() {
    let pod = |target: &str, optional: bool| {
        let file = json!({ "volumeName": "v", "path": "p", "key": "k", "optional": optional });
        let env = json!([{ "name": "VALUE", "valueFrom": { "fileKeyRef": file } }]);
        json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": { "name": "p", "annotations": { TARGET_RUNTIME: target } },
            "spec": {
                "containers": [{ "name": "c", "image": "i", "env": env }],
                "volumes": [{ "name": "v", "emptyDir": {} }],
            },
        })
        .to_string()
    };
    let what = "container \"c\" has the variable \"VALUE\" of a file in a volume (fileKeyRef)";
    let (text, fine) = explained(OPT_IN, &pod("kiyot", false));
    assert!(!fine && text.contains(&format!("refused: {what}")), "{text}");
    let (text, fine) = explained(OPT_IN, &pod("kiyot", true));
    assert!(fine && text.contains(&format!("note: {what}")), "{text}");
    let (text, fine) = explained(OPT_OUT, &pod("containerd", false));
    assert!(fine && !text.contains("fileKeyRef"), "{text}");
}

/// Verifies C7, R7.
#[test]
fn runtime_class_of_another_runtime_is_noted_or_stays_on_the_node() {
    let pod = |annotation: &str| {
        format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: p, annotations: {{{annotation}}}}}\n\
             spec: {{runtimeClassName: gvisor, containers: [{{name: c, image: i}}]}}\n"
        )
    };
    let named_like_its_class = "note: assumes that a RuntimeClass and its handler have one name";
    let (text, fine) = explained(OPT_IN, &pod("kubernetes.io/target-runtime: kiyot"));
    let unknown = "note: the handler of RuntimeClass \"gvisor\" is not known here; if it has its \
                   name, the pod is refused: annotation kubernetes.io/target-runtime";
    assert!(fine && text.contains(unknown) && text.contains("goes to milpa"), "{text}");
    let (text, fine) = explained(OPT_OUT, &pod(""));
    let stays = "goes to containerd: cells do not have the runtime handler gvisor";
    assert!(fine && text.contains(stays) && text.contains(named_like_its_class), "{text}");
    let rule = "\n[[routing.rule]]\nname = \"sandboxed\"\nruntime_handler = \"gvisor\"\n\
                backend = \"milpa\"\n";
    let (text, fine) = explained(&format!("{OPT_IN}{rule}"), &pod(""));
    assert!(fine && text.contains("goes to milpa: rule sandboxed matches first"), "{text}");
}

fn priced(config: &str, annotations: &str) -> (String, bool) {
    placed(config, annotations, Prices::Catalogue(&CatalogueFile::built_in().catalogue))
}

fn placed(config: &str, annotations: &str, prices: Prices<'_>) -> (String, bool) {
    let config = config::parse("config", config, []).unwrap();
    let spec = "{containers: [{name: main, image: web, resources: {requests: {cpu: 500m}, limits: \
                {memory: 1Gi}}}]}";
    let metadata = "metadata:\n  name: web\n  annotations:\n    ";
    let target = "kubernetes.io/target-runtime: kiyot";
    let text =
        format!("apiVersion: v1\nkind: Pod\n{metadata}{target}\n{annotations}spec: {spec}\n");
    let manifest = manifest::parse_files(&[File { name: "pod".into(), text }]).unwrap();
    of(&explain(&config, &manifest, prices))
}

/// Verifies A10.
#[test]
fn instance_is_named_with_its_price_and_the_next_choices() {
    let (text, fine) = priced(OPT_IN, "    pod.elotl.co/architecture: amd64\n");
    for line in [
        "its needs: 0.5 CPU (requests), 1024 MiB of memory (limits) and 96 MiB for the cell, amd64",
        "its instance: c7a.medium (On-Demand) at $0.05132 an hour",
        "next: c8a.medium (On-Demand) at $0.05389 an hour | m7a.medium (On-Demand) at $0.05796",
        "left out: t3a.small has 0.4 CPU all the time, and 0.5 is needed, at $0.0188 an hour",
    ] {
        assert!(fine && text.contains(line), "{text}");
    }
    let (text, fine) = priced(OPT_IN, "    pod.elotl.co/launch-type: spot\n");
    assert!(fine && text.contains("(Spot) at most $0."), "{text}");
}

/// Verifies K10, K18.
#[test]
fn requests_choose_the_instance_if_the_daemon_reads_them() {
    let pod = "kind: Pod\napiVersion: v1\nmetadata:\n  name: web\n  annotations: \
               {kubernetes.io/target-runtime: kiyot, pod.elotl.co/architecture: amd64}\nspec:\n  \
               containers:\n  - {name: c, image: i, resources: {requests: {cpu: 500m, memory: \
               3Gi}}}\n";
    let manifest = |text: &str| {
        let file = File { name: "pod".into(), text: text.into() };
        manifest::parse_files(&[file]).unwrap()
    };
    let with = |kubernetes: &str, text: &str| {
        let config = config::parse("config", &format!("{OPT_IN}\n{kubernetes}"), []).unwrap();
        of(&explain(
            &config,
            &manifest(text),
            Prices::Catalogue(&CatalogueFile::built_in().catalogue),
        ))
        .0
    };
    let of_cri = with("", pod);
    assert!(of_cri.contains("0.5 CPU (requests), 512 MiB of memory (default)"), "{of_cri}");
    assert!(of_cri.contains("note: its memory request (3072 MiB) is not in the CRI"), "{of_cri}");
    let annotated = pod.replace("annotations: {", "annotations: {pod.elotl.co/memory: 4Gi, ");
    let of_cri = with("", &annotated);
    assert!(!of_cri.contains("note: its memory request"), "{of_cri}");
    let of_api = with("[kubernetes]\nkubeconfig = \"/etc/kubeconfig\"\n", pod);
    assert!(of_api.contains("0.5 CPU (requests), 3072 MiB of memory (requests)"), "{of_api}");
    assert!(!of_api.contains("note: its memory request"), "{of_api}");
    // Extended resources stand for requests; only the scheduler counts `pod.elotl.co/cell`.
    let extended = "pod.elotl.co/cpu: 16, pod.elotl.co/memory: 64Gi, pod.elotl.co/cell: 1}";
    let moved = format!("requests: {{cpu: 16m, memory: 1Mi, {extended}, limits: {{{extended}");
    let moved = pod.replace("requests: {cpu: 500m, memory: 3Gi}", &moved);
    let of_cri = with("", &moved);
    for name in ["pod.elotl.co/cpu", "pod.elotl.co/memory"] {
        let note = format!("note: {name} is not in the CRI request, and chooses no cell");
        assert!(of_cri.contains(&note), "{of_cri}");
    }
    let of_api = with("[kubernetes]\nkubeconfig = \"/etc/kubeconfig\"\n", &moved);
    assert!(of_api.contains("16 CPU (requests), 65536 MiB of memory (requests)"), "{of_api}");
    assert!(!of_api.contains("note: pod.elotl.co") && !of_cri.contains("elotl.co/cell"));
    let not_read = "[kubernetes]\nkubeconfig = \"/etc/kubeconfig\"\nrequests = false\n";
    assert_eq!(with(not_read, pod), with("", pod));
}

/// Returns a strategy for the amounts of a resource in a container: a request, and a limit.
fn amounts() -> impl Strategy<Value = (Option<u64>, Option<u64>)> {
    let limit_beyond = |(request, beyond): (Option<u64>, Option<u64>)| {
        (request, beyond.map(|beyond| request.unwrap_or(1) + beyond))
    };
    (option::of(0..5000_u64), option::of(0..5000_u64)).prop_map(limit_beyond)
}

/// Returns a strategy for a container as JSON, with the `restartPolicy` of a sidecar or without.
fn container() -> impl Strategy<Value = serde_json::Value> {
    let flags = (any::<bool>(), any::<bool>());
    (amounts(), amounts(), flags).prop_map(|(cpu, memory, (is_sidecar, has_file))| {
        let both = |cpu: Option<u64>, memory: Option<u64>| {
            let cpu = cpu.map(|milli| ("cpu", format!("{milli}m")));
            let storage = memory.map(|bytes| ("ephemeral-storage", format!("{bytes}Mi")));
            let memory = memory.map(|bytes| ("memory", bytes.to_string()));
            cpu.into_iter().chain(memory).chain(storage).collect::<BTreeMap<_, _>>()
        };
        let mut requests = both(cpu.0, memory.0);
        let mut limits = both(cpu.1, memory.1);
        let cpus = cpu.1.map(|milli| ("pod.elotl.co/cpu", (milli / 500).to_string()));
        let bytes = memory.1.map(|bytes| ("pod.elotl.co/memory", (bytes / 2).to_string()));
        let disk = cpu.0.map(|milli| ("pod.elotl.co/ephemeral-storage", format!("{milli}Mi")));
        for extended in [cpus, bytes, disk].into_iter().flatten() {
            requests.extend([extended.clone()]);
            limits.extend([extended]);
        }
        limits.extend(is_sidecar.then(|| ("amd.com/gpu", u64::from(has_file).to_string())));
        let resources = json!({ "requests": requests, "limits": limits });
        let mut container = json!({ "name": "", "image": "i", "resources": resources });
        if is_sidecar {
            container["restartPolicy"] = json!("Always");
        }
        if has_file {
            let file = json!({ "volumeName": "v", "path": "p", "key": "k" });
            container["env"] = json!([{ "name": "A", "valueFrom": { "fileKeyRef": file } }]);
        }
        container
    })
}

proptest! {
    /// Verifies K10.
    #[test]
    fn manifest_has_the_requests_that_the_informer_reads(
        mut containers in vec(container(), 1..4),
        mut init in vec(container(), 0..4),
        own in option::of((0..5000_u64, 0..5000_u64)),
    ) {
        for (number, container) in containers.iter_mut().chain(&mut init).enumerate() {
            container["name"] = json!(format!("c{number}"));
        }
        for container in &mut containers {
            container.as_object_mut().unwrap().remove("restartPolicy");
        }
        let volumes = json!([{ "name": "v", "emptyDir": {} }]);
        let mut spec =
            json!({ "containers": containers, "initContainers": init, "volumes": volumes });
        // The API server adds a request to a limit of the pod itself.
        if let Some((request, beyond)) = own {
            let cpu = |milli: u64| json!({ "cpu": format!("{milli}m") });
            let (requests, limits) = (cpu(request), cpu(request + beyond));
            spec["resources"] = json!({ "requests": requests, "limits": limits });
        }
        let pod = json!({
            "kind": "Pod", "apiVersion": "v1", "metadata": { "name": "p" }, "spec": spec,
        });
        let file = File { name: "pod".into(), text: pod.to_string() };
        let manifest = manifest::parse_files(&[file]).unwrap();
        let read: kiyot_kubernetes::requests::Pod = serde_json::from_value(pod).unwrap();
        let sums = read.spec.requests();
        prop_assert_eq!(requests_of(&manifest.pods[0]), ApiRequests {
            milli_cpu_request: sums.milli_cpus.request,
            milli_cpu_limit: sums.milli_cpus.limit,
            memory_request: sums.memory.request,
            memory_limit: sums.memory.limit,
            storage_request: sums.storage_request,
            has_env_in_files: sums.has_env_in_files,
            gpus: sums.gpus,
            ..ApiRequests::default()
        });
    }
}

/// Returns a configuration whose pods go to cells of a provider.
fn config_of(provider: &str) -> String {
    let instances = "cluster = \"test\"\n[backends.milpa.gateway]\nlisten = \"10.0.0.5:7700\"\n\
                     [backends.milpa.ec2]\nregion = \"us-east-1\"\nsubnets = [\"subnet-1\"]\n\
                     security_groups = [\"sg-1\"]\nimage = { id = \"ami-1\" }\n";
    format!(
        "[backends.containerd]\ntype = \"cri\"\n[backends.milpa]\ntype = \"milpa\"\nprovider = \
         \"{provider}\"\n{}[routing]\ndefault = \"milpa\"\n",
        if provider == "ec2" { instances } else { "" }
    )
}

/// Verifies V71.
#[test]
fn built_in_prices_are_estimates_in_another_region() {
    let config = |region: &str| {
        format!(
            "[backends.containerd]\ntype = \"cri\"\n[backends.milpa]\ntype = \"milpa\"\n\
             provider = \"ec2\"\ncluster = \"test\"\n[backends.milpa.gateway]\n\
             listen = \"10.0.0.5:7700\"\n[backends.milpa.ec2]\nregion = \"{region}\"\n\
             subnets = [\"subnet-1\"]\nsecurity_groups = [\"sg-1\"]\n\
             image = {{ id = \"ami-1\" }}\n"
        )
    };
    let amd64 = "    pod.elotl.co/architecture: amd64\n";
    let (text, fine) = placed(&config("eu-west-1"), amd64, Prices::BuiltIn);
    let estimate = "its instance: c7a.medium (On-Demand) at about $0.05132 an hour";
    assert!(fine && text.contains(estimate), "{text}");
    assert!(text.contains("prices are estimates from us-east-1"), "{text}");
    let (text, fine) = placed(&config("us-east-1"), amd64, Prices::BuiltIn);
    let exact = "its instance: c7a.medium (On-Demand) at $0.05132 an hour";
    assert!(fine && text.contains(exact) && !text.contains("estimate"), "{text}");
}

/// Verifies V109.
#[test]
fn ephemeral_storage_chooses_the_root_volume_if_the_daemon_reads_requests() {
    let ec2 = "[backends.containerd]\ntype = \"cri\"\n[backends.milpa]\ntype = \"milpa\"\n\
               provider = \"ec2\"\ncluster = \"test\"\n[backends.milpa.gateway]\n\
               listen = \"10.0.0.5:7700\"\n[backends.milpa.ec2]\nregion = \"us-east-1\"\n\
               subnets = [\"subnet-1\"]\nsecurity_groups = [\"sg-1\"]\n\
               image = { id = \"ami-1\" }\n";
    let reads_requests = "[kubernetes]\nkubeconfig = \"/etc/kubeconfig\"\n";
    let of = |config: &str, storage: &str| {
        let pod = format!(
            "kind: Pod\napiVersion: v1\nmetadata: {{name: web, annotations: \
             {{kubernetes.io/target-runtime: kiyot, pod.elotl.co/architecture: amd64}}}}\nspec: \
             {{containers: [{{name: c, image: i, resources: {{requests: {{ephemeral-storage: \
             {storage}}}}}}}]}}\n"
        );
        explained(config, &pod)
    };
    let room = "room for 20 GiB of ephemeral storage on its root volume";
    let note = "note: ephemeral-storage is not in the CRI request";
    for (config, counts) in [
        (format!("{ec2}{reads_requests}"), true),
        (ec2.to_owned(), false),
        (format!("{OPT_IN}{reads_requests}"), false),
    ] {
        let (text, fine) = of(&config, "20Gi");
        assert!(fine && text.contains(room) == counts && text.contains(note) != counts, "{text}");
    }
    let (text, fine) = of(&format!("{ec2}{reads_requests}"), "64Ti");
    let refusal = "refused: requests of 65536 GiB of ephemeral-storage: need a root volume of";
    assert!(!fine && text.contains(refusal), "{text}");
}

/// Verifies V77.
#[test]
fn pod_with_too_many_security_groups_is_refused() {
    let config = "[backends.containerd]\ntype = \"cri\"\n[backends.milpa]\ntype = \"milpa\"\n\
                  provider = \"ec2\"\ncluster = \"test\"\n[backends.milpa.gateway]\n\
                  listen = \"10.0.0.5:7700\"\n[backends.milpa.ec2]\nregion = \"us-east-1\"\n\
                  subnets = [\"subnet-1\"]\nsecurity_groups = [\"sg-1\"]\n\
                  image = { id = \"ami-1\" }\nmax_security_groups = 2\n";
    let of = |groups: &str| {
        let annotations = format!("    pod.elotl.co/security-groups: {groups}\n");
        placed(config, &annotations, Prices::BuiltIn)
    };
    let (text, fine) = of("sg-2,sg-3");
    let refusal = "refused: pod.elotl.co/security-groups: makes 3 security groups with \
                   ec2.security_groups; allowed: 2";
    assert!(!fine && text.contains(refusal), "{text}");
    assert!(of("sg-2,sg-1").1);
}

/// Verifies A12.
#[test]
fn pod_that_fits_no_instance_is_refused_with_the_nearest() {
    let (text, fine) = priced(
        OPT_IN,
        "    pod.elotl.co/max-price: \"0.01\"\n    pod.elotl.co/architecture: amd64\n",
    );
    let refusal = "refused: no instance type fits the pod, which needs 0.5 CPU (requests), 1024 \
                   MiB of memory (limits) and 96 MiB for the cell, amd64, On-Demand, at most \
                   $0.0100 an hour; nearest: ";
    assert!(!fine && text.contains(refusal), "{text}");
    assert_eq!(text.matches(" | ").count(), 2, "{text}");
}

/// Verifies A26.
#[test]
fn architecture_and_zone_that_the_provider_lacks_are_refused() {
    let (has, needed) = match Architecture::of_node() {
        Architecture::Amd64 => ("amd64", "arm64"),
        Architecture::Arm64 => ("arm64", "amd64"),
    };
    let of = |name: &str| format!("    pod.elotl.co/architecture: {name}\n");
    let (text, fine) = placed(OPT_IN, &of(needed), Prices::BuiltIn);
    let refusal = format!("cells have an image for {has}, and {needed} is needed");
    assert!(!fine && text.contains(&refusal), "{text}");
    assert!(placed(OPT_IN, &of(has), Prices::BuiltIn).1);
    let zones = format!("{OPT_IN}\n[backends.milpa.placement]\nzones = [\"us-east-1a\"]\n");
    let (text, fine) = priced(&zones, &of("amd64"));
    let refusal = "has no known zone, and zone us-east-1a is needed";
    assert!(!fine && text.contains(refusal), "{text}");
}

/// Time of a running daemon.
const NOW: Duration = Duration::from_secs(10);

/// Returns a refusal for three minutes.
fn refusal(reason: &str) -> Refusal {
    Refusal { until: NOW + Duration::from_secs(179), reason: reason.into() }
}

/// Returns the state of a running daemon with one provider.
fn running(live: Live, limits: &[String]) -> BTreeMap<String, LiveBackend> {
    let providers = BTreeMap::from([("netns", live)]);
    BTreeMap::from([(
        "milpa".to_owned(),
        LiveBackend { providers, limits: limits.to_vec(), ..LiveBackend::default() },
    )])
}

/// Returns the explanation of a running daemon.
fn with_refusals(catalogue: Catalogue, refusals: Refusals) -> (String, bool) {
    let live = Live { catalogue: Some(catalogue.into()), refusals, now: NOW, ..Live::default() };
    let backends = running(live, &[]);
    placed(OPT_IN, "    pod.elotl.co/architecture: amd64\n", Prices::Live(&backends))
}

/// Verifies A13, O34.
#[test]
fn running_daemon_refuses_a_pod_of_a_full_quota_and_names_the_quota() {
    let catalogue = CatalogueFile::built_in().catalogue;
    let names = catalogue.entries().iter().map(|entry| entry.instance_type.name.clone());
    let is_standard = |name: &String| name.starts_with(['a', 'c', 'd', 'h', 'i', 'm', 'r', 't']);
    let types = names.filter(is_standard).collect();
    let quota = RefusedQuota { market: Market::OnDemand, types };
    let mut refusals = Refusals::default();
    let quota = LaunchRefusal::Quota { quota: Arc::new(quota), offerings: Vec::new() };
    refusals.add(&quota, NOW, &refusal("VcpuLimitExceeded"));
    let (text, fine) = with_refusals(catalogue, refusals);
    let line = "refused: every offering that fits the pod was refused lately (16 of them); \
                c7a.medium (On-Demand) is tried again in 180 s, and was refused: \
                VcpuLimitExceeded";
    assert!(!fine && text.contains(line), "{text}");
    assert!(!text.contains("its instance:") && !text.contains("no instance type fits"), "{text}");
}

/// Verifies O34.
#[test]
fn running_daemon_avoids_a_refused_zone() {
    let rows = "instance_type,vcpus,memory_mib,architectures,on_demand_usd_per_hour,zones\n\
                big,4,16384,x86_64,0.4,a|b\nsmall,2,8192,x86_64,0.1,a|b\n";
    let catalogue = CatalogueFile::parse(rows.as_bytes()).unwrap().catalogue;
    let mut refusals = Refusals::default();
    refusals.add(&LaunchRefusal::Zone("a".into()), NOW, &refusal("no address"));
    let (text, fine) = with_refusals(catalogue.clone(), refusals.clone());
    for line in [
        "its instance: small in b (On-Demand) at $0.1000 an hour\n  next: big in b (On-Demand)",
        "avoided for now: small in a (On-Demand) at $0.1000 an hour: no address",
    ] {
        assert!(fine && text.contains(line), "{line} is not in {text}");
    }
    refusals.add(&LaunchRefusal::Zone("b".into()), NOW, &refusal("no address"));
    let (text, fine) = with_refusals(catalogue, refusals);
    let line = "refused: every offering that fits the pod was refused lately (4 of them); small";
    assert!(!fine && text.contains(line), "{text}");
}

/// Verifies O34.
#[test]
fn running_daemon_avoids_refused_offerings_and_names_its_limits() {
    let catalogue = Some(Arc::new(CatalogueFile::built_in().catalogue));
    let offering = catalogue.iter().flat_map(|known| known.offerings());
    let refused = offering.filter(|offering| {
        offering.instance_type == "c7a.medium" && offering.market == Market::OnDemand
    });
    let refused = LaunchRefusal::Offerings(refused.collect());
    let mut refusals = Refusals::default();
    refusals.add(&refused, NOW, &refusal("no capacity"));
    let limits = vec!["its backend: 3 of 9 cells".to_owned()];
    let live = Live { catalogue, refusals, now: NOW, ..Live::default() };
    let amd64 = "    pod.elotl.co/architecture: amd64\n";
    let backends = running(live, &limits);
    let (text, fine) = placed(OPT_IN, amd64, Prices::Live(&backends));
    for line in [
        "its instance: c8a.medium (On-Demand) at $0.05389 an hour",
        "avoided for now: c7a.medium (On-Demand) at $0.05132 an hour: no capacity",
        "its backend: 3 of 9 cells",
    ] {
        assert!(fine && text.contains(line), "{line} is not in {text}");
    }
    // Without a catalogue of the provider the configuration decides.
    let backends = running(Live::default(), &limits);
    let (text, fine) = placed(OPT_IN, amd64, Prices::Live(&backends));
    assert!(fine && text.contains("3 of 9") && !text.contains("its instance"), "{text}");
    let live = Live { refused: Some("ec2.image: none".to_owned()), ..Live::default() };
    let backends = running(live, &[]);
    let (text, fine) = placed(OPT_IN, amd64, Prices::Live(&backends));
    assert!(!fine && text.contains("refused: ec2.image: none"), "{text}");
}

/// Verifies A12.
#[test]
fn named_type_that_no_zone_offers_is_refused_by_its_name() {
    let known = CatalogueFile::built_in().catalogue;
    let entries = known.entries().iter().map(|entry| match entry.instance_type.name.as_str() {
        "c7a.medium" => {
            let reason = Unoffered::Region("eu-west-1".into());
            Entry::not_offered(entry.instance_type.clone(), reason)
        }
        _ => entry.clone(),
    });
    let catalogue = Catalogue::new(entries.collect());
    let annotations = "    pod.elotl.co/architecture: amd64\n";
    let named = format!("{annotations}    pod.elotl.co/instance-type: c7a.medium\n");
    let (text, fine) = placed(OPT_IN, &named, Prices::Catalogue(&catalogue));
    let refusal = "nearest: c7a.medium exists, but is offered in no zone of eu-west-1 | ";
    assert!(!fine && text.contains(refusal), "{text}");
    // A pod that names no type gets the next type, without a note on this type.
    let (text, fine) = placed(OPT_IN, annotations, Prices::Catalogue(&catalogue));
    assert!(fine && text.contains("its instance: c8a.medium"), "{text}");
    assert!(!text.contains("c7a.medium"), "{text}");
}

/// Returns the lines of a document between two lines, without these two.
fn lines_between<'a>(document: &'a str, first: &str, last: &str) -> Vec<&'a str> {
    let lines = document.lines().skip_while(|line| *line != first).skip(1);
    let between: Vec<&str> = lines.take_while(|line| *line != last).collect();
    assert!(!between.is_empty(), "{first:?}");
    between
}

/// Returns the words of a text: the document breaks lines that the program does not break.
fn words(text: &str) -> Vec<&str> {
    text.split_whitespace().collect()
}

/// Verifies A12.
#[test]
fn document_has_the_explanation_of_its_pod() {
    const DOCUMENT: &str = include_str!("../../docs/annotations.md");
    let text = lines_between(DOCUMENT, "```yaml", "```").join("\n");
    let shown = lines_between(DOCUMENT, "```", "## Keys").join("\n");
    let config = config::parse("config", OPT_IN, []).unwrap();
    let manifest = manifest::parse_files(&[File { name: "pod".into(), text }]).unwrap();
    let catalogue = CatalogueFile::built_in().catalogue;
    let (explained, fine) = of(&explain(&config, &manifest, Prices::Catalogue(&catalogue)));
    assert!(fine && words(&explained) == words(&shown), "docs/annotations.md lacks\n{explained}");
}

/// The example needs a type of this architecture, which is the node's by default.
///
/// Verifies A12.
#[cfg(target_arch = "x86_64")]
#[test]
fn document_has_the_explanations_of_the_examples() {
    const DOCUMENT: &str = include_str!("../../examples/README.md");
    let config = config::parse("config", OPT_IN, []).unwrap();
    let catalogue = CatalogueFile::built_in().catalogue;
    for (name, text) in [
        ("pod-in-a-cell", include_str!("../../examples/pod-in-a-cell.yaml")),
        ("pod-on-the-node", include_str!("../../examples/pod-on-the-node.yaml")),
    ] {
        let command = format!(
            "$ kiyot explain --config examples/opt-in.toml --catalogue ec2-us-east-1 -f \
             examples/{name}.yaml"
        );
        let shown = lines_between(DOCUMENT, &command, "```").join("\n");
        let file = File { name: name.to_owned(), text: text.to_owned() };
        let manifest = manifest::parse_files(&[file]).unwrap();
        let (explained, _) = of(&explain(&config, &manifest, Prices::Catalogue(&catalogue)));
        assert_eq!(words(&explained), words(&shown), "examples/README.md lacks\n{explained}");
    }
}

/// Verifies A26.
#[test]
fn document_has_the_annotations_that_cells_on_the_node_honour() {
    const DOCUMENT: &str = include_str!("../../docs/annotations.md");
    let head = "| key | values | default | meaning | example |";
    let rows = lines_between(DOCUMENT, head, "").into_iter().skip(2);
    let examples: Vec<(String, &str)> = rows
        .map(|line| {
            let cells: Vec<&str> =
                line.split(" | ").map(|cell| cell.trim_matches(['|', ' ', '`'])).collect();
            (format!("{PREFIX}{}", cells[0]), cells[4])
        })
        .collect();
    let keys: Vec<&str> = examples.iter().map(|(key, _)| key.as_str()).collect();
    assert_eq!(keys, KEYS);
    let node =
        Offering { instance_type: "netns".into(), zone: String::new(), market: Market::OnDemand };
    let largest = Size { cpus: 64, memory_mib: 1 << 20 };
    let architecture = Architecture::of_node();
    let catalogues = [
        ("netns", Catalogue::any_size(node)),
        ("qemu", Catalogue::sized("node", "node", largest, architecture)),
    ];
    let other = match architecture {
        Architecture::Amd64 => "arm64",
        Architecture::Arm64 => "amd64",
    };
    // The choice of a cell for a pod with this annotation. The limit of silence has an effect on
    // the node too, but on the life of cells, not on their choice.
    let choice = |catalogue: &Catalogue, key: &str, value: &str| {
        let annotations = BTreeMap::from([(key.to_owned(), value.to_owned())]);
        let request = annotations::parse(&annotations).unwrap();
        let rules = Rules::default();
        let needs = Needs::new(&request, &Requested::default(), &rules.defaults);
        rank(catalogue, &needs, &rules, &())
    };
    for (provider, catalogue) in &catalogues {
        let mut honoured = Vec::new();
        for (key, example) in &examples {
            let value = if key == ARCHITECTURE { other } else { *example };
            // GPUs, another provider and another isolation refuse the pod before the choice, and
            // starts only rank the offerings.
            let is_honoured = [HEALTHY_TIMEOUT, GPU, PROVIDER, ISOLATION, START_WITHIN]
                .contains(&key.as_str())
                || choice(catalogue, key, value) != choice(catalogue, TARGET_RUNTIME, "kiyot");
            if is_honoured {
                honoured.push(format!("`{}`", key.trim_start_matches(PREFIX)));
            }
        }
        let line = format!("- `{provider}`: {}\n", honoured.join(", "));
        assert!(DOCUMENT.contains(&line), "docs/annotations.md lacks {line}");
    }
}
