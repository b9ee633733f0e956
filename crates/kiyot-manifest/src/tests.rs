use kiyot_proto::cri::{self, NamespaceMode};
use proptest::prelude::*;
use serde_json::Value;

use super::*;

const POD: &str = r#"
apiVersion: v1
kind: Pod
metadata:
  name: web
  namespace: shop
  uid: 0d1f3a52-0000-4000-8000-000000000001
  labels: {app: web}
  annotations:
    kubernetes.io/target-runtime: kiyot
spec:
  restartPolicy: Never
  terminationGracePeriodSeconds: 5
  nodeSelector: {disk: ssd}
  securityContext:
    runAsUser: 1000
    fsGroup: 2000
    sysctls: [{name: net.core.somaxconn, value: "1024"}]
  initContainers:
  - name: prepare
    image: docker.io/library/busybox:1.36
    command: [sh, -c, "true"]
    resources: {limits: {cpu: 3, memory: 16Mi}}
  containers:
  - name: main
    image: docker.io/library/busybox:1.36
    command: [sh]
    args: ["-c", "echo $(GREETING) $(UNKNOWN)"]
    workingDir: /tmp
    env:
    - {name: WHO, value: world}
    - {name: GREETING, value: "hello $(WHO)"}
    resources:
      requests: {cpu: 250m, memory: 64Mi}
      limits: {cpu: "1", memory: 128Mi}
    ports:
    - {name: http, containerPort: 8080, hostPort: 80}
    volumeMounts:
    - {name: scratch, mountPath: /scratch}
    - {name: settings, mountPath: /etc/settings}
    - {name: keys, mountPath: /etc/keys, readOnly: true}
    - {name: scratch, mountPath: /part, subPath: a/b}
    securityContext:
      readOnlyRootFilesystem: true
      allowPrivilegeEscalation: false
      capabilities: {add: [NET_ADMIN], drop: [ALL]}
  - name: side
    image: example.org/side:1
    tty: true
    stdin: true
    resources: {requests: {memory: 32Mi}}
  volumes:
  - name: scratch
    emptyDir: {medium: Memory, sizeLimit: 64Mi}
  - name: settings
    configMap:
      name: web
      items: [{key: color, path: look/color, mode: 256}]
  - name: keys
    secret: {secretName: web}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: web, namespace: shop}
data: {color: blue, size: big}
---
apiVersion: v1
kind: Secret
metadata: {name: web, namespace: shop}
type: Opaque
stringData: {password: "open sesame"}
data: {token: aGVsbG8=}
"#;

fn parse(name: &str, text: &str) -> Result<Manifest, Problems> {
    parse_files(&[File { name: name.to_owned(), text: text.to_owned() }])
}

fn pod(yaml: &str) -> Pod {
    let mut pods = parse("pod.yaml", yaml).unwrap_or_else(|problems| panic!("{problems}")).pods;
    assert_eq!(pods.len(), 1);
    pods.remove(0)
}

pub(super) fn problems(yaml: &str) -> Vec<String> {
    parse("pod.yaml", yaml).unwrap_err().list.iter().map(ToString::to_string).collect()
}

fn minimal(spec: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: p}}\nspec:\n  containers: [{{name: c, \
         image: i}}]\n{spec}"
    )
}

