//! The calls to the provider that a cell's task makes: one at a time, each in its time.

use std::{future::Future, net::IpAddr, pin::Pin, sync::Arc, time::Duration};

use kiyot_link::channel::is_no_word;
use tokio::time::timeout;

use super::super::{
    id::CellId,
    providers::{Attachment, InstanceId, LaunchSpec, Provider, ProviderError},
};

/// Beyond the provider's own bounds: how long one of its calls may take.
const CALL_LIMIT: Duration = Duration::from_secs(300);
/// How long the provider may take to show a console, and how much of it is told.
const CONSOLE_LIMIT: (Duration, usize) = (Duration::from_secs(10), 4096);

/// What a call to the provider came to.
pub(super) enum Outcome {
    Launched(Result<InstanceId, ProviderError>),
    Attached(Result<Vec<IpAddr>, ProviderError>),
    Terminated { ended: Result<(), ProviderError>, console: Option<String> },
}

/// A call that runs.
pub(super) type Job = Pin<Box<dyn Future<Output = Outcome> + Send>>;

/// Makes the instance of a cell.
pub(super) fn launch(provider: Arc<dyn Provider>, spec: LaunchSpec, token: String) -> Job {
    Box::pin(async move {
        let launched = timeout(CALL_LIMIT, provider.launch(&spec, &token)).await;
        Outcome::Launched(
            launched
                .unwrap_or_else(|_| Err(ProviderError::too_slow("launch a cell", CALL_LIMIT)))
                .map(|instance| instance.id),
        )
    })
}

/// Gives an instance its pod's network.
pub(super) fn attach(
    provider: Arc<dyn Provider>,
    instance: InstanceId,
    attachment: Attachment,
) -> Job {
    Box::pin(async move {
        let attached = timeout(CALL_LIMIT, provider.attach(&instance, &attachment)).await;
        Outcome::Attached(attached.unwrap_or_else(|_| {
            Err(ProviderError::too_slow("attach a cell to its network", CALL_LIMIT))
        }))
    })
}

/// Ends a cell's instance, or, if it is not known, all that the provider lists of the cell; before
/// that its console is looked at, if it is wanted.
pub(super) fn end(
    provider: Arc<dyn Provider>,
    cell: CellId,
    instance: Option<InstanceId>,
    with_console: bool,
) -> Job {
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
        match timeout(CALL_LIMIT, ending)
            .await
            .unwrap_or_else(|_| Err(ProviderError::too_slow("end a cell", CALL_LIMIT)))
        {
            Ok(console) => Outcome::Terminated { ended: Ok(()), console },
            Err(error) => Outcome::Terminated { ended: Err(error), console: None },
        }
    })
}

/// The end of what the first of some instances printed, as words: what is in it is the cell's.
async fn console(provider: &dyn Provider, instances: &[InstanceId]) -> Option<String> {
    let (limit, most) = CONSOLE_LIMIT;
    let text = timeout(limit, provider.console(instances.first()?)).await.ok()?.ok()?;
    let text = text.trim_end();
    let begin =
        (text.len().saturating_sub(most)..=text.len()).find(|at| text.is_char_boundary(*at))?;
    Some(text.get(begin..)?.chars().filter(|character| !is_no_word(*character)).collect())
}

/// Waits for the call that runs; forever if there is none.
pub(super) async fn running(job: &mut Option<Job>) -> Outcome {
    let Some(call) = job else { return std::future::pending().await };
    let outcome = call.await;
    *job = None;
    outcome
}
