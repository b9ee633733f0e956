//! The configuration of all cells.

use std::time::Duration;

use kiyot_config::WarmPool;
use kiyot_engine::{
    engine::Limits,
    provider::{Owner, TagRules},
};

/// The configuration of all cells.
#[derive(Debug, Clone)]
pub struct CellsConfig {
    /// The limits of launches.
    pub limits: Limits,
    /// Bounds the time from the order until the cell is bound to its pod.
    pub launch_timeout: Duration,
    /// The validity of a cell's tokens.
    pub token_ttl: Duration,
    /// The time without contact after which an agent stops its pod.
    pub orphan_timeout: Duration,
    /// The time for which the agent of a bound cell may be silent; `None` is no limit.
    pub healthy_timeout: Option<Duration>,
    /// The boot id of the node.
    pub boot_id: String,
    /// The owner of the instances.
    pub owner: Owner,
    /// Rules for further tags of instances, beside the owner's tags.
    pub tag_rules: TagRules,
    /// If true, instances of the same owner that another daemon launched are ended.
    pub take_over: bool,
    /// The time for which a pod that prefers spot waits for a spot instance.
    pub spot_deadline: Duration,
    /// The pools of cells that wait for pods.
    pub warm: Vec<WarmPool>,
    /// The time for which an offering without capacity is avoided.
    pub refusal_pause: Duration,
    /// The first pause after a failed termination, or a launch without an answer.
    pub retry_pause: Duration,
}

impl Default for CellsConfig {
    fn default() -> Self {
        Self {
            limits: Limits::default(),
            launch_timeout: Duration::from_secs(120),
            token_ttl: Duration::from_secs(600),
            orphan_timeout: Duration::from_secs(900),
            healthy_timeout: Some(Duration::from_secs(90)),
            boot_id: String::new(),
            owner: Owner::default(),
            tag_rules: TagRules::default(),
            take_over: false,
            spot_deadline: Duration::from_secs(60),
            warm: Vec::new(),
            refusal_pause: Duration::from_secs(180),
            retry_pause: Duration::from_secs(3),
        }
    }
}
