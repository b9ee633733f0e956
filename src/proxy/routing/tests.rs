use kiyot_config::ProviderKind;
use kiyot_proto::cri;
use proptest::prelude::*;
use prost::Message;

use super::*;

#[derive(Debug, Clone, Default)]
struct Sandbox {
    namespace: String,
    labels: Vec<(&'static str, String)>,
    annotations: Vec<(&'static str, String)>,
    handler: String,
}

impl Sandbox {
    fn encoded(&self) -> Vec<u8> {
        let owned = |entries: &[(&str, String)]| {
            entries.iter().map(|(key, value)| (key.to_string(), value.clone())).collect()
        };
        let metadata = Some(cri::PodSandboxMetadata {
            namespace: self.namespace.clone(),
            ..Default::default()
        });
        let config = cri::PodSandboxConfig {
            metadata,
            labels: owned(&self.labels),
            annotations: owned(&self.annotations),
            ..Default::default()
        };
        cri::RunPodSandboxRequest { config: Some(config), runtime_handler: self.handler.clone() }
            .encode_to_vec()
    }
}

const KIYOT: Declared = Declared { target_runtimes: &["kiyot"], runtime_handlers: &["kiyot"] };

fn decided(sandbox: &Sandbox, routing: &Routing) -> Result<String, RoutingError> {
    let (node, cells) = (BackendName::new("containerd"), BackendName::new("cells"));
    let declared = [(&cells, KIYOT), (&node, Declared::default())];
    decide(Pod::run(&sandbox.encoded()), &declared, routing, &node)
        .map(|decision| format!("{} {:?}", decision.backend, decision.reason))
}

fn routing(rules: Vec<Rule>) -> Routing {
    Routing { default: "containerd".into(), rules }
}

fn routing_to_cells(rules: Vec<Rule>) -> Routing {
    Routing { default: "cells".into(), rules }
}

/// Verifies A37.
#[test]
fn rule_limits_the_providers_only_if_it_decides() {
    let narrow = Rule {
        namespace: vec!["batch".into()],
        providers: vec![ProviderKind::Ec2],
        ..rule("cells")
    };
    let routing = routing(vec![narrow, rule("cells")]);
    let providers = |sandbox: &Sandbox| {
        let (node, cells) = (BackendName::new("containerd"), BackendName::new("cells"));
        let declared = [(&cells, KIYOT), (&node, Declared::default())];
        let decision = decide(Pod::run(&sandbox.encoded()), &declared, &routing, &node).unwrap();
        decision.providers().map(|it| it.to_string())
    };
    let batch = Sandbox { namespace: "batch".into(), ..Default::default() };
    let allows = "routing rule \"to cells\" allows \"ec2\"";
    assert_eq!(providers(&batch).as_deref(), Some(allows));
    assert_eq!(providers(&Sandbox::default()), None);
    // No rule limits a pod that requests cells itself.
    let annotations = vec![(TARGET_RUNTIME, "kiyot".into())];
    assert_eq!(providers(&Sandbox { annotations, ..batch.clone() }), None);
    assert_eq!(providers(&Sandbox { handler: "kiyot".into(), ..batch }), None);
}

/// A pod whose runtime handler no backend declares, with an annotation if `target` has text.
fn foreign(target: &str) -> Sandbox {
    let annotations =
        if target.is_empty() { vec![] } else { vec![(TARGET_RUNTIME, target.to_owned())] };
    Sandbox { annotations, handler: "gvisor".into(), ..Default::default() }
}

fn rule_for_gvisor(backend: &str) -> Rule {
    Rule { runtime_handler: Some("gvisor".into()), ..rule(backend) }
}

fn rule(backend: &str) -> Rule {
    Rule { name: format!("to {backend}"), backend: backend.into(), ..Rule::default() }
}

#[test]
fn pod_without_annotations_goes_to_the_default() {
    assert_eq!(decided(&Sandbox::default(), &routing(vec![])).unwrap(), "containerd Default");
}

#[test]
fn declared_target_runtime_wins_over_handler_and_rules() {
    let sandbox = Sandbox {
        annotations: vec![(TARGET_RUNTIME, "kiyot".into())],
        handler: "kiyot".into(),
        ..Default::default()
    };
    assert_eq!(
        decided(&sandbox, &routing(vec![rule("containerd")])).unwrap(),
        "cells TargetRuntime"
    );
}

/// Verifies R7.
#[test]
fn foreign_handler_contradicts_an_annotation_that_leads_to_cells() {
    let to_vm = Rule {
        annotation: [(TARGET_RUNTIME.to_string(), "vm".to_string())].into(),
        ..rule("cells")
    };
    for (target, rules) in [
        ("kiyot", vec![]),
        ("kiyot", vec![rule("cells"), rule_for_gvisor("containerd")]),
        ("vm", vec![to_vm]),
    ] {
        let refused = decided(&foreign(target), &routing_to_cells(rules)).unwrap_err().to_string();
        let expected = format!(
            "annotation kubernetes.io/target-runtime with the value {target:?} leads to backend \
             \"cells\", which does not declare the runtime handler \"gvisor\"; allowed: the \
             annotation alone, the handler alone, the handler \"kiyot\", or a rule with \
             runtime_handler = \"gvisor\" to the backend"
        );
        assert_eq!(refused, expected);
    }
    // A rule with the handler does not lead to cells if another condition fails.
    let elsewhere = Rule { namespace: vec!["other".into()], ..rule_for_gvisor("cells") };
    assert!(decided(&foreign("kiyot"), &routing(vec![elsewhere])).is_err());
}

/// Verifies R7.
#[test]
fn rule_with_a_foreign_handler_leads_to_cells() {
    for target in ["", "kiyot"] {
        let rules = vec![rule_for_gvisor("cells")];
        let decision = decided(&foreign(target), &routing(rules)).unwrap();
        assert_eq!(decision, r#"cells Rule("to cells")"#, "{target:?}");
    }
}

/// Verifies R7.
#[test]
fn foreign_handler_skips_other_rules_and_the_default_that_lead_to_cells() {
    let cases = [
        (routing_to_cells(vec![]), "containerd ForeignHandler"),
        (routing_to_cells(vec![rule("cells")]), "containerd ForeignHandler"),
        (routing(vec![rule("cells")]), "containerd ForeignHandler"),
        (routing(vec![]), "containerd Default"),
        (routing(vec![rule("cells"), rule("containerd")]), r#"containerd Rule("to containerd")"#),
    ];
    for (routing, expected) in cases {
        assert_eq!(decided(&foreign(""), &routing).unwrap(), expected, "{routing:?}");
    }
    // Without a handler the same rules and default lead to cells.
    let plain = Sandbox::default();
    assert_eq!(decided(&plain, &routing_to_cells(vec![])).unwrap(), "cells Default");
}

/// Verifies R7.
#[test]
fn default_that_is_another_container_runtime_gets_foreign_handlers() {
    let [node, cells, second] = ["containerd", "cells", "second"].map(BackendName::new);
    let declared = [(&cells, KIYOT), (&node, Declared::default()), (&second, Declared::default())];
    let routing = Routing { default: "second".into(), rules: vec![rule("cells")] };
    let sandbox = foreign("").encoded();
    let decision = decide(Pod::run(&sandbox), &declared, &routing, &node).unwrap();
    assert_eq!(decision, Decision::new("second", Reason::ForeignHandler));
}

#[test]
fn declared_handler_wins_over_rules() {
    let sandbox = Sandbox { handler: "kiyot".into(), ..Default::default() };
    assert_eq!(
        decided(&sandbox, &routing(vec![rule("containerd")])).unwrap(),
        "cells RuntimeHandler"
    );
}

#[test]
fn undeclared_target_runtime_is_refused_with_the_allowed_values() {
    let sandbox =
        Sandbox { annotations: vec![(TARGET_RUNTIME, "kiyott".into())], ..Default::default() };
    let refused = decided(&sandbox, &routing(vec![rule("cells")])).unwrap_err();
    assert_eq!(
        refused.to_string(),
        r#"annotation kubernetes.io/target-runtime has the value "kiyott"; allowed is "kiyot""#
    );
    let empty =
        Sandbox { annotations: vec![(TARGET_RUNTIME, String::new())], ..Default::default() };
    assert!(decided(&empty, &routing(vec![])).is_err());
}

#[test]
fn target_runtime_of_a_rule_is_declared() {
    let by_value = Rule {
        annotation: [(TARGET_RUNTIME.to_string(), "vm".to_string())].into(),
        ..rule("cells")
    };
    let sandbox =
        Sandbox { annotations: vec![(TARGET_RUNTIME, "vm".into())], ..Default::default() };
    assert_eq!(
        decided(&sandbox, &routing(vec![by_value.clone()])).unwrap(),
        r#"cells Rule("to cells")"#
    );
    let other = Sandbox { annotations: vec![(TARGET_RUNTIME, "wm".into())], ..Default::default() };
    assert!(
        decided(&other, &routing(vec![by_value]))
            .unwrap_err()
            .to_string()
            .ends_with(r#"allowed is "kiyot" or "vm""#)
    );
}

#[test]
fn target_runtime_without_any_declaration_is_refused() {
    let node = BackendName::new("containerd");
    let sandbox =
        Sandbox { annotations: vec![(TARGET_RUNTIME, "kiyot".into())], ..Default::default() }
            .encoded();
    let routing = routing(vec![]);
    let refused =
        decide(Pod::run(&sandbox), &[(&node, Declared::default())], &routing, &node).unwrap_err();
    assert!(refused.to_string().contains("no backend declares one"), "{refused}");
}

#[test]
fn rule_matches_if_all_its_conditions_match() {
    let narrow = Rule {
        namespace: vec!["team-*".into()],
        label: [("tier".to_string(), "batch".to_string())].into(),
        ..rule("cells")
    };
    let mut sandbox = Sandbox { namespace: "team-a".into(), ..Default::default() };
    assert_eq!(decided(&sandbox, &routing(vec![narrow.clone()])).unwrap(), "containerd Default");
    sandbox.labels.push(("tier", "batch".into()));
    assert_eq!(
        decided(&sandbox, &routing(vec![narrow.clone()])).unwrap(),
        r#"cells Rule("to cells")"#
    );
    sandbox.namespace = "other".into();
    assert_eq!(decided(&sandbox, &routing(vec![narrow])).unwrap(), "containerd Default");
}

#[test]
fn daemonset_and_static_pods_are_known_by_their_labels_and_annotations() {
    let daemonset = Rule { daemonset: Some(true), ..rule("cells") };
    let of_daemonset = Sandbox {
        labels: vec![
            ("controller-revision-hash", "x".into()),
            ("pod-template-generation", "1".into()),
        ],
        ..Default::default()
    };
    let of_stateful_set =
        Sandbox { labels: vec![("controller-revision-hash", "x".into())], ..Default::default() };
    assert!(
        decided(&of_daemonset, &routing(vec![daemonset.clone()])).unwrap().starts_with("cells")
    );
    assert!(
        decided(&of_stateful_set, &routing(vec![daemonset])).unwrap().starts_with("containerd")
    );

    let is_static = Rule { static_pod: Some(true), ..rule("cells") };
    for (source, expected) in [("file", "cells"), ("http", "cells"), ("api", "containerd")] {
        let sandbox =
            Sandbox { annotations: vec![(CONFIG_SOURCE, source.into())], ..Default::default() };
        assert!(
            decided(&sandbox, &routing(vec![is_static.clone()])).unwrap().starts_with(expected),
            "{source}"
        );
    }
    assert!(
        decided(&Sandbox::default(), &routing(vec![is_static])).unwrap().starts_with("containerd")
    );
}

#[test]
fn malformed_request_goes_to_the_node() {
    let (node, cells) = (BackendName::new("containerd"), BackendName::new("cells"));
    let routing = Routing { default: "cells".into(), rules: vec![] };
    let decision = decide(Pod::run(&[0xff; 12]), &[(&cells, KIYOT)], &routing, &node).unwrap();
    assert_eq!(decision, Decision::new("containerd", Reason::Malformed));
}

fn any_rule() -> impl Strategy<Value = Rule> {
    let conditions = (
        proptest::option::of("[ab]"),
        proptest::collection::vec("[ab*]{1,2}", 0..3),
        proptest::option::of("[rx]"),
        proptest::option::of(any::<bool>()),
        proptest::option::of(any::<bool>()),
    );
    (conditions, "(cells|containerd)").prop_map(
        |((label, namespace, runtime_handler, daemonset, static_pod), backend)| Rule {
            label: label.into_iter().map(|value| ("l".to_string(), value)).collect(),
            namespace,
            runtime_handler,
            daemonset,
            static_pod,
            ..rule(&backend)
        },
    )
}

proptest! {
    /// Verifies R7.
    #[test]
    fn first_matching_rule_decides(
        rules in proptest::collection::vec(any_rule(), 0..6),
        namespace in "[ab]{0,2}",
        label in "[ab]",
        handler in "([rx]|kiyot)?",
        of_file in any::<bool>(),
        goes in any::<bool>(),
    ) {
        let labels = vec![("l", label)];
        let mut sandbox = Sandbox { namespace, labels, annotations: vec![], handler };
        if of_file {
            sandbox.annotations.push((CONFIG_SOURCE, "file".into()));
        }
        let encoded = sandbox.encoded();
        let declared = sandbox.handler == "kiyot";
        let is_foreign = !sandbox.handler.is_empty() && !declared;
        let first = rules.iter().find(|rule| {
            let names_handler = rule.runtime_handler.as_ref() == Some(&sandbox.handler);
            matches(rule, Pod::run(&encoded)).unwrap()
                && (rule.backend != "cells" || names_handler || !is_foreign)
        });
        let default = if goes && !is_foreign { "cells" } else { "containerd" };
        let expected = match first {
            _ if declared => "cells",
            Some(rule) => &rule.backend,
            None => default,
        };
        let routing_of = |rules| if goes { routing_to_cells(rules) } else { routing(rules) };
        let decision = decided(&sandbox, &routing_of(rules.clone())).unwrap();
        prop_assert!(decision.starts_with(expected), "{decision}");
        // A further rule at the end changes nothing for a pod that a rule matches.
        if !decision.ends_with("Default") {
            let mut more = rules;
            more.push(rule("cells"));
            prop_assert_eq!(decided(&sandbox, &routing_of(more)).unwrap(), decision);
        }
    }
}
