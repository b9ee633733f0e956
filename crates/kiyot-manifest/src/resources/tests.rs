use crate::{File, Pod, QosClass, parse_files};

fn explained(spec: &str) -> Result<Pod, String> {
    let text = format!("apiVersion: v1\nkind: Pod\nmetadata: {{name: p}}\nspec:\n{spec}");
    let file = File { name: "m".into(), text };
    parse_files(&[file])
        .map(|mut manifest| manifest.pods.remove(0))
        .map_err(|problems| problems.to_string())
}

fn container(name: &str, resources: &str) -> String {
    format!("  - {{name: {name}, image: i, resources: {{{resources}}}}}\n")
}

fn with(resources: &str) -> Result<Pod, String> {
    explained(&format!("  containers:\n{}", container("c", resources)))
}

/// Verifies M7.
#[test]
fn extended_resources_are_summed_and_never_overcommitted() {
    let limits = "limits: {nvidia.com/gpu: 1, hugepages-2Mi: 4Mi}";
    let same = "requests: {nvidia.com/gpu: \"2\"}, limits: {nvidia.com/gpu: 2000m}";
    let pod = explained(&format!(
        "  initContainers:\n{}  containers:\n{}{}",
        container("i", "limits: {nvidia.com/gpu: 2, x.y/z: 1}"),
        container("c", limits),
        container("d", same),
    ))
    .unwrap();
    let extended: Vec<_> = pod.resources().extended.into_iter().collect();
    let expected = [("hugepages-2Mi", 4 << 20), ("nvidia.com/gpu", 3), ("x.y/z", 1)];
    assert_eq!(extended, expected.map(|(name, amount)| (name.to_owned(), amount)));
    for (resources, problem) in [
        (
            "requests: {nvidia.com/gpu: 1}",
            "resources.requests.nvidia.com/gpu = 1: differs from its limit; allowed: the same \
             limit, which is missing",
        ),
        (
            "requests: {nvidia.com/gpu: 1}, limits: {nvidia.com/gpu: 2}",
            "resources.requests.nvidia.com/gpu = 1: differs from its limit; allowed: 2",
        ),
        (
            "limits: {nvidia.com/gpu: 500m}",
            "resources.limits.nvidia.com/gpu = \"500m\": is invalid; allowed: a whole number",
        ),
        ("limits: {nvidia.com/gpu: -1}", "is invalid; allowed: a whole number, not negative"),
        ("limits: {gpu: 1}", "resources.limits.gpu: is an unknown key; allowed: cpu, memory,"),
    ] {
        let error = with(resources).unwrap_err();
        assert!(error.contains(problem), "{error}");
    }
}

/// Verifies M14.
#[test]
fn request_above_its_limit_is_refused() {
    let cpu = |request: &str, limit: &str| {
        format!("requests: {{cpu: {request}}}, limits: {{cpu: {limit}}}")
    };
    for (request, limit) in [("1", "1000m"), ("0.1", "100m"), ("null", "1")] {
        assert!(with(&cpu(request, limit)).is_ok(), "{request} {limit}");
    }
    assert!(with("requests: {cpu: 2}, limits: {memory: 1}").is_ok());
    for (resources, problem) in [
        (cpu("2", "1"), "resources.requests.cpu = 2: is more than its limit; allowed: 1 at most"),
        (
            "requests: {memory: 1Gi}, limits: {memory: 1e9}".to_owned(),
            "resources.requests.memory = 1Gi: is more than its limit; allowed: 1000000000 at most",
        ),
        (
            "requests: {ephemeral-storage: 2}, limits: {ephemeral-storage: 1}".to_owned(),
            "resources.requests.ephemeral-storage = 2: is more than its limit",
        ),
    ] {
        let error = with(&resources).unwrap_err();
        assert!(error.contains(problem), "{error}");
    }
    let containers = container("c", "");
    let own = format!("  resources: {{{}}}\n  containers:\n{containers}", cpu("2", "1"));
    assert!(explained(&own).unwrap_err().contains("spec.resources.requests.cpu = 2: is more"));
}

/// Verifies M7.
#[test]
fn extended_resources_of_a_list_are_limited() {
    let many = |count: usize| {
        let list: Vec<_> = (0..count).map(|number| format!("a.b/c{number}: 1")).collect();
        with(&format!("limits: {{{}}}", list.join(", ")))
    };
    assert_eq!(many(100).unwrap().resources().extended.len(), 100);
    assert!(many(101).unwrap_err().contains("101 extended resources: has too many; allowed: 100"));
}

/// Verifies K18.
#[test]
fn extended_resources_raise_requests_and_do_not_decide_the_class() {
    let extended = "pod.elotl.co/cpu: 16, pod.elotl.co/memory: 64Gi, \
                    pod.elotl.co/ephemeral-storage: 20Gi";
    let pod = with(&format!("requests: {{{extended}, cpu: 16m}}, limits: {{{extended}}}")).unwrap();
    let sums = pod.complete_resources();
    assert_eq!((sums.cpu_request, sums.cpu_limit), (Some(16_000), None));
    assert_eq!((sums.memory_request, sums.storage_request), (Some(64 << 30), Some(20 << 30)));
    assert_eq!(pod.resources().cpu_request, Some(16));
    assert_eq!(pod.qos_class(), QosClass::Burstable);
    assert_eq!(with(&format!("limits: {{{extended}}}")).unwrap().qos_class(), QosClass::BestEffort);
}

/// Verifies M7.
#[test]
fn ephemeral_storage_is_read_and_does_not_decide_the_class() {
    let pod = with("limits: {ephemeral-storage: 1Gi}").unwrap();
    let resources = pod.resources();
    assert_eq!(
        (resources.storage_request, resources.storage_limit),
        (Some(1 << 30), Some(1 << 30))
    );
    assert_eq!(pod.qos_class(), QosClass::BestEffort);
    let both = "requests: {ephemeral-storage: 1Gi}, limits: {ephemeral-storage: 2Gi}";
    let two = container("c", both) + &container("d", both);
    let resources = explained(&format!("  containers:\n{two}")).unwrap().resources();
    assert_eq!(
        (resources.storage_request, resources.storage_limit),
        (Some(2 << 30), Some(4 << 30))
    );
    assert_eq!(with("limits: {nvidia.com/gpu: 1}").unwrap().qos_class(), QosClass::BestEffort);
}

/// Verifies M1.
#[test]
fn resources_of_a_pod_win_over_resources_of_its_containers() {
    let with_own = |own: &str| {
        let containers = container("c", "requests: {cpu: 1, memory: 1Gi}, limits: {cpu: 8}");
        explained(&format!("  resources: {{{own}}}\n  containers:\n{containers}")).unwrap()
    };
    let pod = with_own("limits: {cpu: 4, memory: 2Gi}");
    let resources = pod.resources();
    assert_eq!((resources.cpu_request, resources.cpu_limit), (Some(1000), Some(4000)));
    assert_eq!((resources.memory_request, resources.memory_limit), (Some(1 << 30), Some(2 << 30)));
    assert_eq!(pod.qos_class(), QosClass::Burstable);
    let same = "{cpu: 4, memory: 2Gi}";
    let pod = with_own(&format!("requests: {same}, limits: {same}"));
    assert_eq!(pod.resources().cpu_request, Some(4000));
    assert_eq!(pod.qos_class(), QosClass::Guaranteed);
}
