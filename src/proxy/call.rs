//! One call, from its first byte to its last.

use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Request};
use kiyot_http2::{RecvStream, server::SendResponse};
use tonic::Status;

use super::{
    caller::{Caller, GRPC_ACCEPT_ENCODING},
    deadline::Deadline,
    decoded, events, fan_out, forward,
    id_cache::RuntimeIndex,
    incoming::{FirstMessage, Incoming, MessageError},
    lookup,
    methods::{self, Route},
    peek::{self, Pod},
    routing,
    server_state::{ServerState, Settings},
};
use crate::{
    backends::{
        CallPath, Decoded, Method,
        cri::{MAX_MESSAGE_BYTES, Upstream},
    },
    config::Routing,
};

/// Who answers a call.
enum Plan<'a> {
    Forward(&'a Upstream),
    /// A container runtime that is one of several: its answer says whose an id is.
    ForwardAndLearn(RuntimeIndex),
    /// Whichever has this id.
    FindRuntime(String),
    Decoded(&'a Arc<dyn Decoded>),
    /// The node, which is sent this message instead.
    NodeInstead(Bytes),
    List,
    Metrics,
    Events,
    Status,
    /// The node, and where it has no image, this answer, or what backends know for a call that
    /// names no pod.
    NodeImage(Option<Bytes>),
    /// This answer.
    Respond(Bytes),
    Refuse(Status),
}

/// Serves a call. Dropping the future ends it on all sides.
pub(super) async fn serve(
    server: Arc<ServerState>,
    settings: Arc<Settings>,
    request: Request<RecvStream>,
    respond: SendResponse,
) {
    let caller = Caller::new(respond, settings.client_timeout);
    let Some(_open) = server.open_call(settings.max_calls) else {
        let message = format!(
            "there are {} calls open already; allowed are no more (server.max_concurrent_calls)",
            settings.max_calls
        );
        return caller.send_status(&Status::resource_exhausted(message));
    };
    let deadline = Deadline::from_headers(request.headers());
    let method = Method::from_path(request.uri().path());
    let mut incoming = Incoming::new(request, method.map(|_| settings.client_timeout));
    let route =
        method.map_or_else(|| methods::route_unknown(incoming.head.uri.path()), methods::route);
    let Some(method) = method else {
        if route == Route::WholeNodeOnly && !server.registry.has_one_backend() {
            return caller.send_status(&whole_node_only(incoming.head.uri.path()));
        }
        // What it is made of is not known: it is passed on as it comes.
        if incoming.read_available().await.is_ok() {
            forward::forward(server.registry.node(), incoming, deadline, caller).await;
        }
        return;
    };
    let is_raw = server.registry.has_one_backend() || route == Route::Node;
    // All known methods take one message. With all of it at hand, a call that was refused can be
    // sent again.
    let message = match incoming.read_message().await {
        Ok(_) | Err(MessageError::TooLarge(_)) if is_raw => None,
        Ok(FirstMessage::Complete { compressed: true, .. }) => {
            return refuse_compressed(caller, method);
        }
        Ok(FirstMessage::Complete { length, alone, .. }) => {
            Some((incoming.message_bytes(length), alone))
        }
        // The node says in its own words what is wrong with it.
        Ok(FirstMessage::Absent) => None,
        Err(MessageError::Cancelled) => return,
        Err(MessageError::Idle(after)) => return caller.send_status(&forward::request_idle(after)),
        Err(MessageError::TooLarge(length)) => {
            let message = format!(
                "the request's message has {length} bytes; allowed are at most {MAX_MESSAGE_BYTES}"
            );
            return caller.send_status(&Status::resource_exhausted(message));
        }
    };
    let Some((message, alone)) = message else {
        return forward::forward(server.registry.node(), incoming, deadline, caller).await;
    };
    let plan = plan(&server, &settings, method, route, &message);
    if matches!(
        plan,
        Plan::Forward(_) | Plan::ForwardAndLearn(_) | Plan::FindRuntime(_) | Plan::NodeInstead(_)
    ) {
        server.id_cache.note_annotations(method, &message);
    }
    match plan {
        Plan::Forward(upstream) => forward::forward(upstream, incoming, deadline, caller).await,
        Plan::FindRuntime(id) => {
            Box::pin(find_and_forward(&server, method, &id, incoming, message, deadline, caller))
                .await
        }
        Plan::Refuse(status) => caller.send_status(&status),
        Plan::NodeInstead(message_for_node) => {
            incoming.replace_message(message.len(), &message_for_node);
            match plan_for_runtime(&server, method, 0) {
                Plan::ForwardAndLearn(index) => {
                    Box::pin(fan_out::forward_and_learn(
                        &server,
                        method,
                        index,
                        incoming,
                        message_for_node,
                        deadline,
                        caller,
                    ))
                    .await
                }
                _ => forward::forward(server.registry.node(), incoming, deadline, caller).await,
            }
        }
        _ if !alone => caller.send_status(&Status::internal(format!(
            "{method} takes one message, and there came more"
        ))),
        Plan::Decoded(backend) => {
            Box::pin(call_decoded(&server, backend, method, message, deadline, caller)).await
        }
        Plan::ForwardAndLearn(index) => {
            Box::pin(fan_out::forward_and_learn(
                &server, method, index, incoming, message, deadline, caller,
            ))
            .await
        }
        Plan::List => {
            Box::pin(fan_out::list(&server, method, incoming, message, deadline, caller)).await
        }
        Plan::Metrics => Box::pin(fan_out::metrics(&server, incoming, deadline, caller)).await,
        Plan::Events => Box::pin(events::serve(&server, incoming, deadline, caller)).await,
        Plan::Status => Box::pin(fan_out::status(&server, incoming, deadline, caller)).await,
        Plan::NodeImage(known) => {
            Box::pin(fan_out::image(&server, incoming, message, known, deadline, caller)).await
        }
        Plan::Respond(answer) => caller.send_message(answer).await,
    }
}

/// Decides who answers.
fn plan<'a>(
    server: &'a ServerState,
    settings: &Settings,
    method: Method,
    route: Route,
    message: &[u8],
) -> Plan<'a> {
    let registry = &server.registry;
    // An id that can't be read is for the node to complain about.
    let owner = |path| registry.by_id(peek::string(message, path).unwrap_or_default());
    match route {
        Route::Node => Plan::Forward(registry.node()),
        Route::Run => plan_for_sandbox(server, &settings.routing, method, Pod::run(message)),
        Route::Restore => {
            plan_for_sandbox(server, &settings.routing, method, Pod::restore(message))
        }
        Route::ById(path) => owner(path).map_or_else(
            || plan_for_id(server, method, peek::string(message, path).unwrap_or_default()),
            Plan::Decoded,
        ),
        Route::List(paths) => match paths.iter().find_map(|path| owner(path)) {
            Some(backend) => Plan::Decoded(backend),
            // Its owner alone is asked, so that it is answered while another is down.
            None if registry.has_several_runtimes() => {
                let index = paths.iter().find_map(|path| {
                    server.id_cache.runtime_of_id(peek::string(message, path).ok()?)
                });
                index.map_or(Plan::List, |index| Plan::Forward(registry.upstream(index)))
            }
            None => Plan::List,
        },
        Route::Metrics => Plan::Metrics,
        Route::Events => Plan::Events,
        Route::Status => Plan::Status,
        Route::PullImage => registry
            .decoded()
            .find(|backend| backend.claims_image(method, message))
            .map_or_else(|| plan_for_image(server, method, message), Plan::Decoded),
        Route::ImageStatus => {
            match registry.decoded().find(|backend| backend.claims_image(method, message)) {
                Some(backend) => Plan::Decoded(backend),
                // ImageSpec.annotations are the pod's; with them the call is for a pod of the node.
                None if matches!(peek::bytes(message, &[1, 2]), Ok(None)) => Plan::NodeImage(None),
                None if server.id_cache.has_runtime_annotations(message) => {
                    plan_for_image(server, method, message)
                }
                None => plan_for_unmatched_image(server, method, message),
            }
        }
        Route::WholeNodeOnly => Plan::Refuse(whole_node_only(method.name())),
    }
}

