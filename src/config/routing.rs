//! `[routing]`: which backend a pod goes to.

use std::collections::BTreeMap;

use crate::problems::Table;

const DEFAULT: &str = "containerd";

/// Which backend a pod goes to that says nothing about it itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Routing {
    /// The backend of pods that no rule is for.
    pub default: String,
    /// The first whose conditions all hold decides.
    pub rules: Vec<Rule>,
}

/// One rule. A condition that is empty or `None` always holds; there is one at least.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Rule {
    /// Its name, for logs and `kiyot explain`.
    pub name: String,
    /// Annotations that the pod has, with these values exactly.
    pub annotation: BTreeMap<String, String>,
    /// Labels that the pod has, with these values exactly.
    pub label: BTreeMap<String, String>,
    /// Globs (`*`, `?`), one of which fits the pod's namespace.
    pub namespace: Vec<String>,
    /// The pod's runtime handler (of its RuntimeClass).
    pub runtime_handler: Option<String>,
    /// Whether the pod is a DaemonSet's.
    pub daemonset: Option<bool>,
    /// Whether the pod is static: the kubelet's own, from a file. TOML key `static`.
    pub static_pod: Option<bool>,
    /// The backend that it goes to.
    pub backend: String,
}

impl Default for Routing {
    fn default() -> Self {
        Self { default: DEFAULT.into(), rules: Vec::new() }
    }
}

impl Routing {
    pub(super) fn read(mut table: Table<'_>) -> Self {
        let mut routing = Self::default();
        table.set("default", &mut routing.default, |field| field.text());
        table.set("rule", &mut routing.rules, |field| {
            Some(
                field.items().into_iter().filter_map(|item| item.table()).map(Rule::read).collect(),
            )
        });
        table.finish();
        routing
    }
}

impl Rule {
    fn read(mut table: Table<'_>) -> Self {
        let rule = Self {
            name: table
                .need("name", "a text, its own among the rules")
                .and_then(|field| field.text())
                .unwrap_or_default(),
            annotation: table
                .take("annotation")
                .map(|field| field.text_entries())
                .unwrap_or_default(),
            label: table.take("label").map(|field| field.text_entries()).unwrap_or_default(),
            namespace: table.take("namespace").map(|field| field.texts()).unwrap_or_default(),
            runtime_handler: table.take("runtime_handler").and_then(|field| field.text()),
            daemonset: table.take("daemonset").and_then(|field| field.flag()),
            static_pod: table.take("static").and_then(|field| field.flag()),
            backend: table
                .need("backend", "the name of a backend")
                .and_then(|field| field.text())
                .unwrap_or_default(),
        };
        table.finish();
        rule
    }

    /// Whether it has a condition at all.
    pub(super) fn has_condition(&self) -> bool {
        let maps =
            !self.annotation.is_empty() || !self.label.is_empty() || !self.namespace.is_empty();
        maps || self.runtime_handler.is_some()
            || self.daemonset.is_some()
            || self.static_pod.is_some()
    }
}
