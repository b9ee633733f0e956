//! One call, from its first byte to its last.

use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Request};
use tonic::Status;

use super::{
    caller::{Caller, GRPC_ACCEPT_ENCODING},
    decoded, events, forward, gather,
    incoming::{Incoming, Message, NoMessage},
    lookup,
    owners::Place,
    peek::{self, Pod},
    routing,
    shared::{Settings, Shared},
    table::{self, Route},
    timeout::Budget,
};
use crate::{
    backends::{
        CallPath, Decoded, Method,
        cri::{MAX_MESSAGE, Upstream},
    },
    config::Routing,
    http2::{Receiving, Responding},
};

/// Who answers a call.
enum Plan<'a> {
    Raw(&'a Upstream),
    /// A container runtime that is one of several: its answer says whose an id is.
    Learned(Place),
    /// Whichever has this id.
    Whose(String),
    Decoded(&'a Arc<dyn Decoded>),
    /// The node, which is sent this message instead.
    Stays(Bytes),
    List,
    Metrics,
    Events,
    Status,
    /// The node, and where it has no image, this answer, or what backends know for a call that
    /// names no pod.
    NodeImage(Option<Bytes>),
    /// This answer.
    Known(Bytes),
    Refuse(Status),
}

/// Serves a call. Dropping the future ends it on all sides.
pub(super) async fn serve(
    front: Arc<Shared>,
    settings: Arc<Settings>,
    request: Request<Receiving>,
    respond: Responding,
) {
    let caller = Caller::new(respond, settings.client_timeout);
    let Some(_open) = front.open_call(settings.max_calls) else {
        let message = format!(
            "there are {} calls open already; allowed are no more (server.max_concurrent_calls)",
            settings.max_calls
        );
        return caller.status(&Status::resource_exhausted(message));
    };
    let budget = Budget::of(request.headers());
    let method = Method::of_path(request.uri().path());
    let mut incoming = Incoming::new(request, method.map(|_| settings.client_timeout));
    let route = method.map_or_else(|| table::unknown(incoming.head.uri.path()), table::route);
    let Some(method) = method else {
        if route == Route::WholeNodeOnly && !front.registry.is_plain() {
            return caller.status(&whole_node_only(incoming.head.uri.path()));
        }
        // What it is made of is not known: it is passed on as it comes.
        if incoming.take_what_came().await.is_ok() {
            forward::forward(front.registry.node(), incoming, budget, caller).await;
        }
        return;
    };
    let is_raw = front.registry.is_plain() || route == Route::Node;
    // All known methods take one message. With all of it at hand, a call that was refused can be
    // sent again.
    let message = match incoming.message().await {
        Ok(_) | Err(NoMessage::TooLarge(_)) if is_raw => None,
        Ok(Message::Whole { compressed: true, .. }) => return refuse_compressed(caller, method),
        Ok(Message::Whole { length, alone, .. }) => Some((incoming.message_bytes(length), alone)),
        // The node says in its own words what is wrong with it.
        Ok(Message::None) => None,
        Err(NoMessage::Cancelled) => return,
        Err(NoMessage::Stalled(after)) => return caller.status(&forward::half_sent(after)),
        Err(NoMessage::TooLarge(length)) => {
            let message = format!(
                "the request's message has {length} bytes; allowed are at most {MAX_MESSAGE}"
            );
            return caller.status(&Status::resource_exhausted(message));
        }
    };
    let Some((message, alone)) = message else {
        return forward::forward(front.registry.node(), incoming, budget, caller).await;
    };
    let plan = plan(&front, &settings, method, route, &message);
    if matches!(plan, Plan::Raw(_) | Plan::Learned(_) | Plan::Whose(_) | Plan::Stays(_)) {
        front.owners.note(method, &message);
    }
    match plan {
        Plan::Raw(upstream) => forward::forward(upstream, incoming, budget, caller).await,
        Plan::Whose(id) => {
            Box::pin(ask_whose(&front, method, &id, incoming, message, budget, caller)).await
        }
        Plan::Refuse(status) => caller.status(&status),
        Plan::Stays(told) => {
            incoming.replace_message(message.len(), &told);
            match by_place(&front, method, 0) {
                Plan::Learned(place) => {
                    Box::pin(gather::learned(&front, method, place, incoming, told, budget, caller))
                        .await
                }
                _ => forward::forward(front.registry.node(), incoming, budget, caller).await,
            }
        }
        _ if !alone => caller
            .status(&Status::internal(format!("{method} takes one message, and there came more"))),
        Plan::Decoded(backend) => {
            Box::pin(answer_decoded(&front, backend, method, message, budget, caller)).await
        }
        Plan::Learned(place) => {
            Box::pin(gather::learned(&front, method, place, incoming, message, budget, caller))
                .await
        }
        Plan::List => {
            Box::pin(gather::list(&front, method, incoming, message, budget, caller)).await
        }
        Plan::Metrics => Box::pin(gather::metrics(&front, incoming, budget, caller)).await,
        Plan::Events => Box::pin(events::serve(&front, incoming, budget, caller)).await,
        Plan::Status => Box::pin(gather::status(&front, incoming, budget, caller)).await,
        Plan::NodeImage(known) => {
            Box::pin(gather::image(&front, incoming, message, known, budget, caller)).await
        }
        Plan::Known(answer) => caller.message(answer).await,
    }
}

/// Decides who answers.
fn plan<'a>(
    front: &'a Shared,
    settings: &Settings,
    method: Method,
    route: Route,
    message: &[u8],
) -> Plan<'a> {
    let registry = &front.registry;
    // An id that can't be read is for the node to complain about.
    let owner = |path| registry.by_id(peek::string(message, path).unwrap_or_default());
    match route {
        Route::Node => Plan::Raw(registry.node()),
        Route::Run => run(front, &settings.routing, method, Pod::of(message)),
        Route::Restore => run(front, &settings.routing, method, Pod::to_restore(message)),
        Route::ById(path) => owner(path).map_or_else(
            || of_id(front, method, peek::string(message, path).unwrap_or_default()),
            Plan::Decoded,
        ),
        Route::List(paths) => match paths.iter().find_map(|path| owner(path)) {
            Some(backend) => Plan::Decoded(backend),
            // Its owner alone is asked, so that it is answered while another is down.
            None if registry.has_several_raw() => {
                let place = paths
                    .iter()
                    .find_map(|path| front.owners.of_id(peek::string(message, path).ok()?));
                place.map_or(Plan::List, |place| Plan::Raw(registry.upstream(place)))
            }
            None => Plan::List,
        },
        Route::Metrics => Plan::Metrics,
        Route::Events => Plan::Events,
        Route::Status => Plan::Status,
        Route::PullImage => registry
            .decoded()
            .find(|backend| backend.claims_image(method, message))
            .map_or_else(|| of_image(front, method, message), Plan::Decoded),
        Route::ImageStatus => {
            match registry.decoded().find(|backend| backend.claims_image(method, message)) {
                Some(backend) => Plan::Decoded(backend),
                // ImageSpec.annotations are the pod's; with them the call is for a pod of the node.
                None if matches!(peek::bytes(message, &[1, 2]), Ok(None)) => Plan::NodeImage(None),
                None if front.owners.has_noted(message) => of_image(front, method, message),
                None => of_pods_like(front, method, message),
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
fn of_id<'a>(front: &'a Shared, method: Method, id: &str) -> Plan<'a> {
    if !front.registry.has_several_raw() || id.is_empty() {
        return Plan::Raw(front.registry.node());
    }
    match front.owners.of_id(id) {
        Some(place) => by_place(front, method, place),
        None => Plan::Whose(id.to_owned()),
    }
}

/// Who answers for an image: the runtime of the pod that it is for, if that is known.
fn of_image<'a>(front: &'a Shared, method: Method, message: &[u8]) -> Plan<'a> {
    let place = if front.registry.has_several_raw() {
        front.owners.of_image(method, message)
    } else {
        None
    };
    Plan::Raw(place.map_or_else(|| front.registry.node(), |place| front.registry.upstream(place)))
}

