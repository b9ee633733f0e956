//! Notifications of systemd (sd_notify(3)).

use std::{convert::Infallible, future::pending, time::Duration};

use sd_notify::NotifyState;
use tokio::time::timeout;

use crate::proxy::Watchdog;

/// Watchdog notifications in each of systemd's watchdog periods.
const NOTIFICATIONS_PER_PERIOD: u32 = 3;

/// Notifies that the daemon is ready.
pub(super) fn ready() {
    notify(&[NotifyState::Ready]);
}

/// Notifies that the configuration is being reloaded. The caller then calls [`ready`] in any case.
pub(super) fn reloading() {
    match NotifyState::monotonic_usec_now() {
        Ok(now) => notify(&[NotifyState::Reloading, now]),
        Err(error) => {
            tracing::warn!(%error, "systemd not notified of the reload: the monotonic clock can't \
                                    be read")
        }
    }
}

/// Time after `drain_timeout` in which all parts of the daemon end and the store is closed.
const STOP_TIME: Duration = Duration::from_secs(30);

/// Notifies that the daemon stops, and extends `TimeoutStopSec=` for a longer `drain_timeout`.
pub(super) fn stopping(drain_timeout: Duration) {
    let limit = u32::try_from((drain_timeout + STOP_TIME).as_micros()).unwrap_or(u32::MAX);
    notify(&[NotifyState::Stopping, NotifyState::ExtendTimeoutUsec(limit)]);
}

/// Notifies the watchdog (`WatchdogSec=`) while the CRI socket's thread responds. Never completes.
pub(super) async fn feed_watchdog(watchdog: &Watchdog) -> Infallible {
    let Some(limit) = sd_notify::watchdog_enabled().filter(|limit| !limit.is_zero()) else {
        return pending().await;
    };
    keep_alive(watchdog, limit, || notify(&[NotifyState::Watchdog])).await
}

async fn keep_alive(watchdog: &Watchdog, limit: Duration, feed: impl Fn()) -> Infallible {
    let mut times =
        tokio::time::interval((limit / NOTIFICATIONS_PER_PERIOD).max(Duration::from_millis(1)));
    times.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        times.tick().await;
        match timeout(limit, watchdog.ping()).await {
            Ok(()) => feed(),
            Err(_) => tracing::error!(
                ?limit,
                "thread of the CRI socket does not respond, systemd watchdog not notified"
            ),
        }
    }
}

fn notify(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::warn!(%error, "systemd not notified");
    }
}
