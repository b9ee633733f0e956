//! Routing rules: each condition by itself, and precedence.

use kiyot::backends::Method;
use kiyot_config::{ProviderKind, Routing, Rule, Server};
use kiyot_proto::cri;
use prost::Message;
use tonic::Code;

use crate::{caller::Caller, fake_runtime::FakeRuntime, server::Setup};

const TARGET: &str = "kubernetes.io/target-runtime";
const SOURCE: &str = "kubernetes.io/config.source";

/// A rule with one condition, a pod that matches, and a pod that doesn't.
struct Case {
    rule: Rule,
    fits: Sandbox,
    fits_not: Vec<Sandbox>,
}

#[derive(Debug, Clone, Default)]
struct Sandbox {
    namespace: &'static str,
    labels: &'static [(&'static str, &'static str)],
    annotations: &'static [(&'static str, &'static str)],
    handler: &'static str,
}

impl Sandbox {
    fn encoded(&self) -> Vec<u8> {
        let owned = |pairs: &[(&str, &str)]| {
            pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
        };
        let metadata = Some(cri::PodSandboxMetadata {
            namespace: self.namespace.into(),
            ..Default::default()
        });
        let config = cri::PodSandboxConfig {
            metadata,
            labels: owned(self.labels),
            annotations: owned(self.annotations),
            ..Default::default()
        };
        cri::RunPodSandboxRequest { config: Some(config), runtime_handler: self.handler.into() }
            .encode_to_vec()
    }

    /// Returns whether the pod is routed to a cell.
    async fn is_in_a_cell(&self, caller: &Caller) -> bool {
        match caller.call(Method::RunPodSandbox, &self.encoded()).await.ok() {
            b"cells: RunPodSandbox" => true,
            b"answer to RunPodSandbox" => false,
            other => panic!("{self:?}: {other:?}"),
        }
    }
}

fn pod() -> Sandbox {
    Sandbox { namespace: "a", ..Sandbox::default() }
}

fn labelled(labels: &'static [(&'static str, &'static str)]) -> Sandbox {
    Sandbox { labels, ..pod() }
}

fn annotated(annotations: &'static [(&'static str, &'static str)]) -> Sandbox {
    Sandbox { annotations, ..pod() }
}

const OF_DAEMONSET: &[(&str, &str)] =
    &[("controller-revision-hash", "5d8c"), ("pod-template-generation", "1")];

fn cases() -> Vec<Case> {
    let rule = || Rule { name: "to cells".into(), backend: "cells".into(), ..Rule::default() };
    let pairs = |key: &str, value: &str| [(key.to_owned(), value.to_owned())].into();
    vec![
        Case {
            rule: Rule { annotation: pairs("example.org/burst", "yes"), ..rule() },
            fits: annotated(&[("other", "no"), ("example.org/burst", "yes")]),
            fits_not: vec![
                pod(),
                annotated(&[("example.org/burst", "no")]),
                annotated(&[("yes", "example.org/burst")]),
                labelled(&[("example.org/burst", "yes")]),
            ],
        },
        Case {
            rule: Rule {
                annotation: [("x".to_owned(), "1".to_owned()), ("y".to_owned(), "2".to_owned())]
                    .into(),
                ..rule()
            },
            fits: annotated(&[("y", "2"), ("x", "1")]),
            fits_not: vec![
                annotated(&[("x", "1")]),
                annotated(&[("y", "2")]),
                annotated(&[("x", "1"), ("y", "1")]),
            ],
        },
        Case {
            rule: Rule { label: pairs("tier", "batch"), ..rule() },
            fits: labelled(&[("tier", "batch")]),
            fits_not: vec![pod(), labelled(&[("tier", "web")]), annotated(&[("tier", "batch")])],
        },
        Case {
            rule: Rule {
                namespace: vec!["batch-*".into(), "ci".into(), "team-?".into()],
                ..rule()
            },
            fits: Sandbox { namespace: "ci", ..pod() },
            fits_not: vec![
                pod(),
                Sandbox { namespace: "ci-2", ..pod() },
                Sandbox { namespace: "team-10", ..pod() },
                Sandbox { namespace: "", ..pod() },
            ],
        },
        Case {
            rule: Rule {
                namespace: vec!["batch-*".into(), "ci".into(), "team-?".into()],
                ..rule()
            },
            fits: Sandbox { namespace: "batch-nightly", ..pod() },
            fits_not: vec![
                Sandbox { namespace: "batch", ..pod() },
                Sandbox { namespace: "my-batch-1", ..pod() },
            ],
        },
        Case {
            rule: Rule { runtime_handler: Some("gvisor".into()), ..rule() },
            fits: Sandbox { handler: "gvisor", ..pod() },
            fits_not: vec![pod(), Sandbox { handler: "runc", ..pod() }],
        },
        Case {
            rule: Rule { runtime_handler: Some(String::new()), ..rule() },
            fits: pod(),
            fits_not: vec![Sandbox { handler: "runc", ..pod() }],
        },
        Case {
            rule: Rule { daemonset: Some(true), ..rule() },
            fits: labelled(OF_DAEMONSET),
            fits_not: vec![
                pod(),
                labelled(&[("controller-revision-hash", "5d8c")]),
                annotated(OF_DAEMONSET),
            ],
        },
        Case {
            rule: Rule { daemonset: Some(false), ..rule() },
            fits: pod(),
            fits_not: vec![labelled(OF_DAEMONSET)],
        },
        Case {
            rule: Rule { static_pod: Some(true), ..rule() },
            fits: annotated(&[(SOURCE, "file")]),
            fits_not: vec![pod(), annotated(&[(SOURCE, "api")]), labelled(&[(SOURCE, "file")])],
        },
        Case {
            rule: Rule { static_pod: Some(false), ..rule() },
            fits: annotated(&[(SOURCE, "api")]),
            fits_not: vec![annotated(&[(SOURCE, "file")]), annotated(&[(SOURCE, "http")])],
        },
    ]
}