fn whole_node_only(what: &str) -> Status {
    Status::unimplemented(format!(
        "{what} is not answered while there are several backends: the calls that list are"
    ))
}

/// Who answers a call by the id of a container runtime.
fn plan_for_id<'a>(server: &'a ServerState, method: Method, id: &str) -> Plan<'a> {
    if !server.registry.has_several_runtimes() || id.is_empty() {
        return Plan::Forward(server.registry.node());
    }
    match server.id_cache.runtime_of_id(id) {
        Some(index) => plan_for_runtime(server, method, index),
        None => Plan::FindRuntime(id.to_owned()),
    }
}

/// Who answers for an image: the runtime of the pod that it is for, if that is known.
fn plan_for_image<'a>(server: &'a ServerState, method: Method, message: &[u8]) -> Plan<'a> {
    let index = if server.registry.has_several_runtimes() {
        server.id_cache.runtime_of_image(method, message)
    } else {
        None
    };
    Plan::Forward(
        index.map_or_else(|| server.registry.node(), |index| server.registry.upstream(index)),
    )
}

/// Decides who answers an `ImageStatus` whose pod nobody knows, as after a restart of the kubelet.
///
/// Where annotations are like those of pods in cells, and say that their pod is in one, these
/// answer. Where they don't say it, the pod may as well be one of the node, which answers first.
fn plan_for_unmatched_image<'a>(
    server: &'a ServerState,
    method: Method,
    message: &[u8],
) -> Plan<'a> {
    let registry = &server.registry;
    let Some(known) = registry.decoded().find_map(|backend| backend.image_of_pods_like(message))
    else {
        return plan_for_image(server, method, message);
    };
    let target = peek::map_value(message, &[1, 2], routing::TARGET_RUNTIME).ok().flatten();
    // ImageSpec.runtime_handler
    let handler = peek::string(message, &[1, 19]).unwrap_or_default();
    let is_decoded = registry.declared().into_iter().any(|(name, declared)| {
        let names_it = target.is_some_and(|target| declared.target_runtimes.contains(&target))
            || declared.runtime_handlers.contains(&handler);
        let path = registry.get(name.as_str()).map(|backend| backend.path());
        names_it && matches!(path, Some(CallPath::Decoded(_)))
    });
    if is_decoded { Plan::Respond(known) } else { Plan::NodeImage(Some(known)) }
}

