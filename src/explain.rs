//! Explanation of a manifest by the daemon's own functions: where its pods go, why, and what is
//! refused.

use std::{collections::BTreeMap, fmt, sync::Arc, time::Duration};

use kiyot_config::{BackendConfig, Config, MilpaBackend, ProviderKind};
use kiyot_engine::{
    engine::StartTimes,
    placement::{self, Candidate, Catalogue, Needs, Refusals, Requested, root_volume},
    request::{CellRequest, HealthyTimeout, InstanceType, RuleProviders, keys::KEYS},
};
use kiyot_manifest::{Manifest, Node, Pod, Volume};
use kiyot_proto::{cri, text::counted};
use kiyot_values::problems::shown;
use prost::Message;

use crate::{
    annotations,
    backends::{
        BackendName, Declared,
        milpa::{self, policy},
    },
    proxy::{
        peek,
        routing::{self, Decision, Reason, RoutingError},
    },
};

mod admission;
mod choice;
mod providers;
mod requests;
mod resources;
mod variables;
mod volumes;

use requests::requests_of;

/// Limit of the facts of a pod; further facts are counted.
const MAX_FACTS: usize = 256;
/// Limit of a fact, in characters.
const MAX_FACT_CHARS: usize = 1024;
/// Bytes of headings and facts after which further pods are counted.
const MAX_TEXT_BYTES: usize = 1024 * 1024;
/// Note on runtime handlers: the manifest of a pod names a RuntimeClass, not its handler.
const NAMED_LIKE_ITS_CLASS: &str =
    "note: assumes that a RuntimeClass and its handler have one name";
/// Limit of the notes on documents without pods; further notes are counted.
const MAX_NOTES: usize = 100;

/// Explanation of a manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Explanation {
    /// The pods, in order.
    pub pods: Vec<ExplainedPod>,
    /// Notes on documents without pods.
    pub notes: Vec<String>,
}

/// Explanation of a pod, or of a workload's pods.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExplainedPod {
    /// Kind and name. Further lines describe the pods of a workload.
    pub heading: String,
    /// Facts, a line each.
    pub facts: Vec<String>,
    /// The pod would be refused.
    pub is_refused: bool,
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for ExplainedPod { heading, facts, .. } in &self.pods {
            writeln!(f, "{heading}\n  {}", facts.join("\n  "))?;
        }
        self.notes.iter().try_for_each(|note| writeln!(f, "note: {note}"))
    }
}

