//! The plan of a call: the backends that answer it.

use std::sync::Arc;

use bytes::Bytes;
use kiyot_config::Routing;
use kiyot_engine::request::RuleProviders;
use tonic::Status;
use tracing::Span;

use super::{
    id_cache::RuntimeIndex,
    methods::Route,
    peek::{self, Pod},
    routing,
    server_state::{ServerState, Settings},
};
use crate::{
    backends::{CallPath, DecodedBackend, Method, cri::Upstream, registry::Registry},
    metrics::{BACKEND_ALL, BACKEND_KIYOT, FIRST_BACKEND},
};

/// The backends that answer a call, and how their responses are used.
pub(super) enum Plan<'a> {
    /// Forwarded to a container runtime.
    Forward(&'a Upstream),
    /// Forwarded to one of several container runtimes. The new id in its response is learned.
    ForwardAndLearn(RuntimeIndex),
    /// Forwarded to the container runtime that has this id, found by asking all.
    FindRuntime(String),
    /// Answered by a decoded backend.
    Decoded(&'a Arc<dyn DecodedBackend>),
    /// `RunPodSandbox` of a pod whose rule bounds its providers, answered by a decoded backend.
    RunByRule(&'a Arc<dyn DecodedBackend>, RuleProviders),
    /// Forwarded to the node backend with this message instead.
    NodeInstead(Bytes),
    /// A list of all backends.
    List,
    /// The metrics of all backends.
    Metrics,
    /// The events of all backends.
    Events,
    /// The node's status with all runtime handlers.
    Status,
    /// Forwarded to the node backend. If the node lacks the image, the answer is this response.
    /// Without this response, decoded backends answer.
    NodeImage(Option<Bytes>),
    /// Answered by this response.
    Respond(Bytes),
    /// Refused.
    Refuse(Status),
}

impl Plan<'_> {
    /// Returns the plan's name in the log.
    const fn name(&self) -> &'static str {
        match self {
            Self::Forward(_) => "forward",
            Self::ForwardAndLearn(_) => "forward_and_learn",
            Self::FindRuntime(_) => "find_runtime",
            Self::Decoded(_) => "decoded",
            Self::RunByRule(..) => "run_by_rule",
            Self::NodeInstead(_) => "node_instead",
            Self::List => "list",
            Self::Metrics => "metrics",
            Self::Events => "events",
            Self::Status => "status",
            Self::NodeImage(_) => "node_image",
            Self::Respond(_) => "respond",
            Self::Refuse(_) => "refuse",
        }
    }

    /// Returns the index of the backend by which the call is counted. The container runtimes come
    /// first, by their index, then the decoded backends ([`Registry::names`]).
    pub(super) fn backend_label(&self, registry: &Registry) -> u8 {
        let label = |index: usize| {
            u8::try_from(index).map_or(BACKEND_KIYOT, |index| index.saturating_add(FIRST_BACKEND))
        };
        match self {
            Self::Forward(upstream) => label(registry.index_of_upstream(upstream)),
            Self::ForwardAndLearn(index) => label(*index),
            Self::NodeInstead(_) | Self::Status | Self::NodeImage(_) => FIRST_BACKEND,
            Self::Decoded(backend) | Self::RunByRule(backend, _) => {
                label(registry.index_of_decoded(backend))
            }
            Self::FindRuntime(_) | Self::List | Self::Metrics | Self::Events => BACKEND_ALL,
            Self::Respond(_) | Self::Refuse(_) => BACKEND_KIYOT,
        }
    }

    /// Records the plan, and the id by which the call is routed, in the call's span.
    pub(super) fn record(&self, span: &Span, route: Route, message: &[u8]) {
        if span.is_disabled() {
            return;
        }
        span.record("plan", self.name());
        let paths = match route {
            Route::ById(path) => &[path],
            Route::List(paths) => paths,
            _ => &[][..],
        };
        let mut ids = paths.iter().filter_map(|path| peek::string(message, path).ok());
        if let Some(id) = ids.find(|id| !id.is_empty()) {
            span.record("id", id);
        }
    }
}

