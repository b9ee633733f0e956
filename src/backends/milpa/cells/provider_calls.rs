//! Calls to the provider: each has a time limit, and its outcome is an event of the engine.

use std::{future::Future, net::IpAddr, sync::Arc, time::Duration};

use kiyot_engine::{
    engine::{Effect, Event, Launch},
    id::CellId,
    placement::Offering,
    provider::{
        Attachment, ErrorClass, Instance, InstanceId, Provider, ProviderError, Termination,
    },
};
use kiyot_link::channel::is_unsafe_control;

use crate::{
    backends::milpa::providers::within,
    metrics::{LaunchLabels, Launches},
};

/// Bounds a provider call, beyond the provider's own limits.
const CALL_TIMEOUT: Duration = Duration::from_secs(300);
/// Bounds the detachment before a termination: an instance costs money until its termination.
const DETACH_TIMEOUT: Duration = Duration::from_secs(60);
/// Bounds the call that reads a console.
const CONSOLE_TIMEOUT: Duration = Duration::from_secs(10);
/// Bounds the part of a console that an error quotes.
const MAX_CONSOLE_BYTES: usize = 4096;

/// Launches the instance of a cell, and counts it.
pub(super) async fn launch(
    provider: Arc<dyn Provider>,
    launch: Arc<Launch>,
    launches: Arc<Launches>,
) -> Event {
    let call = provider.launch(&launch.spec, &launch.token);
    let launched = bounded("launch a cell", call).await;
    let (outcome, offerings) = match &launched {
        Ok(instance) => ("launched", vec![&instance.offering]),
        Err(ProviderError { class, refusal: Some(refusal), .. }) => {
            let refused = launch.spec.offerings().filter(|offering| refusal.refuses(offering));
            (class.name(), refused.collect())
        }
        Err(error) => (error.class.name(), launch.spec.offerings().take(1).collect()),
    };
    let provider = provider.capabilities().provider;
    for Offering { instance_type, market, .. } in offerings {
        let (instance_type, market) = (instance_type.clone(), market.label());
        launches.count(LaunchLabels { provider, instance_type, market, outcome });
    }
    Event::Launched(launch.spec.cell.clone(), launched)
}

/// Attaches an instance to its pod's network. `peer` is the agent's address and must be an address
/// of the instance: another reader of the launch token could dial before the agent.
pub(super) async fn attach(
    provider: Arc<dyn Provider>,
    cell: CellId,
    instance: InstanceId,
    attachment: Box<Attachment>,
    peer: Option<IpAddr>,
) -> Event {
    let call = provider.attach(&instance, &attachment);
    let attached = bounded("attach a cell to its network", call).await;
    let attached = attached.and_then(|attached| match peer {
        Some(peer) if !attached.addresses.contains(&peer) => {
            let what = format!(
                "agent of {cell} dials from {peer}; allowed: an address of instance {instance}, \
                 {:?}",
                attached.addresses
            );
            tracing::error!(%cell, %peer, "agent is not on the cell's instance");
            Err(ProviderError::without_cause(ErrorClass::Invalid, what))
        }
        _ => Ok(attached),
    });
    Event::Attached(cell, attached)
}

/// Releases what an instance shares with the node.
pub(super) async fn detach(
    provider: Arc<dyn Provider>,
    cell: CellId,
    instance: InstanceId,
) -> Event {
    Event::Detached(cell, bounded("detach a cell", provider.detach(&instance)).await)
}

pub(super) async fn describe(
    provider: Arc<dyn Provider>,
    cell: CellId,
    instance: InstanceId,
) -> Event {
    Event::Described(cell, bounded("describe a cell", provider.describe(&instance)).await)
}

/// Terminates a cell's instance. If the instance is unknown, terminates all instances that the
/// provider lists for the cell. Reads the console first if `with_console`. A failed detachment does
/// not prevent the termination, but is the error of the call, so that it is repeated.
pub(super) async fn terminate(
    provider: Arc<dyn Provider>,
    cell: CellId,
    instance: Option<InstanceId>,
    with_console: bool,
) -> Event {
    let mut console_end = String::new();
    let console = &mut console_end;
    let ending = async {
        let instances = match instance {
            Some(instance) => vec![instance],
            None => provider
                .list_owned()
                .await?
                .into_iter()
                .filter(|listed| listed.cell == cell)
                .map(|listed| listed.id)
                .collect(),
        };
        if with_console {
            *console = read_console(provider.as_ref(), &instances).await.unwrap_or_default();
        }
        if instances.is_empty() {
            return Ok(Termination::Confirmed);
        }
        let mut detached = Ok(());
        for instance in &instances {
            detached = detached.and(detach_before_end(provider.as_ref(), instance).await);
        }
        let mut progress = Ok(Termination::Confirmed);
        for (_, outcome) in provider.terminate(&instances).await {
            progress = match (progress, outcome) {
                (Err(error), _) | (_, Err(error)) => Err(error),
                (Ok(Termination::Confirmed), Ok(next)) => Ok(next),
                (Ok(Termination::Accepted), Ok(_)) => Ok(Termination::Accepted),
            };
        }
        // `NotFound` counts as the end of the instance, so that a failed detachment would not be
        // repeated.
        match (detached, progress) {
            (Err(error), Ok(_)) => Err(error),
            (Err(error), Err(absent)) if absent.class == ErrorClass::NotFound => Err(error),
            (_, progress) => progress,
        }
    };
    let outcome = bounded("end a cell", ending).await;
    Event::Terminated { cell, outcome, console: console_end }
}

