//! The policies on pods in `deploy/capacity.yaml` and `deploy/requests.yaml`, evaluated like the
//! API server does.

use serde_json::{Value, json};

use crate::policy::{Review, kubelet, mutated_by, mutating, named};

const CAPACITY: &str = include_str!("../../../../deploy/capacity.yaml");
const REQUESTS: &str = include_str!("../../../../deploy/requests.yaml");
const CELL: &str = "pod.elotl.co/cell";

/// Returns the policy with this name, which admits pods if it fails.
fn ignoring(file: &str, name: &str) -> Value {
    let policy = named(&mutating(file), name);
    let ways = ["failurePolicy", "reinvocationPolicy"].map(|key| policy["spec"][key].clone());
    assert_eq!(ways, ["Ignore", "IfNeeded"]);
    policy
}

fn create(new: &Value) -> Review {
    let user = json!({ "username": "system:serviceaccount:kube-system:replicaset-controller" });
    let (operation, resource) = ("CREATE", "pods");
    Review { user, group: "", operation, resource, old: Value::Null, new: new.clone() }
}

fn container(name: &str, requests: Value, limits: Value) -> Value {
    let mut resources = json!({});
    for (kind, amounts) in [("requests", requests), ("limits", limits)] {
        if !amounts.is_null() {
            resources[kind] = amounts;
        }
    }
    json!({ "name": name, "image": "i", "resources": resources })
}

/// Returns a container with a request.
fn asking(name: &str, requests: Value) -> Value {
    container(name, requests, Value::Null)
}

fn sidecar(name: &str, requests: Value) -> Value {
    let mut sidecar = asking(name, requests);
    sidecar["restartPolicy"] = json!("Always");
    sidecar
}

/// Returns a pod of a cell with these containers and init containers.
fn pod(containers: Value, inits: Value) -> Value {
    let mut pod = json!({
        "metadata": { "annotations": { "kubernetes.io/target-runtime": "kiyot" } },
        "spec": { "containers": containers },
    });
    if !inits.is_null() {
        pod["spec"]["initContainers"] = inits;
    }
    pod
}

/// Returns a pod that requests a cell in its first container.
fn with_cell(mut pod: Value) -> Value {
    for kind in ["requests", "limits"] {
        pod["spec"]["containers"][0]["resources"][kind][CELL] = json!("1");
    }
    pod
}

/// Returns a pod with further annotations. Their keys lack the prefix.
fn annotated(mut pod: Value, annotations: &[(&str, &str)]) -> Value {
    for (key, value) in annotations {
        pod["metadata"]["annotations"][format!("pod.elotl.co/{key}")] = json!(value);
    }
    pod
}

/// Verifies K16.
#[test]
fn pods_of_the_runtime_class_request_a_cell() {
    let policy = ignoring(CAPACITY, "kiyot-cells");
    let of_class = |containers: Value| {
        let mut pod = json!({ "spec": { "containers": containers } });
        pod["spec"]["runtimeClassName"] = json!("kiyot");
        pod
    };
    let (cpu, none) = (json!({ "cpu": "1" }), Value::Null);
    for given in [
        of_class(json!([{ "name": "a" }])),
        of_class(json!([asking("a", none.clone()), asking("b", none.clone())])),
        of_class(json!([asking("a", cpu.clone())])),
        of_class(json!([container("a", cpu.clone(), cpu)])),
    ] {
        let expected = with_cell(given.clone());
        assert_eq!(mutated_by(&policy, &create(&given)).as_ref(), Ok(&expected));
        assert_eq!(mutated_by(&policy, &create(&expected)), Ok(expected));
    }
    let by_hand = json!({ CELL: "1" });
    let by_hand = container("b", by_hand.clone(), by_hand);
    let mut other_class = of_class(json!([asking("a", none.clone())]));
    other_class["spec"]["runtimeClassName"] = json!("runc");
    for kept in [
        create(&of_class(json!([asking("a", none.clone()), by_hand]))),
        create(&other_class),
        create(&pod(json!([asking("a", none.clone())]), Value::Null)),
        Review { operation: "UPDATE", ..create(&of_class(json!([asking("a", none)]))) },
    ] {
        assert_eq!(mutated_by(&policy, &kept), Ok(kept.new));
    }
}

