//! What systemd is told, if it asked to be told (sd_notify(3)).

use std::{convert::Infallible, future::pending, time::Duration};

use sd_notify::NotifyState;
use tokio::time::timeout;

use crate::proxy::Watchdog;

/// Of the time after which systemd takes the daemon for hung, how much passes between two signs of
/// life.
const PART: u32 = 3;

/// The daemon answers.
pub(super) fn ready() {
    tell(&[NotifyState::Ready]);
}

/// The configuration is being read again; [`ready`] is to follow, whatever comes of it.
pub(super) fn reloading() {
    match NotifyState::monotonic_usec_now() {
        Ok(now) => tell(&[NotifyState::Reloading, now]),
        Err(error) => {
            tracing::warn!(%error, "systemd could not be told that the configuration is being reloaded: there is no clock.")
        }
    }
}

/// The daemon was told to stop.
pub(super) fn stopping() {
    tell(&[NotifyState::Stopping]);
}

/// Gives signs of life for as long as the front door's thread gives them, if systemd asked for any
/// (`WatchdogSec=`). Never ready.
pub(super) async fn live(watchdog: &Watchdog) -> Infallible {
    let Some(limit) = sd_notify::watchdog_enabled().filter(|limit| !limit.is_zero()) else {
        return pending().await;
    };
    keep_alive(watchdog, limit, || tell(&[NotifyState::Watchdog])).await
}

async fn keep_alive(watchdog: &Watchdog, limit: Duration, sign: impl Fn()) -> Infallible {
    let mut times = tokio::time::interval((limit / PART).max(Duration::from_millis(1)));
    times.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        times.tick().await;
        match timeout(limit, watchdog.ping()).await {
            Ok(()) => sign(),
            Err(_) => tracing::error!(
                ?limit,
                "The thread of the CRI socket does nothing any more: systemd is given no sign of life."
            ),
        }
    }
}

fn tell(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::warn!(%error, "systemd could not be told of the daemon's state.");
    }
}
