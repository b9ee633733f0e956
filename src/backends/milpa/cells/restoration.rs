//! Restores the node's parts of cells, such as hostPort rules, after a reboot of the node that the
//! cells outlived.

use std::{sync::Arc, time::Duration};

use kiyot_engine::provider::Provider;
use tokio::time::{sleep, timeout};

use super::providers::CellSource;

/// Bounds a restoration: a firewall transaction for each cell.
const RESTORATION_TIMEOUT: Duration = Duration::from_secs(300);
/// Bounds the creation of cgroups: a call of systemd for each pod.
const CGROUPS_TIMEOUT: Duration = Duration::from_secs(30);
/// The pause after the first failure; it doubles with each failure.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const MAX_PAUSE: Duration = Duration::from_secs(60);
/// Bounds the attempts, to about half an hour.
const MAX_ATTEMPTS: u32 = 35;

/// Restores the attachments that a provider made for the previous daemon, until the provider is
/// released.
pub(super) async fn run(source: Arc<CellSource>) {
    source.stop.run_until_cancelled(restore(&*source.provider)).await;
}

/// Makes the cgroups of running pods again, before the kubelet sees the pods. Only logs a failure,
/// because the node's pods must not wait.
pub(super) async fn cgroups(provider: &dyn Provider, parents: &[String]) {
    match timeout(CGROUPS_TIMEOUT, provider.restore_cgroups(parents)).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::warn!(
            error = &error as &dyn std::error::Error,
            "cgroups of running pods absent, the kubelet may restart the pods"
        ),
        Err(_) => tracing::warn!(
            seconds = CGROUPS_TIMEOUT.as_secs(),
            "cgroups of running pods not made in time, the kubelet may restart the pods"
        ),
    }
}

async fn restore(provider: &dyn Provider) {
    let mut pause = FIRST_PAUSE;
    for attempt in 1..=MAX_ATTEMPTS {
        match timeout(RESTORATION_TIMEOUT, provider.restore()).await {
            Ok(Ok(())) => return,
            Ok(Err(error)) => tracing::warn!(
                attempt,
                error = &error as &dyn std::error::Error,
                "attachments of cells not restored"
            ),
            Err(_) => tracing::warn!(
                attempt,
                seconds = RESTORATION_TIMEOUT.as_secs(),
                "restoration of attachments timed out"
            ),
        }
        sleep(pause).await;
        pause = (pause * 2).min(MAX_PAUSE);
    }
    tracing::error!(attempts = MAX_ATTEMPTS, "restoration of attachments given up");
}