/// Verifies R7.
#[tokio::test(flavor = "multi_thread")]
async fn each_condition_of_a_rule_decides() {
    for Case { rule, fits, fits_not } in cases() {
        let routing = Routing { default: "containerd".into(), rules: vec![rule.clone()] };
        let server = Setup { routing, ..Setup::default() }.start();
        let _runtime = FakeRuntime::named(&server.containerd());
        let caller = server.caller().await;
        assert!(fits.is_in_a_cell(&caller).await, "{rule:?} is for {fits:?}");
        for other in fits_not {
            assert!(!other.is_in_a_cell(&caller).await, "{rule:?} is not for {other:?}");
        }
    }
}

/// Verifies R7.
#[tokio::test(flavor = "multi_thread")]
async fn rules_apply_after_the_request_of_a_pod_and_before_the_default() {
    let stays = |name: &str, namespace: &str| Rule {
        name: name.into(),
        namespace: vec![namespace.into()],
        backend: "containerd".into(),
        ..Rule::default()
    };
    let goes = Rule {
        name: "go".into(),
        namespace: vec!["*".into()],
        backend: "cells".into(),
        ..Rule::default()
    };
    let routing = Routing {
        default: "cells".into(),
        rules: vec![stays("stay", "system"), goes, stays("too late", "*")],
    };
    let server = Setup { routing, ..Setup::default() }.start();
    let _runtime = FakeRuntime::named(&server.containerd());
    let caller = server.caller().await;
    let system = || Sandbox { namespace: "system", ..pod() };
    assert!(!system().is_in_a_cell(&caller).await);
    assert!(pod().is_in_a_cell(&caller).await, "the first rule that matches decides");
    assert!(Sandbox { annotations: &[(TARGET, "kiyot")], ..system() }.is_in_a_cell(&caller).await);
    assert!(Sandbox { handler: "kiyot", ..system() }.is_in_a_cell(&caller).await);
    // An undeclared target runtime is refused with every handler.
    for handler in ["kiyot", "runc", ""] {
        let odd = Sandbox { annotations: &[(TARGET, "virtlet")], handler, ..system() };
        let refused = caller.call(Method::RunPodSandbox, &odd.encoded()).await;
        assert_eq!(refused.code(), Code::InvalidArgument as i32, "{odd:?}");
        assert!(
            refused.message().contains("virtlet") && refused.message().contains("\"kiyot\""),
            "{}",
            refused.message()
        );
    }
    // A handler that no backend declares goes to no cell.
    let foreign = || Sandbox { handler: "gvisor", ..pod() };
    assert!(!foreign().is_in_a_cell(&caller).await);
    let both = Sandbox { annotations: &[(TARGET, "kiyot")], ..foreign() };
    let refused = caller.call(Method::RunPodSandbox, &both.encoded()).await;
    assert_eq!(refused.code(), Code::InvalidArgument as i32);
    assert!(
        refused.message().contains("\"gvisor\"") && refused.message().contains("\"kiyot\""),
        "{}",
        refused.message()
    );
}

/// Verifies A37, R4.
#[tokio::test(flavor = "multi_thread")]
async fn providers_of_a_rule_reach_the_cells_until_a_reload_changes_them() {
    let routing = |providers: &[ProviderKind]| Routing {
        default: "containerd".into(),
        rules: vec![Rule {
            name: "go".into(),
            namespace: vec!["a".into()],
            backend: "cells".into(),
            providers: providers.to_vec(),
            ..Rule::default()
        }],
    };
    let setup = Setup { routing: routing(&[ProviderKind::Ec2]), ..Setup::default() };
    let server = setup.start();
    let caller = server.caller().await;
    for (providers, answer) in [
        (&[ProviderKind::Ec2][..], "routing rule \"go\" allows \"ec2\""),
        (
            &[ProviderKind::Netns, ProviderKind::Ec2],
            "routing rule \"go\" allows \"netns\" or \"ec2\"",
        ),
        (&[], "cells: RunPodSandbox"),
    ] {
        server.running.settings.replace(&Server::default(), routing(providers));
        let answered = caller.call(Method::RunPodSandbox, &pod().encoded()).await;
        assert_eq!(answered.ok(), answer.as_bytes());
    }
}
