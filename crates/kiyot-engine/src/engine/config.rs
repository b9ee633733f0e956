//! The configuration of the engine.

use std::time::Duration;

use kiyot_values::backoff::doubled;

use crate::{
    engine::{Engine, Limits},
    provider::{Owner, TagRules},
};

/// The longest pause between repeated calls.
pub(super) const MAX_RETRY_PAUSE: Duration = Duration::from_secs(60);

/// The configuration of the engine.
#[derive(Debug, Clone)]
pub struct EngineConfig {
    /// The limits of launches.
    pub limits: Limits,
    /// Bounds the time from an order until a cell is bound to its pod.
    pub launch_timeout: Duration,
    /// The validity of a cell's tokens.
    pub token_ttl: Duration,
    /// The boot id of the node.
    pub boot_id: String,
    /// The time for which a refused offering is avoided.
    pub refusal_pause: Duration,
    /// The pause after a failed call.
    pub retry_pause: Duration,
    /// The time for which a pod that prefers spot waits for spot before it is launched on demand.
    pub spot_deadline: Duration,
    /// The time without contact after which a cell has certainly stopped its pod: the agent's
    /// limit, the time in which the agent notices it, and the time in which containers end.
    pub orphan_timeout: Duration,
    /// The time for which the agent of a bound cell may be silent; `None` for no limit.
    pub healthy_timeout: Option<Duration>,
    /// The owner of the instances.
    pub owner: Owner,
    /// The tags of instances beside the owner's tags.
    pub tag_rules: TagRules,
    /// True if instances of this owner with another fingerprint count as strays.
    pub take_over: bool,
}

impl EngineConfig {
    /// Returns the pause before the next attempt. It doubles with each failure.
    pub(super) fn pause_after(&self, failures: u32) -> Duration {
        let first = self.retry_pause;
        doubled(first, failures, MAX_RETRY_PAUSE.max(first))
    }
}

impl Engine {
    /// Sets the time limit of further launches and the validity of their tokens.
    pub fn set_launch_times(&mut self, launch_timeout: Duration, token_ttl: Duration) {
        (self.config.launch_timeout, self.config.token_ttl) = (launch_timeout, token_ttl);
    }
}
