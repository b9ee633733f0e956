//! The conformance suite: the contract that every provider must keep.
//!
//! A subject is a provider that can play faults. `contract` has the cases of single calls.
//! `outcomes` has cases in which the daemon's cells run over the provider: nothing ends without
//! proof, no pod has two cells, nothing is left. conformance.md has the table of all cases.

use std::{path::PathBuf, sync::Arc, time::Duration};

use kiyot_engine::{
    id::CellId,
    provider::{Capabilities, InstanceId, Owner, Provider},
};

use super::sim_provider::SimProvider;

mod contract;
#[cfg(feature = "ec2")]
mod ec2;
pub(crate) mod fault;
mod netns;
mod outcomes;
mod qemu;
mod recorder;
mod world;

use fault::{Fault, Gate, reason_without_meaning};
use netns::NetnsSubject;
use qemu::QemuSubject;

/// The time for which an API is down in the cases of an outage.
const OUTAGE: Duration = Duration::from_secs(30 * 60);
/// The listings of an outage beside a second provider: enough listings to end its cells.
const SHORT_OUTAGE_LISTINGS: usize = 5;

/// A provider under test.
trait Subject: Send + Sync + 'static {
    /// Returns the provider that a daemon has after its start.
    fn provider(&self) -> Arc<dyn Provider>;
    /// Returns the capabilities with which the daemon's cells run: the provider's capabilities,
    /// with times that are short enough for a test.
    fn capabilities(&self) -> Capabilities {
        self.provider().capabilities()
    }
    /// Returns the owner of the instances.
    fn owner(&self) -> Owner {
        Owner::default()
    }
    /// Returns the id of an instance that never existed.
    fn unknown(&self) -> InstanceId {
        InstanceId(CellId::mint().unwrap().to_string())
    }
    /// Begins a fault. Returns whether the fault has a meaning for the provider.
    fn inject(&self, fault: Fault) -> bool;
    /// Ends all faults.
    fn heal(&self);
    /// Returns whether a launch is held by [`Fault::HeldLaunch`].
    fn holds_launch(&self) -> bool;
    /// Returns the socket to which the agents of its instances connect; `None` if agents are
    /// played.
    fn gateway_socket(&self) -> Option<PathBuf> {
        None
    }
    /// Returns the gate at which agents wait before they end their pods, if agents do so.
    fn shutdowns(&self) -> Option<&Gate>;
    /// Lets time pass until all accepted calls are done and every list is current.
    fn settle(&self);
    /// Returns the instances that really run, with their cells.
    fn running(&self) -> Vec<(InstanceId, CellId)>;
    /// Asserts that nothing of these instances is left.
    fn assert_nothing_left(&self, launched: &[InstanceId]);
    /// Returns the listings of an outage.
    fn listings_of_outage(&self) -> usize;
    /// Returns a second provider of the daemon, which has no faults.
    fn second(&self) -> Option<&Arc<SimProvider>> {
        None
    }
}

/// The simulated cloud under test.
struct SimSubject(Arc<SimProvider>);

impl SimSubject {
    fn new() -> Self {
        Self(Arc::new(SimProvider::new()))
    }
}

impl Subject for SimSubject {
    fn provider(&self) -> Arc<dyn Provider> {
        Arc::clone(&self.0) as _
    }

    fn inject(&self, fault: Fault) -> bool {
        self.0.inject(fault);
        true
    }

    fn heal(&self) {
        self.0.heal();
    }

    fn holds_launch(&self) -> bool {
        self.0.holds_launch()
    }

    fn shutdowns(&self) -> Option<&Gate> {
        Some(&self.0.shutdowns)
    }

    fn settle(&self) {
        self.0.pass(Duration::from_secs(600));
    }

    fn running(&self) -> Vec<(InstanceId, CellId)> {
        self.0.running()
    }

    fn assert_nothing_left(&self, _launched: &[InstanceId]) {
        assert_eq!(self.running(), []);
    }