/// Sources of instances and prices.
#[derive(Debug, Clone, Copy)]
pub enum Prices<'a> {
    /// The built-in catalogue of the provider, or the sizes that it can make.
    BuiltIn,
    /// A catalogue for all backends.
    Catalogue(&'a Catalogue),
    /// The state of each backend of a running daemon.
    Live(&'a BTreeMap<String, LiveBackend>),
}

/// State of a backend of a running daemon.
#[derive(Debug, Clone, Default)]
pub struct LiveBackend {
    /// The state of its providers, by name.
    pub providers: BTreeMap<&'static str, Live>,
    /// The times of recent starts.
    pub starts: StartTimes,
    /// Limits, and what has used them up.
    pub limits: Vec<String>,
}

/// State of a provider of a running daemon.
#[derive(Debug, Clone, Default)]
pub struct Live {
    /// The catalogue with current prices; `None` if the provider does not return it.
    pub catalogue: Option<Arc<Catalogue>>,
    /// The reason why no pod gets an instance of any offering.
    pub refused: Option<String>,
    /// Offerings that were refused lately.
    pub refusals: Refusals,
    /// The time at which `refusals` are looked up.
    pub now: Duration,
    /// The reason why the catalogue is unknown.
    pub note: Option<String>,
}

/// Facts of a pod.
#[derive(Default)]
struct Lines {
    facts: Vec<String>,
    /// Number of further facts.
    left_out: u64,
    refused: bool,
}

impl Lines {
    fn say(&mut self, line: impl fmt::Display) {
        if self.facts.len() < MAX_FACTS {
            self.facts.push(shown(MAX_FACT_CHARS, line));
        } else {
            self.left_out += 1;
        }
    }

    fn refuse(&mut self, why: impl std::fmt::Display) {
        self.say(format_args!("refused: {why}"));
        self.refused = true;
    }
}

/// Explains all pods.
pub fn explain(config: &Config, manifest: &Manifest, prices: Prices<'_>) -> Explanation {
    explain_while(|| true, config, manifest, prices)
}

/// Explains pods while `is_wanted` returns true. After a bounded number of bytes the last entry
/// stands for all further pods.
pub fn explain_while(
    is_wanted: impl Fn() -> bool,
    config: &Config,
    manifest: &Manifest,
    prices: Prices<'_>,
) -> Explanation {
    let (mut pods, mut bytes, mut more, mut refused) = (Vec::new(), 0, 0_u64, 0_u64);
    for pod in manifest.pods.iter().take_while(|_| is_wanted()) {
        let Lines { facts, left_out, refused: is_refused } = explain_pod(config, prices, pod);
        if bytes >= MAX_TEXT_BYTES {
            more += 1;
            refused += u64::from(is_refused);
            continue;
        }
        let mut pod = ExplainedPod { heading: heading(pod), facts, is_refused };
        if left_out > 0 {
            pod.facts.push(format!("and {}", counted(left_out, "more line", "more lines")));
        }
        bytes += pod.heading.len() + pod.facts.iter().map(String::len).sum::<usize>();
        pods.push(pod);
    }
    if more > 0 {
        let facts = vec![
            format!("left out after {MAX_TEXT_BYTES} bytes: explain them in several steps"),
            format!("{refused} of them would be refused"),
        ];
        let heading = counted(more, "more pod", "more pods");
        pods.push(ExplainedPod { heading, facts, is_refused: refused > 0 });
    }
    let skipped = &manifest.skipped;
    let mut notes: Vec<_> = skipped.iter().take(MAX_NOTES).map(ToString::to_string).collect();
    if let Some(more @ 1..) = skipped.len().checked_sub(MAX_NOTES) {
        notes.push(format!("{} skipped", counted(more as u64, "more document", "more documents")));
    }
    Explanation { pods, notes }
}

/// Returns the name of a pod, or the name of its workload with the pods that the workload makes.
fn heading(pod: &Pod) -> String {
    let (namespace, name) = (&pod.metadata.namespace, &pod.metadata.name);
    let Some(workload) = &pod.workload else { return format!("Pod {namespace}/{name}") };
    let mut heading = format!("{} {namespace}/{}\n  pod: {name}", workload.kind, workload.name);
    if workload.pods != 1 {
        heading += &format!("\n  {}: {}", workload.kind.count_key(), workload.pods);
    }
    heading
}

fn explain_pod(config: &Config, prices: Prices<'_>, pod: &Pod) -> Lines {
    let mut lines = Lines::default();
    let node = node(config);
    let request = pod.run_pod_sandbox(&node, 0);
    let names: Vec<(BackendName, Declared)> = config
        .backends
        .iter()
        .map(|(name, backend)| (BackendName::new(name), declared(backend)))
        .collect();
    let declared: Vec<(&BackendName, Declared)> =
        names.iter().map(|(name, declared)| (name, *declared)).collect();
    // A loaded configuration has a node backend.
    let node_backend = BackendName::new(config.server.node_backend.as_deref().unwrap_or_default());
    let decide = |request: &cri::RunPodSandboxRequest| {
        let encoded = request.encode_to_vec();
        routing::decide(peek::Pod::run(&encoded), &declared, &config.routing, &node_backend)
    };
    let mut decided = decide(&request);
    if let Err(error @ RoutingError::ForeignHandler { handler, .. }) = &decided {
        // A RuntimeClass of another name may have a handler of the backend.
        lines.say(format_args!(
            "note: the handler of RuntimeClass {handler:?} is not known here; if it has its name, \
             the pod is refused: {error}"
        ));
        let without =
            cri::RunPodSandboxRequest { runtime_handler: String::new(), ..request.clone() };
        decided = decide(&without);
    }
    match decided {
        Err(error) => lines.refuse(&error),
        Ok(decision) => match config.backends.get(decision.backend) {
            Some(BackendConfig::Milpa(milpa)) => explain_cell(
                &mut lines,
                &Backend { config, milpa, prices, decision: &decision },
                node_backend.as_str(),
                pod,
                &node,
                &request,
            ),
            _ => {
                lines.say(format!("goes to {}: {}", decision.backend, why(&decision, pod)));
                if decision.reason == Reason::ForeignHandler {
                    lines.say(NAMED_LIKE_ITS_CLASS);
                }
                note_unused_annotations(&mut lines, pod);
            }
        },
    }
    pod.notes.iter().for_each(|note| lines.say(format_args!("note: {note}")));
    lines
}

fn node(config: &Config) -> Node {
    let mut node = Node::default();
    for backend in config.backends.values() {
        if let BackendConfig::Milpa(milpa) = backend {
            node.kubelet_dir.clone_from(&milpa.kubelet_dir);
        }
    }
    node
}

fn declared(backend: &BackendConfig) -> Declared {
    match backend {
        BackendConfig::Cri(_) => Declared::default(),
        BackendConfig::Milpa(_) => milpa::DECLARED,
    }
}

fn why(decision: &Decision<'_>, pod: &Pod) -> String {
    match decision.reason {
        Reason::TargetRuntime => format!("its annotation {} names it", routing::TARGET_RUNTIME),
        Reason::RuntimeHandler => format!(
            "it declares the runtime handler {}",
            pod.runtime_class.as_deref().unwrap_or_default()
        ),
        Reason::Rule(name) => match decision.providers() {
            None => format!("rule {name} matches first"),
            Some(providers) => {
                format!("rule {name} matches first, with providers {}", providers.names())
            }
        },
        Reason::Default => "no rule matches; this is routing.default".into(),
        Reason::ForeignHandler => format!(
            "cells do not have the runtime handler {}, and no rule with this runtime_handler \
             leads to them",
            pod.runtime_class.as_deref().unwrap_or_default()
        ),
        Reason::Malformed => "its request can't be read".into(),
    }
}

/// The backend of a pod in a cell.
#[derive(Clone, Copy)]
struct Backend<'a> {
    config: &'a Config,
    milpa: &'a MilpaBackend,
    prices: Prices<'a>,
    decision: &'a Decision<'a>,
}

