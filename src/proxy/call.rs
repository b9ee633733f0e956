//! One call, from its first byte to its last.

use std::sync::Arc;

use bytes::Bytes;
use h2::{RecvStream, server::SendResponse};
use http::{HeaderMap, HeaderValue, Request};
use tonic::Status;

use super::{
    caller::{Caller, GRPC_ACCEPT_ENCODING},
    decoded, forward, gather,
    incoming::{Incoming, Message, NoMessage},
    peek::{self, Pod},
    routing,
    shared::Shared,
    table::{self, Route},
    timeout::Budget,
};
use crate::backends::{
    CallPath, Decoded, Method,
    cri::{MAX_MESSAGE, Upstream},
};

/// Who answers a call.
enum Plan<'a> {
    Raw(&'a Upstream),
    Decoded(&'a Arc<dyn Decoded>),
    List,
    Status,
    /// The node, and what backends know where it has no image.
    NodeImage,
    Refuse(Status),
}

/// Serves a call. Dropping the future ends it on all sides.
pub(super) async fn serve(front: Arc<Shared>, request: Request<RecvStream>, respond: SendResponse<Bytes>) {
    let caller = Caller::new(respond, front.client_timeout);
    let Some(_open) = front.open_call() else {
        let message = format!("there are {} calls open already; allowed are no more (server.max_concurrent_calls)", front.max_calls);
        return caller.status(&Status::resource_exhausted(message));
    };
    let budget = Budget::of(request.headers());
    let method = Method::of_path(request.uri().path());
    let mut incoming = Incoming::new(request, method.map(|_| front.client_timeout));
    let route = method.map_or(Route::Node, table::route);
    let Some(method) = method else {
        // What it is made of is not known: it is passed on as it comes.
        if incoming.take_what_came().await.is_ok() {
            forward::forward(front.registry.node(), incoming, budget, caller).await;
        }
        return;
    };
    let is_raw = front.registry.is_plain() || route == Route::Node;
    // All known methods take one message. With all of it at hand, a call that was refused can be sent again.
    let message = match incoming.message().await {
        Ok(_) | Err(NoMessage::TooLarge(_)) if is_raw => None,
        Ok(Message::Whole { compressed: true, .. }) => return refuse_compressed(caller, method),
        Ok(Message::Whole { length, alone, .. }) => Some((incoming.message_bytes(length), alone)),
        // The node says in its own words what is wrong with it.
        Ok(Message::None) => None,
        Err(NoMessage::Cancelled) => return,
        Err(NoMessage::Stalled(after)) => return caller.status(&forward::half_sent(after)),
        Err(NoMessage::TooLarge(length)) => {
            let message = format!("the request's message has {length} bytes; allowed are at most {MAX_MESSAGE}");
            return caller.status(&Status::resource_exhausted(message));
        }
    };
    let Some((message, alone)) = message else { return forward::forward(front.registry.node(), incoming, budget, caller).await };
    match plan(&front, method, route, &message) {
        Plan::Raw(upstream) => forward::forward(upstream, incoming, budget, caller).await,
        Plan::Refuse(status) => caller.status(&status),
        _ if !alone => caller.status(&Status::internal(format!("{method} takes one message, and there came more"))),
        Plan::Decoded(backend) => Box::pin(answer_decoded(&front, backend, method, message, budget, caller)).await,
        Plan::List => Box::pin(gather::list(&front, method, incoming, message, budget, caller)).await,
        Plan::Status => Box::pin(gather::status(&front, incoming, budget, caller)).await,
        Plan::NodeImage => Box::pin(gather::image(&front, incoming, message, budget, caller)).await,
    }
}

/// Decides who answers.
fn plan<'a>(front: &'a Shared, method: Method, route: Route, message: &[u8]) -> Plan<'a> {
    let registry = &front.registry;
    // An id that can't be read is for the node to complain about.
    let owner = |path| registry.by_id(peek::string(message, path).unwrap_or_default());
    match route {
        Route::Node => Plan::Raw(registry.node()),
        Route::Run => run(front, message),
        Route::ById(path) => owner(path).map_or_else(|| Plan::Raw(registry.node()), Plan::Decoded),
        Route::List(paths) => paths.iter().find_map(|path| owner(path)).map_or(Plan::List, Plan::Decoded),
        Route::Status => Plan::Status,
        Route::PullImage => {
            registry.decoded().find(|backend| backend.claims_image(method, message)).map_or_else(|| Plan::Raw(registry.node()), Plan::Decoded)
        }
        Route::ImageStatus => match registry.decoded().find(|backend| backend.claims_image(method, message)) {
            Some(backend) => Plan::Decoded(backend),
            // ImageSpec.annotations are the pod's; with them the call is for a pod of the node.
            None if matches!(peek::bytes(message, &[1, 2]), Ok(None)) => Plan::NodeImage,
            None => Plan::Raw(registry.node()),
        },
        Route::WholeNodeOnly => {
            Plan::Refuse(Status::unimplemented(format!("{method} is not answered while there are several backends: the calls that list are")))
        }
    }
}

fn run<'a>(front: &'a Shared, message: &[u8]) -> Plan<'a> {
    let registry = &front.registry;
    let pod = Pod::of(message);
    let decision = match routing::decide(pod, &registry.declared(), &front.routing, registry.node_name()) {
        Ok(decision) => decision,
        Err(undeclared) => return Plan::Refuse(Status::invalid_argument(undeclared.to_string())),
    };
    let (namespace, name) = (pod.namespace().unwrap_or_default(), pod.name().unwrap_or_default());
    tracing::info!(namespace, name, backend = decision.backend, reason = ?decision.reason, "a pod sandbox was routed");
    match registry.get(decision.backend).map(|backend| backend.path()) {
        Some(CallPath::Raw(upstream)) => Plan::Raw(upstream),
        Some(CallPath::Decoded(backend)) => Plan::Decoded(backend),
        None => Plan::Refuse(Status::failed_precondition(format!("the pod is routed to {:?}, and there is no such backend", decision.backend))),
    }
}

fn refuse_compressed(caller: Caller, method: Method) {
    let mut more = HeaderMap::with_capacity(1);
    more.insert(GRPC_ACCEPT_ENCODING, HeaderValue::from_static("identity"));
    caller.refuse(&Status::unimplemented(format!("{method} takes no compressed message; allowed is the encoding identity")), more);
}

async fn answer_decoded(front: &Shared, backend: &Arc<dyn Decoded>, method: Method, message: Bytes, budget: Budget, mut caller: Caller) {
    match caller.wait(decoded::answer(&front.main, backend, method, message, budget.deadline())).await {
        Ok(Ok(message)) => caller.message(message).await,
        Ok(Err(status)) => caller.status(&status),
        Err(_gone) => {}
    }
}