/// Verifies M1.
#[test]
fn sandbox_request_matches_the_kubelet() {
    let (pod, node) = (pod(POD), Node::default());
    let request = pod.run_pod_sandbox(&node, 2);
    assert_eq!(request.runtime_handler, "");
    let config = request.config.unwrap();
    let uid = "0d1f3a52-0000-4000-8000-000000000001";
    assert_eq!(
        config.metadata.unwrap(),
        cri::PodSandboxMetadata {
            name: "web".into(),
            uid: uid.into(),
            namespace: "shop".into(),
            attempt: 2
        }
    );
    assert_eq!(config.hostname, "web");
    assert_eq!(config.log_directory, format!("/var/log/pods/shop_web_{uid}"));
    let dns = config.dns_config.unwrap();
    assert_eq!(
        (dns.servers, dns.options),
        (vec!["10.96.0.10".to_owned()], vec!["ndots:5".to_owned()])
    );
    assert_eq!(dns.searches, ["shop.svc.cluster.local", "svc.cluster.local", "cluster.local"]);
    assert_eq!(config.port_mappings.len(), 1);
    assert_eq!(
        (config.port_mappings[0].container_port, config.port_mappings[0].host_port),
        (8080, 80)
    );
    assert_eq!(config.labels["app"], "web");
    assert_eq!(config.labels["io.kubernetes.pod.uid"], uid);
    assert_eq!(config.annotations["kubernetes.io/target-runtime"], "kiyot");
    assert_eq!(config.annotations["kubernetes.io/config.seen"], node.seen);
    let linux = config.linux.unwrap();
    assert_eq!(linux.cgroup_parent, format!("/kubepods/burstable/pod{uid}"));
    assert_eq!(linux.sysctls["net.core.somaxconn"], "1024");
    let security = linux.security_context.unwrap();
    assert_eq!(
        (security.run_as_user.unwrap().value, security.supplemental_groups),
        (1000, vec![2000])
    );
    let namespaces = security.namespace_options.unwrap();
    let (of_pod, of_container) =
        (i32::from(NamespaceMode::Pod), i32::from(NamespaceMode::Container));
    assert_eq!(
        (namespaces.network, namespaces.pid, namespaces.ipc),
        (of_pod, of_container, of_pod)
    );
    // The init container's 3 CPUs exceed the sum of the containers; the containers' memory exceeds
    // the init container's.
    let resources = linux.resources.unwrap();
    assert_eq!(
        (resources.cpu_shares, resources.cpu_quota, resources.memory_limit_in_bytes),
        (3072, 300_000, 128 << 20)
    );
}

/// Verifies M1.
#[test]
fn host_name_is_cut_to_63_characters_without_a_dash_at_its_end() {
    let host_name =
        |name: &str| pod(&minimal("").replace("name: p", &format!("name: {name}"))).host_name();
    assert_eq!(host_name(&"a".repeat(64)), "a".repeat(63));
    assert_eq!(host_name(&format!("{}-a", "a".repeat(62))), "a".repeat(62));
}

/// Verifies M1.
#[test]
fn container_request_matches_the_kubelet() {
    let (pod, node) = (pod(POD), Node { kubelet_dir: "/k".into(), ..Node::default() });
    let sandbox = pod.sandbox_config(&node, 0);
    let config = pod.container_config(&pod.containers[0], &node, &sandbox, "sha256:1", 3);
    assert_eq!(
        config.metadata.unwrap(),
        cri::ContainerMetadata { name: "main".into(), attempt: 3 }
    );
    let image = config.image.unwrap();
    assert_eq!(
        (image.image.as_str(), image.user_specified_image.as_str()),
        ("sha256:1", "docker.io/library/busybox:1.36")
    );
    assert_eq!(
        (config.command, config.args),
        (vec!["sh".to_owned()], vec!["-c".to_owned(), "echo hello world $(UNKNOWN)".to_owned()])
    );
    assert_eq!(config.envs[1].value, b"hello world");
    assert_eq!((config.log_path.as_str(), config.working_dir.as_str()), ("main/3.log", "/tmp"));
    assert_eq!(config.annotations["io.kubernetes.container.restartCount"], "3");
    assert_eq!(config.annotations["io.kubernetes.pod.terminationGracePeriod"], "5");
    let ports: Value =
        serde_json::from_str(&config.annotations["io.kubernetes.container.ports"]).unwrap();
    assert_eq!(
        ports,
        serde_json::json!([{"name": "http", "containerPort": 8080, "protocol": "TCP"}])
    );
    assert_eq!(config.labels.len(), 4);
    let dir = "/k/pods/0d1f3a52-0000-4000-8000-000000000001";
    let mounts: Vec<_> = config
        .mounts
        .iter()
        .map(|mount| {
            (
                mount.container_path.as_str(),
                mount.host_path.strip_prefix(dir).unwrap(),
                mount.readonly,
            )
        })
        .collect();
    assert_eq!(
        mounts[..5],
        [
            ("/scratch", "/volumes/kubernetes.io~empty-dir/scratch", false),
            ("/etc/settings", "/volumes/kubernetes.io~configmap/settings", true),
            ("/etc/keys", "/volumes/kubernetes.io~secret/keys", true),
            ("/part", "/volume-subpaths/scratch/main/3", false),
            ("/etc/hosts", "/etc-hosts", false),
        ]
    );
    assert!(
        mounts[5].0 == "/dev/termination-log" && mounts[5].1.starts_with("/containers/main/"),
        "{mounts:?}"
    );
    let linux = config.linux.unwrap();
    let resources = linux.resources.unwrap();
    assert_eq!(
        (
            resources.cpu_shares,
            resources.cpu_quota,
            resources.memory_limit_in_bytes,
            resources.oom_score_adj
        ),
        (256, 100_000, 128 << 20, 993)
    );
    let security = linux.security_context.unwrap();
    assert!(security.readonly_rootfs && security.no_new_privs && !security.privileged);
    assert_eq!(security.capabilities.unwrap().drop_capabilities, ["ALL"]);
    assert_eq!(security.run_as_user.unwrap().value, 1000);
    let side =
        pod.container_config(&pod.containers[1], &node, &cri::PodSandboxConfig::default(), "i", 0);
    assert!(side.tty && side.stdin && !side.stdin_once);
}

