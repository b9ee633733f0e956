//! Faults of the simulated world.

/// Defines [`Faults`]: each fault with its frequencies in a dense and in a usual world.
macro_rules! faults {
    ($($(#[$doc:meta])* $name:ident: $dense:literal, $usual:literal;)*) => {
        /// The frequencies of faults: each happens once in so many times; 0 is never.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub struct Faults {
            $($(#[$doc])* pub $name: u32,)*
        }

        impl Faults {
            /// The names of all faults.
            pub const NAMES: &[&str] = &[$(stringify!($name)),*];

            /// No faults.
            pub const NONE: Self = Self { $($name: 0),* };

            /// Every fault, much more often than in reality.
            pub const DENSE: Self = Self { $($name: $dense),* };

            /// Faults as a bad day has them.
            pub const USUAL: Self = Self { $($name: $usual),* };

            /// Returns the faults of a dense world with a name.
            #[cfg(test)]
            pub(super) fn only(name: &str) -> Self {
                let frequency = |fault: &str, dense| if fault == name { dense } else { 0 };
                Self { $($name: frequency(stringify!($name), $dense)),* }
            }
        }
    };
}

faults! {
    /// A kill of the daemon, by effects.
    crash: 150, 20_000;
    /// A commit that fails, by commits.
    commit: 100, 50_000;
    /// A request that never reaches the provider, by calls.
    lost_request: 12, 2000;
    /// A reply that is lost, by calls.
    lost_reply: 12, 2000;
    /// A request that arrives after its caller gave up, by calls.
    late_request: 12, 2000;
    /// A call that is throttled, by calls.
    throttled: 10, 100;
    /// A call that fails, by calls.
    failed: 15, 500;
    /// A list without some of its instances, by lists.
    partial_list: 5, 50;
    /// A termination that takes up to an hour, by terminations.
    slow_end: 10, 200;
    /// An outage of the provider of 30 minutes, by hours.
    outage: 6, 48;
    /// An outage of a zone of tens of minutes, by hours.
    zone_outage: 4, 48;
    /// A zone without a way out for tens of minutes, by hours.
    closed_zone: 4, 48;
    /// A node that reaches neither agents nor the provider for minutes, by hours.
    node_cut: 6, 48;
    /// An offering with room for 2 instances at most, for 10 minutes, by offerings.
    scarce: 3, 20;
    /// An instance whose agent never starts, by instances.
    dead_boot: 12, 300;
    /// An instance that boots for up to 25 minutes, by instances.
    slow_boot: 15, 300;
    /// An instance that the provider takes back, by instances of the spot market.
    interruption: 6, 100;
    /// An instance that is paused for minutes to hours, by instances that can be paused.
    pause: 5, 200;
    /// An instance that loses its network for minutes to an hour, by instances.
    network_cut: 10, 300;
    /// An agent that is killed, by instances.
    killed_agent: 10, 300;
    /// A shutdown that an agent does not confirm, by shutdowns.
    deaf_agent: 8, 300;
    /// A pod that is changed before its sandbox is run again, by runs.
    changed_pod: 12, 300;
    /// A call that leaves before its pod's sandbox runs, by runs.
    given_up: 6, 200;
}