/// A provider of a pod's backend.
struct Target<'a> {
    config: &'a Config,
    milpa: &'a MilpaBackend,
    prices: Prices<'a>,
    provider: ProviderKind,
    /// The providers that the pod's routing rule allows.
    rule: Option<&'a RuleProviders>,
    /// The state of the provider in a running daemon.
    live: Option<&'a Live>,
}

fn explain_cell(
    lines: &mut Lines,
    backend: &Backend<'_>,
    node_backend: &str,
    pod: &Pod,
    node: &Node,
    request: &cri::RunPodSandboxRequest,
) {
    let Backend { config, milpa, prices, decision } = *backend;
    let sandbox = request.config.clone().unwrap_or_default();
    let all_rules = policy::Rules::of(milpa);
    if let Some(what) = all_rules.iter().find_map(|rules| policy::keeps_local(rules, &sandbox)) {
        lines.say(format!("goes to {node_backend} instead of {}: it {what}", decision.backend));
        note_unused_annotations(lines, pod);
        return;
    }
    let api = config.kubernetes.reads_requests().then(|| requests_of(pod));
    let check_gpus = |request: &CellRequest| policy::check_gpus(request, api.as_ref());
    let is_valid =
        annotations::parse(&pod.metadata.annotations).is_ok_and(|it| check_gpus(&it).is_ok());
    // With several providers, the provider of the cell decides whether the pod moves.
    if let [rules] = all_rules.as_slice()
        && is_valid
        && policy::check_sandbox(rules, &sandbox).is_ok()
        && let Some(what) = reason_to_move(rules, pod, node, &sandbox)
    {
        lines.say(format!("goes to {node_backend} instead of {}: it {what}", decision.backend));
        lines.say(
            "note: its first sandbox is in a cell; the cell ends when the kubelet creates that \
             container",
        );
        note_unused_annotations(lines, pod);
        return;
    }
    lines.say(format!("goes to {}: {}", decision.backend, why(decision, pod)));
    let live = match prices {
        Prices::Live(backends) => backends.get(decision.backend),
        Prices::BuiltIn | Prices::Catalogue(_) => None,
    };
    let rule = decision.providers();
    let explained = milpa.providers.iter().zip(&all_rules).map(|(provider, rules)| {
        let live = live.and_then(|live| live.providers.get(provider.name()));
        let (provider, rule) = (*provider, rule.as_ref());
        let target = Target { config, milpa, prices, provider, rule, live };
        let mut own = Lines::default();
        let ranked = explain_in(&mut own, &target, rules, pod, node, &sandbox);
        (provider.name(), own, ranked)
    });
    let starts = live.map(|live| &live.starts);
    let within = annotations::parse(&pod.metadata.annotations).ok().and_then(|it| it.start_within);
    providers::join(lines, explained.collect(), within.map(|within| (within, starts)));
    live.into_iter().flat_map(|live| &live.limits).for_each(|limit| lines.say(limit));
    for key in annotations::unknown_keys(&pod.metadata.annotations) {
        lines.say(format!("note: unknown annotation {key}; known: {}", KEYS.join(", ")));
    }
}