#[test]
fn host_access_is_in_the_requests() {
    let pod = pod(&minimal(
        "  hostNetwork: true\n  hostPID: true\n  hostIPC: true\n  hostUsers: false\n  \
         runtimeClassName: kiyot\n  dnsPolicy: ClusterFirstWithHostNet\n",
    ));
    let request =
        pod.run_pod_sandbox(&Node { cgroup_driver: CgroupDriver::Systemd, ..Node::default() }, 0);
    let config = request.config.unwrap();
    assert_eq!((request.runtime_handler.as_str(), config.hostname.as_str()), ("kiyot", ""));
    let linux = config.linux.unwrap();
    assert!(
        linux
            .cgroup_parent
            .starts_with("/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod"),
        "{}",
        linux.cgroup_parent
    );
    let namespaces = linux.security_context.unwrap().namespace_options.unwrap();
    let node = i32::from(NamespaceMode::Node);
    assert_eq!((namespaces.network, namespaces.pid, namespaces.ipc), (node, node, node));
    assert!(namespaces.userns_options.is_some());
    assert_eq!(config.dns_config.unwrap().servers, ["10.96.0.10"]);
}

#[test]
fn qos_class_follows_requests_and_limits() {
    let with = |resources: &str| {
        pod(&minimal("").replace("image: i", &format!("image: i, resources: {resources}")))
    };
    assert_eq!(with("{}").qos_class(), QosClass::BestEffort);
    assert_eq!(with("{limits: {cpu: 1, memory: 1Gi}}").qos_class(), QosClass::Guaranteed);
    assert_eq!(with("{limits: {memory: 1Gi}}").qos_class(), QosClass::Burstable);
    assert_eq!(
        with("{requests: {cpu: 1}, limits: {cpu: 2, memory: 1Gi}}").qos_class(),
        QosClass::Burstable
    );
    let guaranteed = with("{limits: {cpu: 1, memory: 1Gi}}");
    assert!(Node::default().cgroup_parent(&guaranteed).starts_with("/kubepods/pod"));
}

/// Verifies M2.
#[test]
fn every_unknown_field_is_noted_and_not_refused() {
    let yaml = minimal(
        "  hostNetwrk: true\n  volumes:\n  - {name: w, emptyDir: {size: 1}}\n  - {name: m, \
         configMap: {name: m, items: [{key: k, path: x, mod: 1}]}}\n",
    )
    .replace(
        "image: i",
        "image: i, env: [{name: A, valueFrom: {fileKey: {}}}], livenessProbe: {tcpSocket: {prt: \
         1}}, newField: {a: [1]}",
    );
    let notes = pod(&yaml).notes;
    let not = "is not a field of Kubernetes 1.36";
    for note in [
        format!("document 1.spec.hostNetwrk: {not}; did you mean: hostNetwork, "),
        format!(
            "document 1.spec.containers[0].env[0].valueFrom.fileKey: {not}; did you mean: \
             fileKeyRef"
        ),
        format!(
            "document 1.spec.containers[0].livenessProbe.tcpSocket.prt: {not}; did you mean: port"
        ),
        format!("document 1.spec.containers[0].newField: {not}"),
        format!("document 1.spec.volumes[0].emptyDir.size: {not}; did you mean: sizeLimit"),
        format!("document 1.spec.volumes[1].configMap.items[0].mod: {not}; did you mean: mode"),
    ] {
        assert!(
            notes.iter().any(|found| found.starts_with(&note)),
            "{note:?} is not in {notes:#?}"
        );
    }
    assert_eq!(notes.len(), 6, "{notes:#?}");
    let many: String = (0..200).map(|index| format!("  k{index}: 0\n")).collect();
    let notes = pod(&minimal(&many)).notes;
    assert_eq!((notes.len(), notes[20].as_str()), (21, "and 180 more unknown fields"));
}

