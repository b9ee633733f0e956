//! `[routing]`: rules that choose a pod's backend.

use std::collections::BTreeMap;

use kiyot_values::problems::{Field, Problem, Report, Table};

use super::{BackendConfig, ProviderKind, milpa::PROVIDERS};

const DEFAULT: &str = "containerd";

/// Choice of the backend for pods whose annotations don't choose it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Routing {
    /// Backend of pods that no rule matches.
    pub default: String,
    /// Rules, in order; the first whose conditions all match wins.
    pub rules: Vec<Rule>,
}

/// Rule. An empty or absent condition matches all pods; at least one is set.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Rule {
    /// Name for logs and `kiyot explain`.
    pub name: String,
    /// Annotations with these values.
    pub annotation: BTreeMap<String, String>,
    /// Labels with these values.
    pub label: BTreeMap<String, String>,
    /// Globs (`*`, `?`) of namespaces.
    pub namespace: Vec<String>,
    /// Runtime handler of the pod's RuntimeClass.
    pub runtime_handler: Option<String>,
    /// Matches pods of a DaemonSet, or all others.
    pub daemonset: Option<bool>,
    /// Matches static pods, which the kubelet reads from files, or all others. The TOML key is
    /// `static`.
    pub static_pod: Option<bool>,
    /// Backend of matching pods.
    pub backend: String,
    /// Providers of the cells of matching pods. Empty for all.
    pub providers: Vec<ProviderKind>,
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
            providers: table
                .take("providers")
                .map(|field| providers(field, table.report()))
                .unwrap_or_default(),
        };
        table.finish();
        rule
    }

    /// Returns the providers of the rule that its backend lacks.
    pub(super) fn absent_providers(
        &self,
        backends: &BTreeMap<String, BackendConfig>,
    ) -> impl Iterator<Item = ProviderKind> {
        let milpa = match backends.get(&self.backend) {
            Some(BackendConfig::Milpa(milpa)) => Some(milpa),
            Some(BackendConfig::Cri(_)) | None => None,
        };
        let lacks = move |it: &ProviderKind| milpa.is_some_and(|milpa| !milpa.has(*it));
        self.providers.iter().copied().filter(lacks)
    }

    /// Returns whether a condition is set.
    pub(super) fn has_condition(&self) -> bool {
        let maps =
            !self.annotation.is_empty() || !self.label.is_empty() || !self.namespace.is_empty();
        maps || self.runtime_handler.is_some()
            || self.daemonset.is_some()
            || self.static_pod.is_some()
    }
}

/// Reads a set of providers.
fn providers(field: Field<'_>, report: &Report) -> Vec<ProviderKind> {
    let (at, earlier_problems) = (field.at().to_owned(), report.len());
    let mut providers = Vec::new();
    for item in field.items() {
        let at = item.at().to_owned();
        match item.choice(PROVIDERS) {
            Some(again) if providers.contains(&again) => {
                let value = format!("{:?}", again.name());
                report.add(Problem::with_value(at, value, "is named twice; allowed: once"));
            }
            named => providers.extend(named),
        }
    }
    if providers.is_empty() && report.len() == earlier_problems {
        let rule = "is empty; allowed: one provider or more, or no key for all providers";
        report.add(Problem::new(at, rule));
    }
    providers
}