/// Explains a pod in a cell of a provider. Returns the offerings in order of preference.
fn explain_in(
    lines: &mut Lines,
    target: &Target<'_>,
    rules: &policy::Rules,
    pod: &Pod,
    node: &Node,
    sandbox: &cri::PodSandboxConfig,
) -> Vec<Candidate> {
    let Target { config, milpa, prices, provider, rule, live } = *target;
    let (policy_rules, mut ranked) = (rules, Vec::new());
    let api = config.kubernetes.reads_requests().then(|| requests_of(pod));
    let check_gpus = |request: &CellRequest| policy::check_gpus(request, api.as_ref());
    match annotations::parse(&pod.metadata.annotations) {
        Ok(request) => {
            let request = CellRequest { rule: rule.cloned(), ..request };
            let rules = placement::Rules::of(milpa, provider);
            let of_cri = Requested::of_sandbox(sandbox);
            let requested = api.as_ref().map_or(of_cri, |api| of_cri.with_api(api));
            let needs = Needs::new(&request, &requested, &rules.defaults);
            describe_cell(lines, provider, &request, &needs, sandbox);
            if let Err(refused) = check_gpus(&request) {
                lines.refuse(refused);
            }
            if let Some(refused) = policy_rules.capabilities.refusal_of(&request) {
                lines.refuse(refused);
            }
            if provider == ProviderKind::Ec2 {
                // The command makes no call: the size of the image is not known.
                if let Err(refused) = root_volume::size(needs.storage_bytes, 0) {
                    lines.refuse(refused.to_string());
                }
                if let Err(refused) = milpa.ec2.check_cloud_routes(&request.cloud_routes) {
                    lines.refuse(refused.to_string());
                }
                if let Err(refused) = milpa.ec2.security_groups_with(&request.security_groups) {
                    lines.refuse(refused.to_string());
                }
            }
            if api.is_none() && request.memory_bytes.is_none() {
                let of_api = of_cri.with_api(&requests_of(pod));
                resources::note_memory_request(lines, &of_cri, &of_api);
            }
            let catalogue = live.and_then(|live| live.catalogue.as_deref());
            ranked = match (prices, live, catalogue) {
                (Prices::Catalogue(catalogue), ..) => {
                    choice::explain(lines, catalogue, &rules, &needs)
                }
                (_, Some(live), Some(catalogue)) => {
                    choice::explain_live(lines, (catalogue, live), &rules, &needs)
                }
                _ => choice::check(lines, target, &rules, &needs),
            };
            if let Some(refused) = live.and_then(|live| live.refused.as_ref()) {
                lines.refuse(refused);
            }
            live.into_iter().flat_map(|live| &live.note).for_each(|note| lines.say(note));
        }
        Err(problems) => problems.list.iter().for_each(|problem| lines.refuse(problem)),
    }
    let rules = policy_rules;
    if let Err(refusal) = policy::check_sandbox(rules, sandbox) {
        lines.refuse(refusal.to_string());
    }
    for what in policy::granted(rules, sandbox) {
        lines.say(format!("note: it {what}"));
    }
    for container in pod.all_containers() {
        let config = pod.container_config(container, node, sandbox, &container.image, 0);
        if let Err(refusal) = policy::check_container(rules, &config) {
            lines.refuse(refusal.to_string());
        }
        if let Some(what) = policy::granted_kernel_access(rules, &config) {
            lines.say(format!("note: it {what}"));
        }
        volumes::explain(lines, milpa, pod, container);
        variables::explain(lines, target, pod, container);
    }
    variables::explain_files(lines, target, pod);
    for limit in pod.volumes.iter().filter_map(Volume::limit_without_effect) {
        lines.say(format!("note: {limit}"));
    }
    resources::note(lines, pod, provider, api.is_some());
    admission::explain(lines, target, pod);
    ranked
}

/// Returns the reason why the pod moves to the node after its first sandbox in a cell. The pod
/// moves if a container requests it and no earlier container keeps running.
fn reason_to_move(
    rules: &policy::Rules,
    pod: &Pod,
    node: &Node,
    sandbox: &cri::PodSandboxConfig,
) -> Option<String> {
    let init = pod.init_containers.iter().map(|container| (container, container.always_restarts));
    let containers = init.chain(pod.containers.iter().map(|container| (container, true)));
    for (container, stays) in containers {
        let config = pod.container_config(container, node, sandbox, &container.image, 0);
        if let Some(what) = policy::moves_to_node(rules, &config) {
            return Some(what);
        }
        // A refused container never runs.
        if stays && policy::check_container(rules, &config).is_ok() {
            return None;
        }
    }
    None
}