/// Decides who answers an `ImageStatus` whose pod nobody knows, as after a restart of the kubelet.
///
/// Where annotations are like those of pods in cells, and say that their pod is in one, these
/// answer. Where they don't say it, the pod may as well be one of the node, which answers first.
fn of_pods_like<'a>(front: &'a Shared, method: Method, message: &[u8]) -> Plan<'a> {
    let registry = &front.registry;
    let Some(known) = registry.decoded().find_map(|backend| backend.image_of_pods_like(message))
    else {
        return of_image(front, method, message);
    };
    let target = peek::entry(message, &[1, 2], routing::TARGET_RUNTIME).ok().flatten();
    // ImageSpec.runtime_handler
    let handler = peek::string(message, &[1, 19]).unwrap_or_default();
    let is_decoded = registry.declared().into_iter().any(|(name, declared)| {
        let names_it = target.is_some_and(|target| declared.target_runtimes.contains(&target))
            || declared.runtime_handlers.contains(&handler);
        let path = registry.get(name.as_str()).map(|backend| backend.path());
        names_it && matches!(path, Some(CallPath::Decoded(_)))
    });
    if is_decoded { Plan::Known(known) } else { Plan::NodeImage(Some(known)) }
}

/// A call to a container runtime. Where there are several, the answer is looked at that has a new
/// id.
fn by_place(front: &Shared, method: Method, place: Place) -> Plan<'_> {
    let makes_an_id =
        matches!(method, Method::RunPodSandbox | Method::RestorePod | Method::CreateContainer);
    if makes_an_id && front.registry.has_several_raw() {
        Plan::Learned(place)
    } else {
        Plan::Raw(front.registry.upstream(place))
    }
}