/// Returns cases: a name, a pod, and the pod after the policy, without the request for a cell.
fn rows() -> Vec<(&'static str, Value, Value)> {
    let none = || Value::Null;
    let one = |container: Value| pod(json!([container]), Value::Null);
    let kept = |name, container: Value| (name, one(container.clone()), one(container));
    let ext = |cpu: &str| json!({ "pod.elotl.co/cpu": cpu });
    let moved = |name: &str, cpu: &str| {
        let requests = json!({ "cpu": format!("{cpu}m"), "pod.elotl.co/cpu": cpu });
        container(name, requests, ext(cpu))
    };
    let cpu = |name: &str, cpu: &str| asking(name, json!({ "cpu": cpu }));
    let large = || json!({ "cpu": "16", "memory": "64Gi", "ephemeral-storage": "20Gi" });
    let large_moved = || {
        json!({
            "pod.elotl.co/cpu": "16",
            "pod.elotl.co/memory": "64Gi",
            "pod.elotl.co/ephemeral-storage": "20Gi",
        })
    };
    let mut remainder = large_moved();
    for (name, rest) in [("cpu", "16m"), ("memory", "1Mi"), ("ephemeral-storage", "1Mi")] {
        remainder[name] = json!(rest);
    }
    let sizes: &[(&str, &str)] = &[("cpu", "16000m"), ("memory", "68719476736")];
    let large_pod = || one(asking("a", large()));
    let large_done = || one(container("a", remainder.clone(), large_moved()));
    let typed = |value: &'static str| [("instance-type", value)];
    let limited = |name: &str, cpu: &str, limit: &str| {
        container(name, json!({ "cpu": cpu }), json!({ "cpu": limit }))
    };
    let limited_done = |name: &str, cpu: &str, limit: &str| {
        let requests = json!({ "cpu": format!("{cpu}m"), "pod.elotl.co/cpu": cpu });
        container(name, requests, json!({ "cpu": limit, "pod.elotl.co/cpu": cpu }))
    };
    let by_hand_limited = || {
        let limits = json!({ "cpu": "9", "pod.elotl.co/cpu": "8" });
        container("a", json!({ "cpu": "10m", "pod.elotl.co/cpu": "8" }), limits)
    };
    let gpus = |name: &str, count: &str| json!({ name: count });
    let gpus_done = |name: &str, count: &str| json!({ name: "0", "pod.elotl.co/gpu": count });
    let memory =
        |name: &str, cpu: &str, memory: &str| asking(name, json!({ "cpu": cpu, "memory": memory }));
    let memory_done = |name: &str, cpu: &str, memory: &str| {
        let ext = json!({ "pod.elotl.co/cpu": cpu, "pod.elotl.co/memory": memory });
        let mut requests = ext.clone();
        requests["cpu"] = json!(format!("{cpu}m"));
        requests["memory"] = json!("1Mi");
        container(name, requests, ext)
    };
    let always = |mut container: Value| {
        container["restartPolicy"] = json!("Always");
        container
    };
    let many = |count: u32| (0..count).map(|it| asking(&it.to_string(), none())).collect::<Value>();
    let with_many = |count, mut pod: Value, first: Value| {
        pod["spec"]["containers"] = many(count);
        pod["spec"]["containers"][0] = first;
        pod
    };
    let mut own = large_pod();
    own["spec"]["resources"] = json!({ "requests": { "cpu": "20" } });
    let mut mirror = large_pod();
    mirror["metadata"]["annotations"]["kubernetes.io/config.mirror"] = json!("a hash");
    vec![
        ("requests", large_pod(), annotated(large_done(), sizes)),
        (
            "limits of all containers",
            pod(json!([limited("a", "1", "2"), limited("b", "1", "2500m")]), none()),
            annotated(
                pod(json!([limited_done("a", "1", "2"), limited_done("b", "1", "2500m")]), none()),
                &[("cpu", "4500m")],
            ),
        ),
        (
            "limits of a container",
            pod(json!([limited("a", "1", "5"), cpu("b", "1")]), none()),
            annotated(
                pod(json!([limited_done("a", "1", "5"), moved("b", "1")]), none()),
                &[("cpu", "2000m")],
            ),
        ),
        (
            "fractions",
            pod(json!([cpu("a", "100m"), cpu("b", "1100m"), cpu("c", "2001m")]), none()),
            annotated(
                pod(json!([moved("a", "1"), moved("b", "2"), moved("c", "3")]), none()),
                &[("cpu", "3201m")],
            ),
        ),
        (
            "init containers and sidecars",
            pod(
                json!([memory("a", "1", "1Gi"), memory("b", "1", "1Gi")]),
                json!([
                    memory("c", "4", "1Gi"),
                    always(memory("d", "1", "2Gi")),
                    memory("e", "2", "5Gi"),
                    always(memory("f", "1", "1Gi")),
                ]),
            ),
            annotated(
                pod(
                    json!([memory_done("a", "1", "1Gi"), memory_done("b", "1", "1Gi")]),
                    json!([
                        memory_done("c", "4", "1Gi"),
                        always(memory_done("d", "1", "2Gi")),
                        memory_done("e", "2", "5Gi"),
                        always(memory_done("f", "1", "1Gi")),
                    ]),
                ),
                &[("cpu", "4000m"), ("memory", "7516192768")],
            ),
        ),
        (
            "sidecars",
            pod(json!([cpu("a", "1")]), json!([sidecar("b", json!({ "cpu": "2" }))])),
            annotated(
                pod(json!([moved("a", "1")]), json!([always(moved("b", "2"))])),
                &[("cpu", "3000m")],
            ),
        ),
        (
            "GPUs",
            one(container("a", gpus("nvidia.com/gpu", "2"), gpus("nvidia.com/gpu", "2"))),
            annotated(
                one(container(
                    "a",
                    gpus_done("nvidia.com/gpu", "2"),
                    gpus_done("nvidia.com/gpu", "2"),
                )),
                &[("gpu", "2 nvidia")],
            ),
        ),
        (
            "GPUs of AMD",
            one(container("a", gpus("amd.com/gpu", "1"), gpus("amd.com/gpu", "1"))),
            annotated(
                one(container("a", gpus_done("amd.com/gpu", "1"), gpus_done("amd.com/gpu", "1"))),
                &[("gpu", "1 amd")],
            ),
        ),
        (
            "annotations of the user",
            annotated(large_pod(), &[("cpu", "2"), ("memory", "4Gi")]),
            annotated(large_done(), &[("cpu", "2"), ("memory", "4Gi")]),
        ),
        (
            "instance type",
            annotated(large_pod(), &typed("c5.large")),
            annotated(large_done(), &typed("c5.large")),
        ),
        (
            "glob of types",
            annotated(large_pod(), &typed("c5*")),
            annotated(annotated(large_done(), &typed("c5*")), sizes),
        ),
        (
            "by hand",
            pod(
                json!([
                    container("a", json!({ "cpu": "10m", "pod.elotl.co/cpu": "8" }), ext("8")),
                    cpu("b", "2"),
                ]),
                none(),
            ),
            annotated(
                pod(
                    json!([
                        container("a", json!({ "cpu": "10m", "pod.elotl.co/cpu": "8" }), ext("8")),
                        moved("b", "2"),
                    ]),
                    none(),
                ),
                &[("cpu", "10000m")],
            ),
        ),
        (
            "by hand with limits",
            pod(json!([by_hand_limited(), limited("b", "2", "3")]), none()),
            annotated(
                pod(json!([by_hand_limited(), limited_done("b", "2", "3")]), none()),
                &[("cpu", "12000m")],
            ),
        ),
        (
            "largest amounts",
            one(asking("a", json!({ "cpu": "10k", "memory": "64Ti" }))),
            annotated(
                one(container(
                    "a",
                    json!({
                        "cpu": "10000m", "pod.elotl.co/cpu": "10000",
                        "memory": "1Mi", "pod.elotl.co/memory": "64Ti",
                    }),
                    json!({ "pod.elotl.co/cpu": "10000", "pod.elotl.co/memory": "64Ti" }),
                )),
                &[("cpu", "10000000m"), ("memory", "70368744177664")],
            ),
        ),
        (
            "amounts beyond",
            pod(json!([cpu("a", "1"), cpu("b", "9E")]), none()),
            annotated(
                pod(json!([moved("a", "1"), cpu("b", "9E")]), none()),
                &[("cpu", "1000000000000000000m")],
            ),
        ),
        ("requests of the pod", own.clone(), own),
        ("mirror pod", mirror.clone(), mirror),
        ("without resources", one(json!({ "name": "a" })), one(json!({ "name": "a" }))),
        kept("empty resources", asking("a", none())),
        kept("empty requests", asking("a", json!({}))),
        kept("nothing", asking("a", json!({ "cpu": "0", "memory": "0", "amd.com/gpu": "0" }))),
        kept("less than remains", asking("a", json!({ "memory": "1023Ki" }))),
        kept("parts of bytes", asking("a", json!({ "memory": "1048576500m" }))),
        kept("too much", asking("a", json!({ "cpu": "10001", "memory": "65Ti" }))),
        kept("negative", asking("a", json!({ "cpu": "-1", "memory": "-1Gi" }))),
        kept("others", asking("a", json!({ "hugepages-2Mi": "2Mi", "a.b/c": "1" }))),
        (
            "most containers",
            with_many(32, large_pod(), asking("0", large())),
            annotated(
                with_many(32, large_pod(), container("0", remainder.clone(), large_moved())),
                sizes,
            ),
        ),
        (
            "more containers",
            with_many(33, large_pod(), asking("0", large())),
            with_many(33, large_pod(), asking("0", large())),
        ),
    ]
}

