//! The periodic listing of the provider's instances.

use std::{sync::Arc, time::Duration};

use tokio::time::timeout;

use super::{
    engine::Event,
    shared::{Shared, now},
};

/// Bounds a listing of the provider's instances.
const LIST_TIMEOUT: Duration = Duration::from_secs(60);

/// Lists the provider's instances at each period, and at once when a link breaks, until the daemon
/// stops.
pub(super) async fn run(shared: Arc<Shared>) {
    let period = shared.provider.capabilities().listing_period;
    loop {
        tokio::select! {
            () = shared.stop.cancelled() => return,
            () = list(&shared) => {}
        }
        tokio::select! {
            () = shared.stop.cancelled() => return,
            () = shared.list_now.notified() => {}
            () = tokio::time::sleep(period) => {}
        }
    }
}

async fn list(shared: &Arc<Shared>) {
    let began = now().boot;
    match timeout(LIST_TIMEOUT, shared.provider.list_owned()).await {
        Ok(Ok(instances)) => shared.handle(Event::Listed { began, instances }),
        Ok(Err(error)) => tracing::warn!(
            error = &error as &dyn std::error::Error,
            "provider instances not listed"
        ),
        Err(_) => tracing::warn!(
            seconds = LIST_TIMEOUT.as_secs(),
            "listing of provider instances timed out"
        ),
    }
}