/// A call to a container runtime. Where there are several, the answer is looked at that has a new
/// id.
fn plan_for_runtime(server: &ServerState, method: Method, index: RuntimeIndex) -> Plan<'_> {
    let makes_an_id =
        matches!(method, Method::RunPodSandbox | Method::RestorePod | Method::CreateContainer);
    if makes_an_id && server.registry.has_several_runtimes() {
        Plan::ForwardAndLearn(index)
    } else {
        Plan::Forward(server.registry.upstream(index))
    }
}

async fn find_and_forward(
    server: &ServerState,
    method: Method,
    id: &str,
    incoming: Incoming,
    message: Bytes,
    deadline: Deadline,
    mut caller: Caller,
) {
    let lookup =
        lookup::find_runtime(server, methods::id_kind(method), id, incoming.head.clone(), deadline);
    let index = match caller.wait(fan_out::with_deadline(deadline, lookup)).await {
        Ok(Ok(Ok(index))) => index,
        Ok(Ok(Err(status)) | Err(status)) => return caller.send_status(&status),
        Err(_cancelled) => return,
    };
    match plan_for_runtime(server, method, index) {
        Plan::ForwardAndLearn(index) => {
            fan_out::forward_and_learn(server, method, index, incoming, message, deadline, caller)
                .await
        }
        _ => forward::forward(server.registry.upstream(index), incoming, deadline, caller).await,
    }
}

fn plan_for_sandbox<'a>(
    server: &'a ServerState,
    routing: &Routing,
    method: Method,
    pod: Pod<'_>,
) -> Plan<'a> {
    let registry = &server.registry;
    let decision = match routing::decide(pod, &registry.declared(), routing, registry.node_name()) {
        Ok(decision) => decision,
        Err(undeclared) => return Plan::Refuse(Status::invalid_argument(undeclared.to_string())),
    };
    let (namespace, name) = (pod.namespace().unwrap_or_default(), pod.name().unwrap_or_default());
    tracing::info!(namespace, name, backend = decision.backend, reason = ?decision.reason, "a pod sandbox was routed");
    match registry.get(decision.backend).map(|backend| backend.path()) {
        // A raw backend has an index.
        Some(CallPath::Raw(_)) => plan_for_runtime(
            server,
            method,
            registry.index_of(decision.backend).unwrap_or_default(),
        ),
        Some(CallPath::Decoded(backend)) => match backend.leaves_to_node(&pod.to_run_request()) {
            None if method == Method::RestorePod => Plan::Refuse(Status::unimplemented(format!(
                "{method} is not there for pods in cells, and this one is routed to {:?}",
                decision.backend
            ))),
            None => Plan::Decoded(backend),
            Some(why) => {
                tracing::info!(namespace, name, backend = %registry.node_name(), instead_of = decision.backend, why, "a pod sandbox stays on the node");
                plan_for_node_pod(server, method, pod)
            }
        },
        None => Plan::Refuse(Status::failed_precondition(format!(
            "the pod is routed to {:?}, and there is no such backend",
            decision.backend
        ))),
    }
}

/// To the node, for whose runtime a handler that another backend declares is none: its default one
/// runs the pod.
fn plan_for_node_pod<'a>(server: &'a ServerState, method: Method, pod: Pod<'_>) -> Plan<'a> {
    let handler = pod.runtime_handler().unwrap_or_default();
    let is_of_cells = server
        .registry
        .declared()
        .iter()
        .any(|(_, declared)| declared.runtime_handlers.contains(&handler));
    match is_of_cells.then(|| pod.without_handler()) {
        Some(Ok(message)) => Plan::NodeInstead(message.into()),
        _ => plan_for_runtime(server, method, 0),
    }
}

fn refuse_compressed(caller: Caller, method: Method) {
    let mut more = HeaderMap::with_capacity(1);
    more.insert(GRPC_ACCEPT_ENCODING, HeaderValue::from_static("identity"));
    caller.send_status_with(
        &Status::unimplemented(format!(
            "{method} takes no compressed message; allowed is the encoding identity"
        )),
        more,
    );
}

async fn call_decoded(
    server: &ServerState,
    backend: &Arc<dyn Decoded>,
    method: Method,
    message: Bytes,
    deadline: Deadline,
    mut caller: Caller,
) {
    match caller
        .wait(decoded::answer(&server.main, backend, method, message, deadline.instant()))
        .await
    {
        Ok(Ok(message)) => caller.send_message(message).await,
        Ok(Err(status)) => caller.send_status(&status),
        Err(_cancelled) => {}
    }
}