/// Returns the cases with an unexpected outcome.
fn unexpected(policy: &Value) -> impl Iterator<Item = String> {
    rows().into_iter().filter_map(move |(name, given, expected)| {
        let expected = with_cell(expected);
        let found = mutated_by(policy, &create(&given));
        (found.as_ref() != Ok(&expected)).then(|| format!("{name}: {found:?}"))
    })
}

/// Verifies K17.
#[test]
fn requests_of_pods_in_cells_become_extended_resources() {
    let policy = ignoring(REQUESTS, "kiyot-requests");
    let unexpected: Vec<String> = unexpected(&policy).collect();
    assert!(unexpected.is_empty(), "{}", unexpected.join("\n"));
}

/// Verifies K17.
#[test]
fn second_run_of_the_policy_changes_nothing() {
    let policy = ignoring(REQUESTS, "kiyot-requests");
    for (name, given, _) in rows() {
        let once = mutated_by(&policy, &create(&given)).unwrap();
        assert_eq!(mutated_by(&policy, &create(&once)).as_ref(), Ok(&once), "{name}");
    }
}

/// Verifies K17.
#[test]
fn defaults_of_a_limit_range_replace_no_moved_request() {
    let policy = ignoring(REQUESTS, "kiyot-requests");
    let given = pod(json!([asking("a", json!({ "cpu": "16" }))]), Value::Null);
    let mut pod = mutated_by(&policy, &create(&given)).unwrap();
    let requests = pod["spec"]["containers"][0]["resources"]["requests"].as_object_mut().unwrap();
    for (name, default) in [("cpu", "100m"), ("memory", "256Mi")] {
        requests.entry(name).or_insert(json!(default));
    }
    let pod = mutated_by(&policy, &create(&pod)).unwrap();
    let resources = json!({
        "requests": {
            "cpu": "16m", "pod.elotl.co/cpu": "16",
            "memory": "1Mi", "pod.elotl.co/memory": "256Mi", CELL: "1",
        },
        "limits": { "pod.elotl.co/cpu": "16", "pod.elotl.co/memory": "256Mi", CELL: "1" },
    });
    assert_eq!(pod["spec"]["containers"][0]["resources"], resources);
}