/// Verifies M2.
#[test]
fn unknown_fields_of_a_refused_object_are_noted_with_its_problems() {
    let refused = |text: &str| {
        let file = File { name: "pod.yaml".into(), text: text.into() };
        parse_files(&[file]).unwrap_err()
    };
    let spelt_wrong = "apiVersion: v1\nkind: Pod\nmetadata: {name: p}\nspec:\n  contaners:\n  \
                       - {name: c, image: i}\n";
    let note =
        "document 1.spec.contaners: is not a field of Kubernetes 1.36; did you mean: containers";
    let problems = refused(spelt_wrong).to_string();
    assert!(problems.starts_with("pod.yaml: document 1.spec.containers"), "{problems}");
    assert!(problems.contains(&format!("\n  note: {note}")), "{problems}");
    // The explanation of an accepted pod has its notes.
    let both = format!("{}---\n{spelt_wrong}", minimal("  hostNetwrk: true\n"));
    let problems = refused(&both);
    assert_eq!(problems.notes.len(), 1, "{problems}");
    let many: String = (0..200).map(|index| format!("  k{index}: 0\n")).collect();
    let problems = refused(&format!("{spelt_wrong}{many}"));
    assert_eq!(
        (problems.notes.len(), problems.notes[20].as_str()),
        (21, "and 181 more unknown fields")
    );
    assert!(!problems.within(100).contains("note: "));
}

/// Verifies M14.
#[test]
fn values_that_the_api_server_refuses_are_reported_with_their_place() {
    let yaml = minimal(
        "  volumes:\n  - {name: m, configMap: {name: m, items: [{key: k, path: ../x, mode: \
         512}]}}\n",
    )
    .replace(
        "image: i",
        "image: i, volumeMounts: [{name: x, mountPath: /x}], ports: [{}, {containerPort: \
         65536, hostPort: 65536}]",
    );
    assert_eq!(
        problems(&yaml),
        [
            "document 1.spec.containers[0].ports[0].containerPort = 0: is invalid; allowed: a \
             whole number from 1 to 65535",
            "document 1.spec.containers[0].ports[1].containerPort = 65536: is invalid; allowed: a \
             whole number from 1 to 65535",
            "document 1.spec.containers[0].ports[1].hostPort = 65536: is invalid; allowed: a \
             whole number from 0 to 65535",
            "document 1.spec.volumes[0].configMap.items[0].mode = 512: is invalid; allowed: a \
             whole number from 0 to 511",
            "document 1.spec.volumes[0].configMap.items[0].path = \"../x\": is invalid; allowed: a \
             relative path that does not start with \"..\"",
            "document 1.spec.containers.c.volumeMounts = x: is invalid; allowed: the name of a \
             volume of the pod",
        ]
    );
}

/// Verifies M14.
#[test]
fn negative_grace_period_means_one_second() {
    for (given, grace_secs) in [("-1", 1), ("0", 0), ("", 30), ("86400", 86400)] {
        let yaml = minimal(&format!("  terminationGracePeriodSeconds: {given}\n"));
        assert_eq!(pod(&yaml).grace_secs, grace_secs, "{given}");
    }
}

#[test]
fn malformed_documents_are_reported() {
    for (yaml, start) in [
        ("", "the text: has no Pod"),
        ("a: [", "document 1: is not YAML"),
        ("- 1", "document 1 = [1]: is invalid; allowed: a table"),
        (
            "apiVersion: v2\nkind: Pod",
            "document 1.apiVersion = \"v2\": is invalid; allowed: \"v1\"",
        ),
        (
            "apiVersion: v1\nmetadata: {}",
            "document 1.kind: is missing; allowed: a kind such as Pod, Deployment or List",
        ),
        (
            "apiVersion: v1\nkind: Pod\nmetadata: {}\nspec: {}",
            "document 1.metadata.name: is missing; allowed: a DNS name",
        ),
        (
            "apiVersion: v1\nkind: List\nitems: [{apiVersion: v1, kind: List, items: []}]",
            "document 1.items[0].kind = \"List\": is invalid; allowed: any kind but a list",
        ),
        (
            "apiVersion: v1\nkind: List\nitems: 3",
            "document 1.items = 3: is invalid; allowed: a list",
        ),
        (
            "apiVersion: v1\nkind: Pod\nmetadata: {name: ../x}",
            "document 1.metadata.name = \"../x\": is invalid; allowed: a DNS name",
        ),
    ] {
        let found = problems(yaml);
        assert!(
            found.iter().any(|problem| problem.starts_with(start)),
            "{start:?} is not among {found:#?}"
        );
    }
}

