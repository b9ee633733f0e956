//! The calls of a cell's task to the provider: one at a time, each with a time limit.

use std::{future::Future, net::IpAddr, pin::Pin, sync::Arc, time::Duration};

use kiyot_link::channel::is_unsafe_control;
use tokio::time::timeout;

use super::super::{
    id::CellId,
    providers::{Attachment, InstanceId, LaunchSpec, Provider, ProviderError},
};

/// Bounds a provider call, beyond the provider's own limits.
const CALL_TIMEOUT: Duration = Duration::from_secs(300);
/// Bounds the call that reads a console.
const CONSOLE_TIMEOUT: Duration = Duration::from_secs(10);
/// Bounds the part of a console that an error quotes.
const MAX_CONSOLE_BYTES: usize = 4096;

/// The outcome of a provider call.
pub(super) enum Outcome {
    Launched(Result<InstanceId, ProviderError>),
    Attached(Result<Vec<IpAddr>, ProviderError>),
    Terminated { ended: Result<(), ProviderError>, console: Option<String> },
}

/// A pending provider call.
pub(super) type ProviderCall = Pin<Box<dyn Future<Output = Outcome> + Send>>;

/// Launches the instance of a cell.
pub(super) fn launch(provider: Arc<dyn Provider>, spec: LaunchSpec, token: String) -> ProviderCall {
    Box::pin(async move {
        let launched = timeout(CALL_TIMEOUT, provider.launch(&spec, &token)).await;
        Outcome::Launched(
            launched
                .unwrap_or_else(|_| Err(ProviderError::too_slow("launch a cell", CALL_TIMEOUT)))
                .map(|instance| instance.id),
        )
    })
}

/// Attaches an instance to its pod's network.
pub(super) fn attach(
    provider: Arc<dyn Provider>,
    instance: InstanceId,
    attachment: Attachment,
) -> ProviderCall {
    Box::pin(async move {
        let attached = timeout(CALL_TIMEOUT, provider.attach(&instance, &attachment)).await;
        Outcome::Attached(attached.unwrap_or_else(|_| {
            Err(ProviderError::too_slow("attach a cell to its network", CALL_TIMEOUT))
        }))
    })
}

/// Terminates a cell's instance, or, if it is unknown, all instances that the provider lists for
/// the cell. Reads the console before, if it is wanted.
pub(super) fn terminate(
    provider: Arc<dyn Provider>,
    cell: CellId,
    instance: Option<InstanceId>,
    with_console: bool,
) -> ProviderCall {
    Box::pin(async move {
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
            let console =
                if with_console { console(provider.as_ref(), &instances).await } else { None };
            if !instances.is_empty() {
                provider.terminate(&instances).await?;
            }
            Ok(console)
        };
        match timeout(CALL_TIMEOUT, ending)
            .await
            .unwrap_or_else(|_| Err(ProviderError::too_slow("end a cell", CALL_TIMEOUT)))
        {
            Ok(console) => Outcome::Terminated { ended: Ok(()), console },
            Err(error) => Outcome::Terminated { ended: Err(error), console: None },
        }
    })
}

/// Returns the end of the first instance's console without control characters: the cell wrote it.
async fn console(provider: &dyn Provider, instances: &[InstanceId]) -> Option<String> {
    let text = timeout(CONSOLE_TIMEOUT, provider.console(instances.first()?)).await.ok()?.ok()?;
    let text = text.trim_end();
    let begin = (text.len().saturating_sub(MAX_CONSOLE_BYTES)..=text.len())
        .find(|at| text.is_char_boundary(*at))?;
    Some(text.get(begin..)?.chars().filter(|character| !is_unsafe_control(*character)).collect())
}

/// Waits for the pending call, forever without a call.
pub(super) async fn pending(call: &mut Option<ProviderCall>) -> Outcome {
    let Some(pending) = call else { return std::future::pending().await };
    let outcome = pending.await;
    *call = None;
    outcome
}