/// Detaches an instance that is terminated next, and logs a failure.
async fn detach_before_end(
    provider: &dyn Provider,
    instance: &InstanceId,
) -> Result<(), ProviderError> {
    let doing = "detach a cell before its end";
    let detached = within(DETACH_TIMEOUT, doing, provider.detach(instance)).await;
    if let Err(error) = &detached {
        let error = error as &dyn std::error::Error;
        tracing::warn!(%instance, error, "instance is terminated before it is detached");
    }
    detached
}

/// Terminates instances without a cell. The next listing shows the remaining ones.
pub(super) async fn end_strays(provider: Arc<dyn Provider>, instances: Vec<InstanceId>) -> Event {
    let key = provider.capabilities().provider;
    let ending = async { Ok(provider.terminate(&instances).await) };
    let outcomes = bounded("end instances that belong to no cell", ending).await;
    let error = match &outcomes {
        Ok(outcomes) => outcomes.values().find_map(|outcome| outcome.as_ref().err()),
        Err(error) => Some(error),
    };
    if let Some(error) = error {
        tracing::error!(error = error as &dyn std::error::Error, "stray instances not terminated");
    }
    let outcomes = outcomes.unwrap_or_default();
    let is_accepted = |instance: &InstanceId| outcomes.get(instance).is_some_and(Result::is_ok);
    let (accepted, failed) = instances.into_iter().partition(is_accepted);
    Event::StraysEnded { provider: key, accepted, failed }
}

/// Returns the outcome of a call to a provider that is not configured. Without an attachment by a
/// provider, an instance shares nothing with the node.
pub(super) async fn unconfigured(cell: CellId, effect: Effect) -> Event {
    let error = ProviderError::without_cause(
        ErrorClass::NotFound,
        format!("call the provider of {cell}, which is not configured"),
    );
    match effect {
        Effect::Launch(_) => Event::Launched(cell, Err(error)),
        Effect::Attach(..) => Event::Attached(cell, Err(error)),
        Effect::Detach(_) => Event::Detached(cell, Ok(())),
        Effect::Terminate { .. } => {
            Event::Terminated { cell, outcome: Err(error), console: String::new() }
        }
        _ => Event::Described(cell, Err(error)),
    }
}

/// Returns the end of an instance's console without control characters.
pub(super) async fn console(
    provider: &dyn Provider,
    instance: &InstanceId,
) -> Result<String, ProviderError> {
    let read = provider.console(instance);
    let read = within(CONSOLE_TIMEOUT, "read a console", read).await?;
    Ok(read.chars().filter(|character| !is_unsafe_control(*character)).collect())
}

/// Returns the instances that the provider lists.
pub(super) async fn list_owned(provider: &dyn Provider) -> Result<Vec<Instance>, ProviderError> {
    within(CONSOLE_TIMEOUT, "list instances", provider.list_owned()).await
}

/// Logs the failure of a call.
pub(super) fn log(event: &Event) {
    let (cell, doing, error) = match event {
        Event::Launched(cell, Err(error)) => (cell, "launch", error),
        Event::Attached(cell, Err(error)) => (cell, "attach", error),
        Event::Detached(cell, Err(error)) => (cell, "detach", error),
        Event::Terminated { cell, outcome: Err(error), .. } => {
            return tracing::error!(
                %cell,
                error = error as &dyn std::error::Error,
                "cell termination failed, will be retried"
            );
        }
        _ => return,
    };
    let error: &dyn std::error::Error = error;
    tracing::warn!(%cell, error, "provider could not {doing} a cell");
}

async fn bounded<T>(
    doing: &str,
    call: impl Future<Output = Result<T, ProviderError>>,
) -> Result<T, ProviderError> {
    within(CALL_TIMEOUT, doing, call).await
}

/// Returns the end of the first instance's console, without the control characters that a cell may
/// write.
async fn read_console(provider: &dyn Provider, instances: &[InstanceId]) -> Option<String> {
    let text = console(provider, instances.first()?).await.ok()?;
    let text = text.trim_end();
    let begin = text.ceil_char_boundary(text.len().saturating_sub(MAX_CONSOLE_BYTES));
    Some(text[begin..].to_owned())
}
