//! TerminateInstances, StopInstances, StartInstances, and the shutdown behaviour.

use std::time::Instant;

use super::{ApiError, lists::state_element, of_vpc, ok, pass};
use crate::{client::Reply, instance::State, query::Query, shared::Shared, xml::Element};

/// Code of the reason if a call ends or stops an instance.
const USER_CODE: &str = "Client.UserInitiatedShutdown";
/// Message for [`USER_CODE`].
const USER_MESSAGE: &str = "User initiated shutdown";

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
    let failed = if query.action == "TerminateInstances" {
        remove(query, signed, shared).await?
    } else {
        Some(pass(query, signed, shared).await?).filter(|reply| reply.status != 200)
    };
    if let Some(reply) = failed {
        return Ok(reply);
    }
    let now = Instant::now();
    let mut items = Vec::new();
    let mut state = shared.lock();
    let (pending, ending) = (state.faults.pending_for, state.faults.shutting_down_for);
    for id in ids {
        let Some(instance) = state.instance(id) else { continue };
        let before = instance.state;
        match query.action.as_str() {
            "TerminateInstances" => {
                instance.end(now.checked_add(ending), shared.boots, USER_CODE, USER_MESSAGE);
            }
            "StopInstances" if matches!(before, State::Pending | State::Running) => {
                instance.state = State::Stopping;
                instance.settles = Some(now);
                instance.held = instance.booting || before == State::Pending && shared.boots;
                instance.set_reason(USER_CODE, USER_MESSAGE);
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

/// Ends an instance without a call, with the code and the message of the reason.
pub(crate) async fn end(
    id: &str,
    code: &str,
    message: &str,
    shared: &Shared,
) -> Result<(), ApiError> {
    let query = Query::new("TerminateInstances", &[("InstanceId.1", id)]);
    remove(&query, None, shared).await?;
    if let Some(instance) = shared.lock().instance(id) {
        instance.end(Some(Instant::now()), shared.boots, code, message);
    }
    shared.changed.notify_waiters();
    Ok(())
}

/// Makes moto terminate the instances that it has not terminated yet, with their volumes and
/// interfaces: a repeated termination fails in moto, but succeeds in EC2. Returns the reply of a
/// failure.
pub(crate) async fn remove(
    query: &Query,
    signed: Option<&str>,
    shared: &Shared,
) -> Result<Option<Reply>, ApiError> {
    let _terminating = shared.terminating.lock().await;
    let mut ids = query.list("InstanceId");
    ids.retain(|id| !shared.lock().instance(id).is_some_and(|instance| instance.is_removed));
    if ids.is_empty() {
        return Ok(None);
    }
    let mut left = query.clone();
    left.parameters.retain(|key, _| !key.starts_with("InstanceId."));
    let numbered = ids.iter().zip(1..);
    let numbered = numbered.map(|(id, number)| (format!("InstanceId.{number}"), (*id).to_owned()));
    left.parameters.extend(numbered);
    let reply = pass(&left, signed, shared).await?;
    if reply.status != 200 {
        return Ok(Some(reply));
    }
    let mut state = shared.lock();
    for id in ids {
        if let Some(instance) = state.instance(id) {
            instance.is_removed = true;
        }
    }
    Ok(None)
}

/// Refuses to stop or start instances in a wrong state.
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

pub(super) async fn modify(
    query: &Query,
    signed: Option<&str>,
    shared: &Shared,
) -> Result<Reply, ApiError> {
    let reply = pass(query, signed, shared).await?;
    let behaviour = query.get("InstanceInitiatedShutdownBehavior.Value");
    let check = query.get("SourceDestCheck.Value");
    if reply.status != 200 {
        return Ok(reply);
    }
    if let Some(instance) = shared.lock().instance(query.get("InstanceId")) {
        if !behaviour.is_empty() {
            instance.stops_on_shutdown = behaviour == "stop";
        }
        if !check.is_empty() {
            instance.is_checked = check == "true";
        }
    }
    if let (Some(vpc), false) = (shared.vpc(), check.is_empty()) {
        let (id, is_checked) = (query.get("InstanceId").to_owned(), check == "true");
        vpc.blocking(move |vpc| vpc.set_checked(&id, is_checked)).await.map_err(of_vpc)?;
    }
    Ok(reply)
}
