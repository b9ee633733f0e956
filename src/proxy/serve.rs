//! Handling of a call from its request to the end of its response.

use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Request};
use kiyot_http2::{RecvStream, server::SendResponse};
use tonic::Status;
use tracing::{Instrument, Span, debug_span, field::Empty};

use super::{
    call::Call,
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
    backends::{Method, cri::MAX_MESSAGE_BYTES},
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
    let caller = Caller::new(respond, settings.client_timeout, server.record(method));
    let Some(_open) = server.open_call(settings.max_calls) else {
        let message = format!(
            "{0} calls are open; allowed are at most {0} (server.max_concurrent_calls)",
            settings.max_calls
        );
        return caller.send_status(&Status::resource_exhausted(message));
    };
    let mut call = Call {
        server: &server,
        deadline: Deadline::from_headers(request.headers()),
        incoming: Incoming::new(request, method.map(|_| settings.client_timeout)),
        caller,
    };
    let route = method
        .map_or_else(|| methods::route_unknown(call.incoming.head.uri.path()), methods::route);
    let Some(method) = method else {
        if route == Route::WholeNodeOnly && !server.registry.has_one_backend() {
            return call.caller.send_status(&plan::whole_node_only(call.incoming.head.uri.path()));
        }
        call.caller.set_backend(FIRST_BACKEND);
        if call.incoming.read_available().await.is_err() {
            return;
        }
        // The messages of an unknown method are unknown: the body is copied as it is received.
        if let Some(guard) = CellGuard::new(&server, call.incoming.head.uri.path()) {
            match guard.allows(&call.incoming.body) {
                Ok(false) if call.incoming.rest.is_some() => {
                    let held = std::mem::take(&mut call.incoming.body);
                    call.incoming.guard = Some(Box::new(guard.holding(&held)));
                }
                Ok(_) => {}
                Err(status) => return call.caller.send_status(&status),
            }
        }
        return forward::forward(server.registry.node(), call).await;
    };
    let is_raw = server.registry.has_one_backend() || route == Route::Node;
    // All known methods take one message. A call whose message is complete can be retried.
    let message = match call.incoming.read_message().await {
        Ok(_) | Err(MessageError::TooLarge(_)) if is_raw => None,
        Ok(FirstMessage::Complete { compressed: true, .. }) => {
            return refuse_compressed(call.caller, method);
        }
        Ok(FirstMessage::Complete { length, is_only, .. }) => {
            Some((call.incoming.message_bytes(length), is_only))
        }
        // The node backend's error says what is wrong.
        Ok(FirstMessage::Absent) => None,
        Err(MessageError::Cancelled) => return,
        Err(MessageError::Idle(after)) => {
            return call.caller.send_status(&forward::request_idle(after));
        }
        Err(MessageError::TooLarge(length)) => {
            let message = format!(
                "the request's message has {length} bytes; allowed are at most {MAX_MESSAGE_BYTES}"
            );
            return call.caller.send_status(&Status::resource_exhausted(message));
        }
    };
    let Some((message, is_only)) = message else {
        call.caller.set_backend(FIRST_BACKEND);
        return forward::forward(server.registry.node(), call).await;
    };
    let plan = plan::for_call(&server, &settings, method, route, &message);
    plan.record(&span, route, &message);
    call.caller.set_backend(plan.backend_label(&server.registry));
    if matches!(
        plan,
        Plan::Forward(_) | Plan::ForwardAndLearn(_) | Plan::FindRuntime(_) | Plan::NodeInstead(_)
    ) {
        server.id_cache.learn_annotations(method, &message);
    }
    match plan {
        Plan::Forward(upstream) => forward::forward(upstream, call).await,
        Plan::FindRuntime(id) => Box::pin(find_and_forward(call, method, &id, message)).await,
        Plan::Refuse(status) => call.caller.send_status(&status),
        Plan::NodeInstead(for_node) => {
            call.incoming.replace_message(message.len(), &for_node);
            match plan::for_runtime(&server, method, 0) {
                Plan::ForwardAndLearn(index) => {
                    Box::pin(fan_out::forward_and_learn(call, method, index, for_node)).await
                }
                _ => forward::forward(server.registry.node(), call).await,
            }
        }
        _ if !is_only => call.caller.send_status(&Status::internal(format!(
            "{method}: the request has more than one message; allowed is one"
        ))),
        Plan::Decoded(backend) => {
            let answer =
                decoded::answer(&server.main, backend, method, message, call.deadline.instant());
            Box::pin(send_answer(call, answer)).await;
        }
        Plan::RunByRule(backend, rule) => {
            let answer =
                decoded::run_by_rule(&server.main, backend, message, rule, call.deadline.instant());
            Box::pin(send_answer(call, answer)).await;
        }
        Plan::ForwardAndLearn(index) => {
            Box::pin(fan_out::forward_and_learn(call, method, index, message)).await
        }
        Plan::List => Box::pin(fan_out::list(call, method, message)).await,
        Plan::Metrics => Box::pin(fan_out::metrics(call)).await,
        Plan::Events => Box::pin(events::serve(call)).await,
        Plan::Status => Box::pin(fan_out::status(call)).await,
        Plan::NodeImage(known) => Box::pin(fan_out::image(call, message, known)).await,
        Plan::Respond(response) => call.caller.send_message(response).await,
    }
}

async fn find_and_forward(mut call: Call<'_>, method: Method, id: &str, message: Bytes) {
    let Call { server, deadline, .. } = call;
    let head = call.incoming.head.clone();
    let lookup = lookup::find_runtime(server, methods::id_kind(method), id, head, deadline);
    let index = match call.caller.wait(deadline.limit(lookup)).await {
        Ok(Ok(Ok(index))) => index,
        Ok(Ok(Err(status)) | Err(status)) => return call.caller.send_status(&status),
        Err(_cancelled) => return,
    };
    let plan = plan::for_runtime(server, method, index);
    call.caller.set_backend(plan.backend_label(&server.registry));
    match plan {
        Plan::ForwardAndLearn(index) => {
            fan_out::forward_and_learn(call, method, index, message).await
        }
        _ => forward::forward(server.registry.upstream(index), call).await,
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

async fn send_answer(mut call: Call<'_>, answer: impl Future<Output = Result<Bytes, Status>>) {
    match call.caller.wait(answer).await {
        Ok(Ok(message)) => call.caller.send_message(message).await,
        Ok(Err(status)) => call.caller.send_status(&status),
        Err(_cancelled) => {}
    }
}
