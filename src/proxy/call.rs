//! Handling of a call from its request to the end of its response.

use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Request};
use kiyot_http2::{RecvStream, server::SendResponse};
use tonic::Status;
use tracing::{Instrument, Span, debug_span, field::Empty};

use super::{
    caller::{Caller, GRPC_ACCEPT_ENCODING},
    cell_guard::CellGuard,
    deadline::Deadline,
    decoded, events, fan_out, forward,
    incoming::{FirstMessage, Incoming, MessageError},
    lookup,
    methods::{self, Route},
    plan::{self, Plan},
    server_state::{ServerState, Settings},
    trace_context,
};
use crate::{
    backends::{DecodedBackend, Method, cri::MAX_MESSAGE_BYTES},
    metrics::FIRST_BACKEND,
};

/// Serves a call in a span of its own. Dropping the future cancels the call on all sides.
pub(super) fn serve(
    server: Arc<ServerState>,
    settings: Arc<Settings>,
    request: Request<RecvStream>,
    respond: SendResponse,
) -> impl Future<Output = ()> {
    let method = Method::from_path(request.uri().path());
    let span = debug_span!(
        "cri_call",
        method = method.map_or(request.uri().path(), |method| method.name()),
        plan = Empty,
        id = Empty,
        code = Empty
    );
    trace_context::adopt(&span, request.headers());
    serve_in(span.clone(), server, settings, method, request, respond).instrument(span)
}

async fn serve_in(
    span: Span,
    server: Arc<ServerState>,
    settings: Arc<Settings>,
    method: Option<Method>,
    request: Request<RecvStream>,
    respond: SendResponse,
) {
    let mut caller = Caller::new(respond, settings.client_timeout, server.record(method));
    let Some(_open) = server.open_call(settings.max_calls) else {
        let message = format!(
            "{0} calls are open; allowed are at most {0} (server.max_concurrent_calls)",
            settings.max_calls
        );
        return caller.send_status(&Status::resource_exhausted(message));
    };
    let deadline = Deadline::from_headers(request.headers());
    let mut incoming = Incoming::new(request, method.map(|_| settings.client_timeout));
    let route =
        method.map_or_else(|| methods::route_unknown(incoming.head.uri.path()), methods::route);
    let Some(method) = method else {
        if route == Route::WholeNodeOnly && !server.registry.has_one_backend() {
            return caller.send_status(&plan::whole_node_only(incoming.head.uri.path()));
        }
        caller.set_backend(FIRST_BACKEND);
        if incoming.read_available().await.is_err() {
            return;
        }
        // The messages of an unknown method are unknown: the body is copied as it is received.
        if let Some(guard) = CellGuard::new(&server, incoming.head.uri.path()) {
            match guard.allows(&incoming.body) {
                Ok(false) if incoming.rest.is_some() => {
                    let held = std::mem::take(&mut incoming.body);
                    incoming.guard = Some(Box::new(guard.holding(&held)));
                }
                Ok(_) => {}
                Err(status) => return caller.send_status(&status),
            }
        }
        return forward::forward(server.registry.node(), incoming, deadline, caller).await;
    };
    let is_raw = server.registry.has_one_backend() || route == Route::Node;
    // All known methods take one message. A call whose message is complete can be retried.
    let message = match incoming.read_message().await {
        Ok(_) | Err(MessageError::TooLarge(_)) if is_raw => None,
        Ok(FirstMessage::Complete { compressed: true, .. }) => {
            return refuse_compressed(caller, method);
        }
        Ok(FirstMessage::Complete { length, is_only, .. }) => {
            Some((incoming.message_bytes(length), is_only))
        }
        // The node backend's error says what is wrong.
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
    let Some((message, is_only)) = message else {
        caller.set_backend(FIRST_BACKEND);
        return forward::forward(server.registry.node(), incoming, deadline, caller).await;
    };
    let plan = plan::for_call(&server, &settings, method, route, &message);
    plan.record(&span, route, &message);
    caller.set_backend(plan.backend_label(&server.registry));
    if matches!(
        plan,
        Plan::Forward(_) | Plan::ForwardAndLearn(_) | Plan::FindRuntime(_) | Plan::NodeInstead(_)
    ) {
        server.id_cache.learn_annotations(method, &message);
    }
    match plan {
        Plan::Forward(upstream) => forward::forward(upstream, incoming, deadline, caller).await,
        Plan::FindRuntime(id) => {
            Box::pin(find_and_forward(&server, method, &id, incoming, message, deadline, caller))
                .await
        }
        Plan::Refuse(status) => caller.send_status(&status),
        Plan::NodeInstead(for_node) => {
            incoming.replace_message(message.len(), &for_node);
            match plan::for_runtime(&server, method, 0) {
                Plan::ForwardAndLearn(index) => {
                    Box::pin(fan_out::forward_and_learn(
                        &server, method, index, incoming, for_node, deadline, caller,
                    ))
                    .await
                }
                _ => forward::forward(server.registry.node(), incoming, deadline, caller).await,
            }
        }
        _ if !is_only => caller.send_status(&Status::internal(format!(
            "{method}: the request has more than one message; allowed is one"
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
        Plan::Respond(response) => caller.send_message(response).await,
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
    let plan = plan::for_runtime(server, method, index);
    caller.set_backend(plan.backend_label(&server.registry));
    match plan {
        Plan::ForwardAndLearn(index) => {
            fan_out::forward_and_learn(server, method, index, incoming, message, deadline, caller)
                .await
        }
        _ => forward::forward(server.registry.upstream(index), incoming, deadline, caller).await,
    }
}

fn refuse_compressed(caller: Caller, method: Method) {
    let mut headers = HeaderMap::with_capacity(1);
    headers.insert(GRPC_ACCEPT_ENCODING, HeaderValue::from_static("identity"));
    caller.send_status_with(
        &Status::unimplemented(format!(
            "{method}: the message is compressed; allowed is the encoding identity"
        )),
        headers,
    );
}

async fn call_decoded(
    server: &ServerState,
    backend: &Arc<dyn DecodedBackend>,
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
