//! Requests of pods and the figures that the node declares.

use super::*;

/// Returns the lines on admission, and whether all pods are accepted.
fn admission(provider: &str, capacity: &str, spec: &str) -> (Vec<String>, bool) {
    let declared = if capacity.is_empty() {
        String::new()
    } else {
        format!("[kubernetes]\nkubeconfig = \"in-cluster\"\n[kubernetes.capacity]\n{capacity}")
    };
    let pod = format!("apiVersion: v1\nkind: Pod\nmetadata: {{name: p}}\nspec:\n  {spec}\n");
    let (text, fine) = explained(&format!("{declared}{}", config_of(provider)), &pod);
    let is_admission = |line: &&str| {
        let starts = ["admission: ", "note: scheduler", "refused: requests"];
        starts.iter().any(|start| line.starts_with(start))
    };
    (text.lines().map(str::trim).filter(is_admission).map(str::to_owned).collect(), fine)
}

const LARGE: &str = "containers: [{name: c, image: i, resources: {requests: {cpu: 64, memory: \
                     200Gi}}}]";
const DECLARED: &str = "cpu = 1000\nmemory = \"4000Gi\"\n\"a.b/c\" = 8\n";

/// Verifies K30.
#[test]
fn requests_are_compared_with_the_declared_figures() {
    for provider in ["ec2", "qemu", "netns"] {
        assert_eq!(
            admission(provider, DECLARED, LARGE),
            (
                vec![
                    "admission: 64 of 1000 CPUs, 200Gi of 4000Gi of memory that this node declares"
                        .to_owned()
                ],
                true
            )
        );
    }
    let above = "overhead: {memory: 1Mi}\n  containers: [{name: c, image: i, resources: {limits: \
                 {cpu: 1000001m, memory: 4000Gi, a.b/c: 9}}}]";
    assert_eq!(
        admission("netns", DECLARED, above),
        (
            [
                "refused: requests 1000001m CPUs, the node declares 1000",
                "refused: requests 4096001Mi of memory, the node declares 4000Gi",
                "refused: requests 9 a.b/c, the node declares 8",
            ]
            .map(str::to_owned)
            .into(),
            false
        )
    );
    let equal = "containers: [{name: c, image: i, resources: {limits: {cpu: 1000, a.b/c: 8}}}]";
    assert_eq!(
        admission("netns", DECLARED, equal),
        (
            vec!["admission: 1000 of 1000 CPUs, 8 of 8 a.b/c that this node declares".to_owned()],
            true
        )
    );
}

/// Verifies K18, K30.
#[test]
fn extended_bytes_are_compared_with_their_figure() {
    let declared = "\"pod.elotl.co/memory\" = \"4000Gi\"\n";
    let of = |memory: &str| {
        let amount = format!("{{pod.elotl.co/memory: {memory}}}");
        let spec = format!("containers: [{{name: c, image: i, resources: {{limits: {amount}}}}}]");
        admission("netns", declared, &spec)
    };
    let fits = "admission: 64Gi of 4000Gi pod.elotl.co/memory that this node declares".to_owned();
    assert_eq!(of("64Gi"), (vec![fits], true));
    let above = "refused: requests 4001Gi pod.elotl.co/memory, the node declares 4000Gi".to_owned();
    assert_eq!(of("4001Gi"), (vec![above], false));
}

/// Verifies K30.
#[test]
fn requests_without_a_declared_figure_are_noted_for_instances() {
    let note = |requests: &str| {
        format!(
            "note: scheduler and kubelet count its requests of {requests} against the node, \
             although they take nothing from it; the node can declare more (docs/kubernetes.md)"
        )
    };
    assert_eq!(admission("ec2", "", LARGE), (vec![note("64 CPUs, 200Gi of memory")], true));
    assert_eq!(
        admission("ec2", "cpu = 64\n", LARGE),
        (
            vec![
                "admission: 64 of 64 CPUs that this node declares".to_owned(),
                note("200Gi of memory")
            ],
            true
        )
    );
    // Derived figures are not known here.
    let cell = LARGE.replace("200Gi", "200Gi, pod.elotl.co/cell: 1").replace("requests", "limits");
    let cells = "admission: 1 of 250 pod.elotl.co/cell that this node declares".to_owned();
    assert_eq!(admission("ec2", "derived = true\n", &cell), (vec![cells], true));
    let none = "containers: [{name: c, image: i}]";
    for (provider, spec) in [("netns", LARGE), ("qemu", LARGE), ("ec2", none)] {
        assert_eq!(admission(provider, "", spec), (Vec::new(), true), "{provider}");
    }
}