fn describe_cell(
    lines: &mut Lines,
    provider: ProviderKind,
    request: &CellRequest,
    needs: &Needs,
    sandbox: &cri::PodSandboxConfig,
) {
    let mut wishes = vec![format!("launch type {}", request.launch_type)];
    match &request.instance_type {
        Some(InstanceType::Exact(name)) => wishes.push(format!("instance type {name}")),
        Some(InstanceType::Glob(glob)) => {
            wishes.push(format!("the cheapest fitting instance type that matches {glob}"))
        }
        None => {}
    }
    wishes.extend(request.milli_cpus.map(|milli| format!("at least {milli} milli-CPUs")));
    wishes.extend(
        request
            .memory_bytes
            .map(|bytes| format!("at least {} MiB of memory", bytes.div_ceil(1 << 20))),
    );
    wishes.extend(request.gpu.as_ref().map(ToString::to_string));
    wishes.extend(request.architecture.map(|architecture| format!("architecture {architecture}")));
    wishes.extend(request.max_price.map(|price| format!("at most {price} an hour")));
    wishes.extend(request.sustained_cpu.then(|| "all vCPUs of burstable types".to_owned()));
    wishes.extend(request.volume_size_gib.map(|gib| format!("a root volume of {gib} GiB")));
    wishes.extend((provider == ProviderKind::Ec2 && needs.storage_bytes > 0).then(|| {
        let gib = needs.storage_bytes.div_ceil(root_volume::GIB);
        format!("room for {gib} GiB of ephemeral storage on its root volume")
    }));
    wishes.extend(request.private_ip_only.then(|| "no public address".to_owned()));
    wishes.extend(
        (!request.security_groups.is_empty())
            .then(|| format!("security groups {}", request.security_groups.join(", "))),
    );
    wishes.extend(
        request.instance_profile.as_ref().map(|profile| format!("instance profile {profile}")),
    );
    wishes.extend(request.healthy_timeout.map(|timeout| match timeout {
        HealthyTimeout::Never => "no limit of its agent's silence".to_owned(),
        HealthyTimeout::After(duration) => {
            format!("its agent silent for at most {} s", duration.as_secs())
        }
    }));
    wishes.extend(request.start_within.map(|within| format!("a start within {within:?}")));
    wishes.extend((!request.cloud_routes.is_empty()).then(|| {
        let routes: Vec<String> = request.cloud_routes.iter().map(ToString::to_string).collect();
        format!("routes for {}", routes.join(", "))
    }));
    lines.say(format!("its cell: {}", wishes.join("; ")));
    if let Some(resources) = sandbox.linux.as_ref().and_then(|linux| linux.resources.as_ref()) {
        let memory = match resources.memory_limit_in_bytes {
            0 => "no memory limit".to_owned(),
            bytes => format!("at most {} MiB of memory", bytes.div_euclid(1 << 20)),
        };
        lines.say(format!("its resources: {} CPU shares; {memory}", resources.cpu_shares));
    }
    match provider {
        ProviderKind::Netns if has_wishes_for_instances(request) => {
            lines.say(
                "note: cells of the provider \"netns\" are parts of this node; annotations \
                       for instances have no effect",
            );
        }
        ProviderKind::Qemu if has_wishes_for_instances(request) => {
            lines.say(
                "note: cells of the provider \"qemu\" are virtual machines of this node; of the \
                       annotations for instances only cpu and memory have an effect",
            );
        }
        ProviderKind::Netns | ProviderKind::Qemu | ProviderKind::Ec2 => {}
    }
}

/// Returns whether an annotation chooses an instance. The limit of silence and the architecture do
/// not count, because they apply to all cells.
fn has_wishes_for_instances(request: &CellRequest) -> bool {
    let none = CellRequest {
        healthy_timeout: request.healthy_timeout,
        architecture: request.architecture,
        provider: request.provider,
        isolation: request.isolation,
        start_within: request.start_within,
        rule: request.rule.clone(),
        ..CellRequest::default()
    };
    *request != none
}

fn note_unused_annotations(lines: &mut Lines, pod: &Pod) {
    if pod.metadata.annotations.keys().any(|key| KEYS.contains(&key.as_str())) {
        lines.say("note: its annotations for cells have no effect on the node");
    }
}

#[cfg(test)]
mod tests;