/// Verifies K17.
#[test]
fn container_that_a_webhook_adds_is_converted_by_the_next_run() {
    let policy = ignoring(REQUESTS, "kiyot-requests");
    let (_, given, expected) = rows().swap_remove(0);
    let mut injected = mutated_by(&policy, &create(&given)).unwrap();
    let (cpu, mut expected) = (json!({ "cpu": "1" }), with_cell(expected));
    let requests = json!({ "cpu": "1m", "pod.elotl.co/cpu": "1" });
    let converted = container("proxy", requests, json!({ "pod.elotl.co/cpu": "1" }));
    for (pod, container) in [(&mut injected, asking("proxy", cpu)), (&mut expected, converted)] {
        pod["spec"]["containers"].as_array_mut().unwrap().insert(0, container);
    }
    assert_eq!(mutated_by(&policy, &create(&injected)), Ok(expected));
}

/// Verifies K17.
#[test]
fn other_pods_keep_their_requests() {
    let policy = ignoring(REQUESTS, "kiyot-requests");
    let given = rows().swap_remove(0).1;
    let with = |pointer: &str, value: Value| {
        let mut pod = given.clone();
        let (parent, key) = pointer.rsplit_once('/').unwrap();
        pod.pointer_mut(parent).unwrap()[key.replace("~1", "/")] = value;
        create(&pod)
    };
    let target = "/metadata/annotations/kubernetes.io~1target-runtime";
    let kept = [
        with("/metadata", json!({})),
        with("/metadata/annotations", json!({})),
        with(target, json!("containerd")),
        with("/spec/runtimeClassName", json!("kiyot")),
        Review { operation: "UPDATE", ..create(&given) },
        Review { resource: "pods/resize", ..create(&given) },
    ];
    let unequal = |policy: &Value| {
        kept.iter().filter(|kept| mutated_by(policy, kept).as_ref() != Ok(&kept.new)).count()
    };
    assert_eq!(unequal(&policy), 0);
    let of_kubelet =
        Review { user: kubelet("worker-1"), ..with("/spec/runtimeClassName", json!("a")) };
    assert_ne!(mutated_by(&policy, &of_kubelet), Ok(of_kubelet.new.clone()));
    for number in 0..2 {
        let mut without = policy.clone();
        without["spec"]["matchConditions"].as_array_mut().unwrap().remove(number);
        assert!(unequal(&without) > 0, "{number}");
    }
}

