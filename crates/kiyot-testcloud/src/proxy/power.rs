//! TerminateInstances, StopInstances, StartInstances, and the shutdown behaviour.

use std::time::Instant;

use super::{ApiError, lists::state_element, ok, pass};
use crate::{
    client::Reply,
    instance::{Instance, State},
    query::Query,
    shared::Shared,
    xml::Element,
};

pub(super) async fn change(
    query: &Query,
    signed: Option<&str>,
    shared: &Shared,
) -> Result<Reply, ApiError> {
    let ids = query.list("InstanceId");
    if ids.is_empty() {
        return Err(ApiError::client(
            "MissingParameter",
            "The request must contain the parameter InstanceId",
        ));
    }
    check_states(query, &ids, shared)?;
    // moto fails when it terminates an instance again.
    let passed = match query.action.as_str() {
        "TerminateInstances" => without_ended(query, &ids, shared),
        _ => query.clone(),
    };
    if !passed.list("InstanceId").is_empty() {
        let reply = pass(&passed, signed, shared).await?;
        if reply.status != 200 {
            return Ok(reply);
        }
    }
    let now = Instant::now();
    let mut items = Vec::new();
    let mut state = shared.lock();
    let (pending, ending) = (state.faults.pending_for, state.faults.shutting_down_for);
    for id in ids {
        let Some(instance) = state.instance(id) else { continue };
        let before = instance.state;
        match query.action.as_str() {
            "TerminateInstances" if before != State::Terminated => {
                if before != State::ShuttingDown {
                    instance.settles = now.checked_add(ending);
                    // A stopped instance has no namespace to end.
                    instance.held = instance.booting || before == State::Pending && shared.boots;
                }
                instance.state = State::ShuttingDown;
                set_reason(instance, "Client.UserInitiatedShutdown", "User initiated shutdown");
            }
            "StopInstances" if matches!(before, State::Pending | State::Running) => {
                instance.state = State::Stopping;
                instance.settles = Some(now);
                instance.held = instance.booting || before == State::Pending && shared.boots;
                set_reason(instance, "Client.UserInitiatedShutdown", "User initiated shutdown");
            }
            "StartInstances" if before == State::Stopped => {
                instance.state = State::Pending;
                instance.settles = now.checked_add(pending);
                instance.held = shared.boots;
                instance.reason = (String::new(), String::new());
            }
            _ => {}
        }
        items.push(Element::parent(
            "item",
            vec![
                Element::text("instanceId", id),
                state_element("currentState", instance.state),
                state_element("previousState", before),
            ],
        ));
    }
    drop(state);
    shared.changed.notify_waiters();
    let fields =
        vec![Element::text("requestId", "test-cloud"), Element::parent("instancesSet", items)];
    Ok(ok(&Element::response(&format!("{}Response", query.action), fields)))
}

/// Returns the query without the instances that have ended or are ending.
fn without_ended(query: &Query, ids: &[&str], shared: &Shared) -> Query {
    let mut state = shared.lock();
    let mut kept = query.clone();
    kept.parameters.retain(|key, _| !key.starts_with("InstanceId."));
    for (index, id) in ids.iter().enumerate() {
        let ended = |instance: &mut Instance| instance.state.is_ended();
        if !state.instance(id).is_some_and(ended) {
            kept.parameters.insert(format!("InstanceId.{}", index + 1), (*id).to_owned());
        }
    }
    kept
}

/// Refuses to stop or start an instance whose state does not allow it.
fn check_states(query: &Query, ids: &[&str], shared: &Shared) -> Result<(), ApiError> {
    let mut state = shared.lock();
    for id in ids {
        let Some(instance) = state.instance(id) else { continue };
        let refused = match query.action.as_str() {
            "StopInstances" => instance.state.is_ended(),
            "StartInstances" => {
                !matches!(instance.state, State::Stopped | State::Pending | State::Running)
            }
            _ => false,
        };
        if refused {
            return Err(ApiError::client(
                "IncorrectInstanceState",
                format!("The instance '{id}' is in the state '{}'.", instance.state.name()),
            ));
        }
    }
    Ok(())
}

fn set_reason(instance: &mut Instance, code: &str, message: &str) {
    instance.reason = (code.to_owned(), format!("{code}: {message}"));
}

pub(super) async fn modify(
    query: &Query,
    signed: Option<&str>,
    shared: &Shared,
) -> Result<Reply, ApiError> {
    let reply = pass(query, signed, shared).await?;
    let behaviour = query.get("InstanceInitiatedShutdownBehavior.Value");
    if reply.status == 200
        && !behaviour.is_empty()
        && let Some(instance) = shared.lock().instance(query.get("InstanceId"))
    {
        instance.stops_on_shutdown = behaviour == "stop";
    }
    Ok(reply)
}