async fn ask_whose(
    front: &Shared,
    method: Method,
    id: &str,
    incoming: Incoming,
    message: Bytes,
    budget: Budget,
    mut caller: Caller,
) {
    let asked = lookup::find(front, table::names(method), id, incoming.head.clone(), budget);
    let place = match caller.wait(gather::until(budget, asked)).await {
        Ok(Ok(Ok(place))) => place,
        Ok(Ok(Err(status)) | Err(status)) => return caller.status(&status),
        Err(_gone) => return,
    };
    match by_place(front, method, place) {
        Plan::Learned(place) => {
            gather::learned(front, method, place, incoming, message, budget, caller).await
        }
        _ => forward::forward(front.registry.upstream(place), incoming, budget, caller).await,
    }
}

fn run<'a>(front: &'a Shared, routing: &Routing, method: Method, pod: Pod<'_>) -> Plan<'a> {
    let registry = &front.registry;
    let decision = match routing::decide(pod, &registry.declared(), routing, registry.node_name()) {
        Ok(decision) => decision,
        Err(undeclared) => return Plan::Refuse(Status::invalid_argument(undeclared.to_string())),
    };
    let (namespace, name) = (pod.namespace().unwrap_or_default(), pod.name().unwrap_or_default());
    tracing::info!(namespace, name, backend = decision.backend, reason = ?decision.reason, "a pod sandbox was routed");
    match registry.get(decision.backend).map(|backend| backend.path()) {
        // A raw backend has a place.
        Some(CallPath::Raw(_)) => {
            by_place(front, method, registry.place(decision.backend).unwrap_or_default())
        }
        Some(CallPath::Decoded(backend)) => match backend.leaves_to_node(&pod.to_run()) {
            None if method == Method::RestorePod => Plan::Refuse(Status::unimplemented(format!(
                "{method} is not there for pods in cells, and this one is routed to {:?}",
                decision.backend
            ))),
            None => Plan::Decoded(backend),
            Some(why) => {
                tracing::info!(namespace, name, backend = %registry.node_name(), instead_of = decision.backend, why, "a pod sandbox stays on the node");
                stays(front, method, pod)
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
fn stays<'a>(front: &'a Shared, method: Method, pod: Pod<'_>) -> Plan<'a> {
    let handler = pod.runtime_handler().unwrap_or_default();
    let is_of_cells = front
        .registry
        .declared()
        .iter()
        .any(|(_, declared)| declared.runtime_handlers.contains(&handler));
    match is_of_cells.then(|| pod.without_handler()) {
        Some(Ok(message)) => Plan::Stays(message.into()),
        _ => by_place(front, method, 0),
    }
}

fn refuse_compressed(caller: Caller, method: Method) {
    let mut more = HeaderMap::with_capacity(1);
    more.insert(GRPC_ACCEPT_ENCODING, HeaderValue::from_static("identity"));
    caller.refuse(
        &Status::unimplemented(format!(
            "{method} takes no compressed message; allowed is the encoding identity"
        )),
        more,
    );
}

async fn answer_decoded(
    front: &Shared,
    backend: &Arc<dyn Decoded>,
    method: Method,
    message: Bytes,
    budget: Budget,
    mut caller: Caller,
) {
    match caller
        .wait(decoded::answer(&front.main, backend, method, message, budget.deadline()))
        .await
    {
        Ok(Ok(message)) => caller.message(message).await,
        Ok(Err(status)) => caller.status(&status),
        Err(_gone) => {}
    }
}