    fn listings_of_outage(&self) -> usize {
        listings(kiyot_sim::cloud::CAPABILITIES.listing_period)
    }
}

/// Cells on the node, with the simulated cloud as the second provider of the daemon.
struct BesideSim(NetnsSubject, Arc<SimProvider>);

impl BesideSim {
    fn new() -> Self {
        Self(NetnsSubject::new(), Arc::new(SimProvider::new()))
    }
}

impl Subject for BesideSim {
    fn provider(&self) -> Arc<dyn Provider> {
        self.0.provider()
    }

    fn inject(&self, fault: Fault) -> bool {
        self.0.inject(fault)
    }

    fn heal(&self) {
        self.0.heal();
    }

    fn holds_launch(&self) -> bool {
        self.0.holds_launch()
    }

    fn shutdowns(&self) -> Option<&Gate> {
        self.0.shutdowns()
    }

    fn settle(&self) {
        self.0.settle();
    }

    fn running(&self) -> Vec<(InstanceId, CellId)> {
        self.0.running()
    }

    fn assert_nothing_left(&self, launched: &[InstanceId]) {
        self.0.assert_nothing_left(launched);
    }

    fn listings_of_outage(&self) -> usize {
        SHORT_OUTAGE_LISTINGS
    }

    fn second(&self) -> Option<&Arc<SimProvider>> {
        Some(&self.1)
    }
}

/// Returns the number of listings in an outage.
fn listings(period: Duration) -> usize {
    usize::try_from(OUTAGE.as_secs() / period.as_secs()).unwrap()
}

/// Returns whether a provider can play the fault of a case. A provider that can't must refuse the
/// fault itself, and have a reason in the table.
fn applies(provider: &str, subject: &impl Subject, fault: Option<Fault>) -> bool {
    let Some(fault) = fault.filter(|fault| reason_without_meaning(provider, *fault).is_some())
    else {
        return true;
    };
    assert!(!subject.inject(fault), "{provider} can play {fault:?}");
    false
}