/// Plans a call.
pub(super) fn for_call<'a>(
    server: &'a ServerState,
    settings: &Settings,
    method: Method,
    route: Route,
    message: &[u8],
) -> Plan<'a> {
    let registry = &server.registry;
    // A malformed id is left to the node backend, whose error the caller gets.
    let id = |path| peek::string(message, path).unwrap_or_default();
    let owner = |path| registry.by_id(id(path));
    match route {
        Route::Node => Plan::Forward(registry.node()),
        Route::Run => for_sandbox(server, &settings.routing, method, Pod::run(message)),
        Route::Restore => for_sandbox(server, &settings.routing, method, Pod::restore(message)),
        Route::ById(path) => {
            owner(path).map_or_else(|| for_id(server, method, id(path)), Plan::Decoded)
        }
        Route::List(paths) => match paths.iter().find_map(|path| owner(path)) {
            Some(backend) => Plan::Decoded(backend),
            // The owner of the id answers alone, so that other runtimes may be down.
            None if registry.has_several_runtimes() => {
                let known = |path: &&[u32]| {
                    server.id_cache.runtime_of_id(peek::string(message, path).ok()?)
                };
                let index = paths.iter().find_map(known);
                index.map_or(Plan::List, |index| Plan::Forward(registry.upstream(index)))
            }
            None => Plan::List,
        },
        Route::Metrics => Plan::Metrics,
        Route::Events => Plan::Events,
        Route::Status => Plan::Status,
        Route::PullImage => registry
            .decoded()
            .find(|backend| backend.owns_image(method, message))
            .map_or_else(|| for_image(server, method, message), Plan::Decoded),
        Route::ImageStatus => {
            match registry.decoded().find(|backend| backend.owns_image(method, message)) {
                Some(backend) => Plan::Decoded(backend),
                // ImageSpec.annotations are the pod's. Without them the pod is unknown.
                None if matches!(peek::bytes(message, &[1, 2]), Ok(None)) => Plan::NodeImage(None),
                None if server.id_cache.has_runtime_annotations(message) => {
                    for_image(server, method, message)
                }
                None => for_unmatched_image(server, method, message),
            }
        }
        Route::WholeNodeOnly => Plan::Refuse(whole_node_only(method.name())),
    }
}

/// Returns the status of a call whose response would lack the pods of other backends.
pub(super) fn whole_node_only(method: &str) -> Status {
    Status::unimplemented(format!(
        "{method} is not supported with several backends; allowed: the list methods"
    ))
}

/// Plans a call by the id of a container runtime.
fn for_id<'a>(server: &'a ServerState, method: Method, id: &str) -> Plan<'a> {
    if !server.registry.has_several_runtimes() || id.is_empty() {
        return Plan::Forward(server.registry.node());
    }
    match server.id_cache.runtime_of_id(id) {
        Some(index) => for_runtime(server, method, index),
        None => Plan::FindRuntime(id.to_owned()),
    }
}

/// Plans an image call: the runtime of the image's pod answers, or the node if the pod is unknown.
fn for_image<'a>(server: &'a ServerState, method: Method, message: &[u8]) -> Plan<'a> {
    let registry = &server.registry;
    let index = if registry.has_several_runtimes() {
        server.id_cache.runtime_of_image(method, message)
    } else {
        None
    };
    Plan::Forward(index.map_or_else(|| registry.node(), |index| registry.upstream(index)))
}

