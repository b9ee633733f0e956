use proptest::prelude::*;

use super::*;
use crate::requests::Pod;

fn figures_of(pairs: &[(&str, u64)]) -> Figures {
    pairs.iter().map(|(name, amount)| ((*name).to_owned(), *amount)).collect()
}

fn counted(requests: Value) -> Footprint {
    let spec = json!({ "containers": [{ "resources": { "requests": requests } }] });
    let pod: Pod = serde_json::from_value(json!({ "spec": spec })).unwrap();
    pod.footprint()
}

fn node(annotation: &str, figures: Value) -> Node {
    let node = json!({
        "metadata": { "labels": { KEY: "declared" }, "annotations": { KEY: annotation } },
        "status": { "capacity": figures, "allocatable": figures },
    });
    serde_json::from_value(node).unwrap()
}

/// Verifies K14.
#[test]
fn declared_figures_cover_the_configuration_and_running_pods() {
    let configured = figures_of(&[("cpu", 8), ("memory", 1024), ("a.b/c", 2), ("pods", 1)]);
    let pods = counted(json!({ "cpu": "8001m", "memory": "1073741825", "a.b/c": 5, "x.y/z": 7 }));
    let declared = figures(&configured, &pods);
    assert_eq!(text(&declared), "a.b/c=5,cpu=9,memory=1025Mi,pods=1");
    assert_eq!(figures(&configured, &Footprint::default()), configured);
    let extended = figures_of(&[("pod.elotl.co/memory", 1024)]);
    let pods = counted(json!({ "pod.elotl.co/memory": "1073741825" }));
    assert_eq!(text(&figures(&extended, &pods)), "pod.elotl.co/memory=1025Mi");
}

/// Verifies K14.
#[test]
fn quantities_have_six_digits_and_are_rounded_up() {
    for (amount, expected) in [
        (1, "1Mi"),
        (999_999, "999999Mi"),
        (1_000_000, "977Gi"),
        (4000 << 10, "4000Gi"),
        (999_999 << 20, "999999Ti"),
        (u64::MAX, "999999Ti"),
    ] {
        assert_eq!(quantity("memory", amount), expected);
    }
    assert_eq!(quantity("cpu", 1_000_000), "999999");
}

/// Verifies K14.
#[test]
fn patch_has_only_the_annotation_and_changed_extended_resources() {
    let declared = figures_of(&[("cpu", 1000), ("a.b/c", 1000)]);
    let text = "a.b/c=1000,cpu=1000";
    let patched = |annotation: &str, has: Value| patch(&declared, &node(annotation, has));
    let with = |extended: Value| {
        Some(json!({
            "metadata": { "annotations": { KEY: text } },
            "status": { "capacity": extended, "allocatable": extended },
        }))
    };
    // In the API server's form.
    assert_eq!(patched(text, json!({ "cpu": "1k", "a.b/c": "1k" })), None);
    assert_eq!(patched(text, json!({ "cpu": "2k", "a.b/c": "1k" })), None, "the kubelet has more");
    assert_eq!(patched("", json!({ "cpu": "1k", "a.b/c": "1k" })), with(json!({})));
    // The policy is not applied: a write of the annotation alone applies it again.
    assert_eq!(patched(text, json!({ "cpu": "1930m", "a.b/c": "1k" })), with(json!({})));
    let set = || with(json!({ "a.b/c": "1000" }));
    assert_eq!(patched(text, json!({ "cpu": "1k", "a.b/c": "0" })), set());
    assert_eq!(patched(text, json!({ "cpu": "1k", "a.b/c": "2k" })), set());
    assert_eq!(patched(text, json!({ "cpu": "1k" })), set());
    let withdrawn = patched("x.y/z=5,cpu=7", json!({ "cpu": "1k", "a.b/c": "1k", "x.y/z": "5" }));
    assert_eq!(withdrawn, with(json!({ "x.y/z": null })));
    assert_eq!(patched("x.y/z=5", json!({ "cpu": "1k", "a.b/c": "1k" })), with(json!({})));
}

/// Verifies K14.
#[test]
fn figures_that_the_node_lacks_are_named() {
    let declared = figures_of(&[("cpu", 4), ("memory", 2048), ("a.b/c", 1)]);
    let has = node("", json!({ "cpu": "4", "memory": "2097151Ki", "a.b/c": "x" }));
    assert_eq!(has.lacks(&declared), ["a.b/c=1", "memory=2048Mi"]);
    assert!(node("", json!({ "cpu": "5" })).lacks(&figures_of(&[("cpu", 4)])).is_empty());
    assert!(has.is_declared() && !Node::default().is_declared());
}

proptest! {
    /// Verifies K14.
    #[test]
    fn declared_figures_are_never_less_than_configured_or_counted(
        cpu in 1..=2000_u64, memory in 1..=1_000_000_000_u64, own in 1..=100_u64,
        milli in 0..=4_000_000_u64, bytes in 0..=1_000_000_000_000_000_u64, count in 0..=200_u64,
    ) {
        let configured = figures_of(&[("cpu", cpu), ("memory", memory), ("a.b/c", own)]);
        let pods = counted(json!({
            "cpu": format!("{milli}m"), "memory": bytes.to_string(), "a.b/c": count,
        }));
        let declared = figures(&configured, &pods);
        let amount = |name: &str| quantity(name, declared[name]).parse::<Quantity>().unwrap();
        prop_assert!(amount("cpu").milli() >= milli.max(cpu * 1000));
        prop_assert!(amount("memory").units() >= bytes.max(memory << 20));
        prop_assert!(amount("a.b/c").units() >= count.max(own));
        // A node that has the patched figures needs no other patch.
        let has: BTreeMap<_, _> =
            declared.iter().map(|(name, amount)| (name, quantity(name, *amount))).collect();
        prop_assert_eq!(patch(&declared, &node(&text(&declared), json!(has))), None);
    }
}