/// Runs each case with every provider, unless its fault has no meaning for the provider. Cases of
/// single calls also run with virtual machines. The other cases also run with virtual machines that
/// have an agent, and with cells on the node beside a second provider.
macro_rules! conformance {
    ($($module:ident :: $case:ident $(($fault:ident))?)*) => {
        /// All cases with their faults.
        const CASES: &[(&str, Option<Fault>)] =
            &[$((stringify!($case), conformance!(fault $($fault)?))),*];

        #[cfg(feature = "ec2")]
        mod of_ec2 {
            use super::{ec2::Ec2Subject, *};
            $(conformance!(case "ec2", Ec2Subject::new().await, $module $case $($fault)?);)*
        }
        mod of_netns {
            use super::*;
            $(conformance!(case "netns", NetnsSubject::new(), $module $case $($fault)?);)*
        }
        mod of_netns_beside_sim {
            use super::*;
            $(conformance!(two $module $case $($fault)?);)*
        }
        mod of_qemu {
            use super::*;
            $(conformance!(case "qemu", QemuSubject::new(), $module $case $($fault)?);)*
        }
        mod of_qemu_machines {
            use super::*;
            $(conformance!(machine $module $case $($fault)?);)*
        }
        mod of_qemu_agents {
            use super::*;
            $(conformance!(agent $module $case $($fault)?);)*
        }
        mod of_sim {
            use super::*;
            $(conformance!(case "sim", SimSubject::new(), $module $case $($fault)?);)*
        }
    };
    (machine contract $case:ident $($fault:ident)?) => {
        conformance!(case "qemu", QemuSubject::with_machines(), contract $case $($fault)?);
    };
    // Single calls concern a single provider. The next two cases take long.
    (two contract $case:ident $($fault:ident)?) => {};
    (two outcomes late_reply_of_a_launch_leaves_nothing $fault:ident) => {};
    (two outcomes slow_termination_keeps_its_cell $fault:ident) => {};
    (two outcomes $case:ident $($fault:ident)?) => {
        conformance!(case "netns", BesideSim::new(), outcomes $case $($fault)?);
    };
    // The agents of these cases are played, and a guest can't be.
    (machine outcomes $case:ident $($fault:ident)?) => {};
    (agent contract $case:ident $($fault:ident)?) => {};
    (agent outcomes $case:ident $($fault:ident)?) => {
        conformance!(
            case
            #[ignore = "takes long without KVM; make test-vm"]
            "qemu", QemuSubject::with_agents(), outcomes $case $($fault)?
        );
    };
    (fault) => { None };
    (fault $fault:ident) => { Some(Fault::$fault) };
    (
        case $(#[$attribute:meta])?
        $provider:literal, $subject:expr, $module:ident $case:ident $($fault:ident)?
    ) => {
        #[tokio::test]
        $(#[$attribute])?
        async fn $case() {
            let subject = Arc::new($subject);
            if applies($provider, &*subject, conformance!(fault $($fault)?)) {
                $module::$case(subject).await;
            }
        }
    };
}

conformance! {
    contract::launch_with_the_same_token_is_one_instance
    contract::launch_that_was_cut_is_repeated_as_one_instance (HeldLaunch)
    contract::launch_that_arrives_late_is_the_repeated_launch (LateLaunch)
    contract::refused_launch_runs_nothing (RefusedLaunch)
    contract::instance_is_described_until_it_has_ended
    contract::instance_that_ended_by_itself_is_listed_as_ended (Interruption)
    contract::unknown_instance_is_not_found
    contract::unknown_instance_spoils_no_batch
    contract::attachment_is_repeatable
    contract::termination_is_repeatable
    contract::slow_termination_is_no_end (SlowEnd)
    contract::failed_termination_is_repeated (FailedEnd)
    contract::call_in_an_outage_proves_nothing (Outage)
    contract::denied_call_has_no_effect (Denied)
    contract::throttled_call_has_no_effect (Throttled)
    outcomes::lost_reply_of_a_launch_makes_one_cell (HeldLaunch)
    outcomes::late_reply_of_a_launch_leaves_nothing (HeldLaunch)
    outcomes::late_launch_leaves_nothing (LateLaunch)
    outcomes::refused_launch_leaves_nothing (RefusedLaunch)
    outcomes::instance_that_is_not_found_yet_ends_no_cell (UnseenInstance)
    outcomes::stale_list_ends_no_cell (StaleList)
    outcomes::partial_list_ends_no_cell (PartialList)
    outcomes::instance_that_ended_by_itself_ends_its_cell (Interruption)
    outcomes::daemon_that_dies_while_a_pod_stops_continues_the_stop (HeldShutdown)
    outcomes::slow_termination_keeps_its_cell (SlowEnd)
    outcomes::failed_termination_is_retried_until_the_end (FailedEnd)
    outcomes::twin_ends_and_its_cell_lives (Twin)
    outcomes::instance_of_another_authority_lives_and_stops_launches (OtherAuthority)
    outcomes::outage_of_half_an_hour_ends_nothing (Outage)
    outcomes::denied_calls_leave_nothing (Denied)
    outcomes::throttled_calls_are_repeated (Throttled)
}

/// Returns the table of all cases, in Markdown.
fn table() -> String {
    let providers = ["ec2", "netns", "qemu", "sim"];
    let rule = " --- |".repeat(providers.len());
    let mut text = format!("| case | {} |\n| --- |{rule}\n", providers.join(" | "));
    for (case, fault) in CASES {
        let results = providers.map(|provider| {
            let reason = fault.and_then(|fault| reason_without_meaning(provider, fault));
            reason.map_or("passes".to_owned(), |reason| format!("not applicable: {reason}"))
        });
        text.push_str(&format!("| {} | {} |\n", case.replace('_', " "), results.join(" | ")));
    }
    text
}

#[test]
fn table_of_cases_is_current() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/infra/conformance.md");
    let page = std::fs::read_to_string(path).unwrap();
    let table = table();
    assert!(page.contains(&table), "the table in {path} must be:\n{table}");
}
