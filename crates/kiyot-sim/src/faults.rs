//! Faults of the simulated world.

/// Defines [`Faults`]: each fault with its frequencies in a dense and in a usual world.
macro_rules! faults {
    ($($(#[$doc:meta])* $name:ident: $dense:literal, $usual:literal;)*) => {
        /// The frequencies of faults: a fault happens once in this many times; 0: never.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub struct Faults {
            $($(#[$doc])* pub $name: u32,)*
        }

        impl Faults {
            /// The names of all faults.
            pub const NAMES: &[&str] = &[$(stringify!($name)),*];

            /// No faults.
            pub const NONE: Self = Self { $($name: 0),* };

            /// Every fault, far more often than in reality.
            pub const DENSE: Self = Self { $($name: $dense),* };

            /// Faults as on a bad day.
            pub const USUAL: Self = Self { $($name: $usual),* };

            /// Returns the faults of a dense world with only the named fault.
            #[cfg(test)]
            pub(super) fn only(name: &str) -> Self {
                let frequency = |fault: &str, dense| if fault == name { dense } else { 0 };
                Self { $($name: frequency(stringify!($name), $dense)),* }
            }
        }
    };
}

faults! {
    /// The daemon is killed, by effects.
    crash: 150, 20_000;
    /// A commit fails, by commits.
    commit: 100, 50_000;
    /// A request never reaches the provider, by calls.
    lost_request: 12, 2000;
    /// A reply is lost, by calls.
    lost_reply: 12, 2000;
    /// A request arrives after its caller gave up, by calls.
    late_request: 12, 2000;
    /// A call is throttled, by calls.
    throttled: 10, 100;
    /// A call fails, by calls.
    failed: 15, 500;
    /// A list lacks some of its instances, by lists.
    partial_list: 5, 50;
    /// A termination takes up to an hour, by terminations.
    slow_end: 10, 200;
    /// The provider has an outage of 30 minutes, by hours.
    outage: 6, 48;
    /// A zone has an outage of tens of minutes, by hours.
    zone_outage: 4, 48;
    /// New instances of a zone can't reach the daemon for tens of minutes, by hours.
    closed_zone: 4, 48;
    /// The node reaches neither agents nor the provider for minutes, by hours.
    node_cut: 6, 48;
    /// An offering has room for at most 2 instances for 10 minutes, by offerings.
    scarce: 3, 20;
    /// The agent of an instance never starts, by instances.
    dead_boot: 12, 300;
    /// An instance boots for up to 25 minutes, by instances.
    slow_boot: 15, 300;
    /// The provider interrupts an instance, by instances of the spot market.
    interruption: 6, 100;
    /// An instance is paused for minutes to hours, by instances that can be paused.
    pause: 5, 200;
    /// An instance loses its network for minutes to an hour, by instances.
    network_cut: 10, 300;
    /// An agent is killed, by instances.
    killed_agent: 10, 300;
    /// An agent does not confirm a shutdown, by shutdowns.
    deaf_agent: 8, 300;
    /// A pod is changed before its sandbox is run again, by runs.
    changed_pod: 12, 300;
    /// A call ends before its pod's sandbox runs, by runs.
    given_up: 6, 200;
}