/// Plans an `ImageStatus` whose annotations match no known pod, as after a restart of the kubelet.
///
/// If the annotations resemble those of pods in cells and request a cell, the image of these pods
/// is the response. If they don't request a cell, the pod may be on the node, which answers first.
fn for_unmatched_image<'a>(server: &'a ServerState, method: Method, message: &[u8]) -> Plan<'a> {
    let registry = &server.registry;
    let Some(response) = registry.decoded().find_map(|backend| backend.image_of_pods_like(message))
    else {
        return for_image(server, method, message);
    };
    let target = peek::map_value(message, &[1, 2], routing::TARGET_RUNTIME).ok().flatten();
    // ImageSpec.runtime_handler
    let handler = peek::string(message, &[1, 19]).unwrap_or_default();
    let requests_decoded = registry.declared().into_iter().any(|(name, declared)| {
        let is_requested = target.is_some_and(|target| declared.target_runtimes.contains(&target))
            || declared.runtime_handlers.contains(&handler);
        let path = registry.get(name.as_str()).map(|backend| backend.path());
        is_requested && matches!(path, Some(CallPath::Decoded(_)))
    });
    if requests_decoded { Plan::Respond(response) } else { Plan::NodeImage(Some(response)) }
}

/// Plans a call to a container runtime. With several runtimes, new ids in responses are learned.
pub(super) fn for_runtime(server: &ServerState, method: Method, index: RuntimeIndex) -> Plan<'_> {
    let makes_an_id =
        matches!(method, Method::RunPodSandbox | Method::RestorePod | Method::CreateContainer);
    if makes_an_id && server.registry.has_several_runtimes() {
        Plan::ForwardAndLearn(index)
    } else {
        Plan::Forward(server.registry.upstream(index))
    }
}

/// Plans `RunPodSandbox` and `RestorePod` by the routing decision.
fn for_sandbox<'a>(
    server: &'a ServerState,
    routing: &Routing,
    method: Method,
    pod: Pod<'_>,
) -> Plan<'a> {
    let registry = &server.registry;
    let decision = match routing::decide(pod, &registry.declared(), routing, registry.node_name()) {
        Ok(decision) => decision,
        Err(error) => return Plan::Refuse(Status::invalid_argument(error.to_string())),
    };
    let backend = decision.backend;
    let (namespace, name) = (pod.namespace().unwrap_or_default(), pod.name().unwrap_or_default());
    tracing::info!(namespace, name, backend, reason = ?decision.reason, "pod sandbox routed");
    match registry.get(backend).map(|backend| backend.path()) {
        // Each container runtime has an index.
        Some(CallPath::Raw(_)) => {
            for_runtime(server, method, registry.index_of(backend).unwrap_or_default())
        }
        Some(CallPath::Decoded(decoded)) => match decoded.leaves_to_node(&pod.to_run_request()) {
            None if method == Method::RestorePod => Plan::Refuse(Status::unimplemented(format!(
                "{method} is unsupported for pods in cells: the pod is routed to {backend:?}; \
                 allowed: a pod of a container runtime"
            ))),
            None => match decision.providers() {
                None => Plan::Decoded(decoded),
                Some(providers) => Plan::RunByRule(decoded, providers),
            },
            Some(reason) => {
                let node = registry.node_name();
                tracing::info!(
                    namespace,
                    name,
                    backend = %node,
                    instead_of = backend,
                    reason,
                    "pod sandbox stays on the node"
                );
                for_node_pod(server, method, pod)
            }
        },
        None => Plan::Refuse(Status::failed_precondition(format!(
            "the pod is routed to {backend:?}, which is no backend"
        ))),
    }
}

/// Plans a pod that stays on the node. A handler that another backend declares is removed, because
/// the node's runtime doesn't know it: its default handler runs the pod.
fn for_node_pod<'a>(server: &'a ServerState, method: Method, pod: Pod<'_>) -> Plan<'a> {
    let handler = pod.runtime_handler().unwrap_or_default();
    let is_declared = server
        .registry
        .declared()
        .iter()
        .any(|(_, declared)| declared.runtime_handlers.contains(&handler));
    match is_declared.then(|| pod.without_handler()) {
        Some(Ok(message)) => Plan::NodeInstead(message.into()),
        _ => for_runtime(server, method, 0),
    }
}
