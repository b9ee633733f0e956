//! Faults of the simulated world.

/// The frequencies of faults: each happens once in so many times; 0 is never.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Faults {
    /// A kill of the daemon, by effects.
    pub crash: u32,
    /// A commit that fails, by commits.
    pub commit: u32,
    /// A request that never reaches the provider, by calls.
    pub lost_request: u32,
    /// A reply that is lost, by calls.
    pub lost_reply: u32,
    /// A request that arrives after its caller gave up, by calls.
    pub late_request: u32,
    /// A call that is throttled, by calls.
    pub throttled: u32,
    /// A call that fails, by calls.
    pub failed: u32,
    /// A list without some of its instances, by lists.
    pub partial_list: u32,
    /// An instance whose agent never starts, by instances.
    pub dead_boot: u32,
    /// An instance that ends by itself while it runs a pod, by instances.
    pub interruption: u32,
    /// A shutdown that an agent does not confirm, by shutdowns.
    pub deaf_agent: u32,
    /// An outage of the provider of 30 minutes, by hours.
    pub outage: u32,
}

impl Faults {
    /// No faults.
    pub const NONE: Self = Self {
        crash: 0,
        commit: 0,
        lost_request: 0,
        lost_reply: 0,
        late_request: 0,
        throttled: 0,
        failed: 0,
        partial_list: 0,
        dead_boot: 0,
        interruption: 0,
        deaf_agent: 0,
        outage: 0,
    };

    /// Every fault, much more often than in reality.
    pub const DENSE: Self = Self {
        crash: 150,
        commit: 100,
        lost_request: 12,
        lost_reply: 12,
        late_request: 12,
        throttled: 10,
        failed: 15,
        partial_list: 5,
        dead_boot: 12,
        interruption: 10,
        deaf_agent: 8,
        outage: 6,
    };

    /// Faults as a bad day has them.
    pub const USUAL: Self = Self {
        crash: 20_000,
        commit: 50_000,
        lost_request: 2000,
        lost_reply: 2000,
        late_request: 2000,
        throttled: 100,
        failed: 500,
        partial_list: 50,
        dead_boot: 300,
        interruption: 200,
        deaf_agent: 300,
        outage: 48,
    };
}