/// Verifies M4.
#[test]
fn lists_and_several_documents_are_read_as_their_items() {
    let item = |name: &str| {
        format!(
            "{{apiVersion: v1, kind: Pod, metadata: {{name: {name}}}, spec: {{containers: \
             [{{name: c, image: i}}], volumes: [{{name: v, configMap: {{name: m}}}}]}}}}"
        )
    };
    let map = "{apiVersion: v1, kind: ConfigMap, metadata: {name: m}, data: {a: b}}";
    let yaml = format!(
        "{}---\n# nothing here\n---\napiVersion: v1\nkind: List\nmetadata: {{resourceVersion: \
         \"\"}}\nitems:\n- {}\n- {map}\n- {}\n",
        minimal(""),
        item("one"),
        item("other")
    );
    let names: Vec<String> =
        parse("pods.yaml", &yaml).unwrap().pods.into_iter().map(|pod| pod.metadata.name).collect();
    assert_eq!(names, ["p", "one", "other"]);
    // The comment before the list counts as a document.
    let wrong = yaml.replace("{name: other}", "{name: other, labels: 3}");
    assert_eq!(
        problems(&wrong),
        ["document 3.items[2].metadata.labels = 3: is invalid; allowed: a table"]
    );
}

/// Verifies M4.
#[test]
fn status_of_the_api_server_has_no_effect() {
    let yaml = minimal(
        "  nodeName: node\n  preemptionPolicy: PreemptLowerPriority\n  \
                        serviceAccount: default\nstatus: {phase: Running}\n",
    )
    .replace(
        "{name: p}",
        "{name: p, creationTimestamp: \"2026-01-01T00:00:00Z\", generateName: p-, \
         resourceVersion: \"7\", ownerReferences: [{kind: ReplicaSet}], managedFields: [{f: 1}]}",
    );
    assert_eq!(pod(&yaml), pod(&minimal("")));
}

#[test]
fn manifest_above_the_size_limit_is_refused() {
    let yaml = format!("{}# {}", minimal(""), "x".repeat(MAX_FILE_BYTES));
    assert_eq!(
        problems(&yaml),
        [format!("the text: has {} bytes; allowed: {MAX_FILE_BYTES}", yaml.len())]
    );
}

/// Verifies M3.
#[test]
fn secret_value_is_in_no_problem() {
    let broken = POD
        .replace("value: world", "value: [open sesame]")
        .replace("\"open sesame\"}", "[open sesame]}");
    let text = parse("pod.yaml", &broken).unwrap_err().to_string();
    assert!(text.contains("env[0].value"), "{text}");
    assert!(!text.contains("sesame"), "{text}");
    let text = parse("pod.yaml", &format!("{POD}\n  \"open sesame")).unwrap_err().to_string();
    assert!(!text.contains("sesame"), "{text}");
}

#[test]
fn pod_without_uid_gets_a_stable_uid() {
    let (one, other) = (pod(&minimal("")), pod(&minimal("")));
    assert_eq!(one.metadata.uid, other.metadata.uid);
    assert_eq!(one.metadata.uid.len(), 36);
    assert_ne!(one.metadata.uid, pod(&minimal("").replace("name: p", "name: q")).metadata.uid);
}

proptest! {
    #[test]
    fn arbitrary_text_is_a_manifest_or_a_problem(text in "\\PC{0,200}") {
        if let Err(problems) = parse("any", &text) {
            prop_assert!(!problems.list.is_empty());
        }
    }

    #[test]
    fn manifest_with_a_changed_line_does_not_panic(line in 1_usize..80, with in "( \
        {0,8}[a-zA-Z]{1,12}: ?([0-9]{1,20}|true|\\[\\]|\\{\\}|~|\"x\"|\\.\\.)?|---|)") {
        let replaced = |(index, text)| if index == line { with.as_str() } else { text };
        let lines: Vec<&str> = POD.lines().enumerate().map(replaced).collect();
        if let Ok(manifest) = parse("any", &lines.join("\n")) {
            for pod in &manifest.pods {
                let sandbox = pod.sandbox_config(&Node::default(), 0);
                for container in &pod.containers {
                    pod.container_config(container, &Node::default(), &sandbox, "i", 0);
                }
            }
        }
    }
}