/// Verifies K16, K17.
#[test]
fn both_policies_request_a_cell_alike() {
    let mutations = [(CAPACITY, "kiyot-cells"), (REQUESTS, "kiyot-requests")]
        .map(|(file, name)| ignoring(file, name)["spec"]["mutations"][0].clone());
    assert_eq!(mutations[0], mutations[1]);
}

/// Verifies K17.
#[test]
fn each_check_of_the_requests_is_needed() {
    let text = ignoring(REQUESTS, "kiyot-requests").to_string();
    for (check, without) in [
        ("> 32", "> 31"),
        ("> 32", "> 33"),
        ("'kubernetes.io/config.mirror' in object.metadata.annotations", "false"),
        ("|| object.spec.?resources.hasValue()", ""),
        ("'/spec/initContainers/'", "'/spec/containers/'"),
        ("index - size(object.spec.containers)", "index"),
        ("!('pod.elotl.co/' + resource[1] in container.?resources.?requests.orValue({}))", "true"),
        ("? '' : '/limits'", "? '/limits' : '/limits'"),
        ("own.name.contains('/') ? quantity(own.amount)", "false ? quantity(own.amount)"),
        ("compareTo(quantity('0')) > 0", "compareTo(quantity('0')) >= 0"),
        ("'1m' : '1Mi'", "'0' : '1Mi'"),
        ("'1m' : '1Mi'", "'1m' : '1Ki'"),
        ("'1m' : '1Mi')) >= 0", "'1m' : '1Mi')) > -2"),
        ("'10k' : '64Ti'", "'10001' : '64Ti'"),
        ("'10k' : '64Ti'", "'9999' : '64Ti'"),
        ("'10k' : '64Ti'", "'10k' : '65Ti'"),
        ("'10k' : '64Ti'", "'10k' : '63Ti'"),
        ("(own.name == 'cpu' || quantity(own.amount).isInteger())", "true"),
        ("+ 0.9995)) : own.amount", "+ 0.5)) : own.amount"),
        ("+ 0.9995)) : own.amount", "+ 1.0)) : own.amount"),
        ("variables.inits.filter(other, other.?restartPolicy.orValue('') == 'Always')]", "[]]"),
        (".orValue('') == 'Always' &&", ".orValue('') == 'Always' ||"),
        ("other.name == container.name ||", ""),
        ("< variables.names.indexOf(container.name)", ">= 0"),
        ("variables.moved.filter(own, own.absent != '') .map", "[variables.moved[0]].map"),
        ("? '0' : own.name", "? '1' : own.name"),
        ("own.amount + 'm' : '1Mi'", "'1m' : '1Mi'"),
        ("value: '0'})", "value: '1'})"),
        ("variables.moved.exists(own, own.name == name) &&", ""),
        ("'gpu' : name) in object.metadata.annotations", "'gpu' : name) in {}"),
        ("(name.contains('/') || object.metadata", "(true || object.metadata"),
        (".matches('[*?]')", ".matches('none')"),
        ("kind == 'requests' ? 'pod.elotl.co/' + name : name", "name"),
        ("kind == 'requests' ? 'pod.elotl.co/' + name : name", "'pod.elotl.co/' + name"),
        ("container.?resources.?limits[?name].hasValue()", "true"),
        ("&& sums[1] >= sums[0]", "&& false"),
        ("amount < 1e15 ? amount : 1e15", "amount"),
        ("int(amount * 1000.0 + 0.9995)", "int(amount + 0.9995) * 1000"),
        ("'amd.com/gpu' ? ' amd'", "'amd.com/gpu' ? ' nvidia'"),
    ] {
        assert!(text.contains(check), "{check} is absent");
        let policy = serde_json::from_str(&text.replacen(check, without, 1)).unwrap();
        assert!(unexpected(&policy).next().is_some(), "{check} is not needed");
    }
}
