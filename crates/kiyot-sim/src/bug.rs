//! Bugs planted between the engine and its world, to prove that the simulation finds them.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use kiyot_engine::{
    engine::{Change, Effect, Effects, Event, OrderSpec},
    id::CellId,
    placement::{Needs, Requested},
    provider::{Capabilities, ErrorClass, Termination},
    request::{CellRequest, LaunchType},
};

/// A planted bug.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bug {
    /// A launch is called before it is recorded.
    LaunchBeforeRecord,
    /// A replay of a launch has another token.
    NewTokenOnReplay,
    /// A launch without a reply is taken for a failed launch.
    UnansweredIsFailure,
    /// An accepted termination is taken for a confirmed end.
    AcceptedIsConfirmed,
    /// An agent that does not reply is taken for an agent that has stopped its pod.
    SilenceIsShutdown,
    /// An instance absent from a list is taken for an ended instance.
    AbsenceIsEnd,
    /// The orphan timeout is taken for proof, although agents may be paused or stopped.
    OrphanTimeoutIsProof,
    /// A refused offering is requested again.
    RefusedIsKept,
    /// A connection that ends is not noticed.
    SilenceIsIgnored,
    /// A silent cell that connects again is not noticed.
    ReconnectIsIgnored,
    /// A warm cell is given to a pod without a check of the pod's needs.
    UnsuitedIsTaken,
    /// A warm cell is attached before its pod is recorded.
    TakenIsNotRecorded,
}

/// Changes a value if a bug is planted.
pub(super) fn planted<T>(bug: Option<Bug>, mut value: T, change: impl FnOnce(Bug, &mut T)) -> T {
    if let Some(bug) = bug {
        change(bug, &mut value);
    }
    value
}

impl Bug {
    /// All bugs.
    pub const ALL: [Self; 12] = [
        Self::LaunchBeforeRecord,
        Self::NewTokenOnReplay,
        Self::UnansweredIsFailure,
        Self::AcceptedIsConfirmed,
        Self::SilenceIsShutdown,
        Self::AbsenceIsEnd,
        Self::OrphanTimeoutIsProof,
        Self::RefusedIsKept,
        Self::SilenceIsIgnored,
        Self::ReconnectIsIgnored,
        Self::UnsuitedIsTaken,
        Self::TakenIsNotRecorded,
    ];

    /// Changes an order on its way to the engine.
    pub(super) fn on_order(self, spec: &mut OrderSpec) {
        if self == Self::UnsuitedIsTaken
            && let Some(choice) = spec.offers.iter_mut().find_map(|it| it.choice.as_mut())
        {
            let request =
                CellRequest { launch_type: LaunchType::SpotPreferred, ..Default::default() };
            let (requested, defaults) = (Requested::default(), &choice.rules.defaults);
            choice.needs = Arc::new(Needs::new(&request, &requested, defaults));
        }
    }

    /// Changes the provider's capabilities on their way to the engine.
    pub(super) fn on_capabilities(self, capabilities: &mut Capabilities) {
        match self {
            Self::AbsenceIsEnd => {
                capabilities.not_found_believed_after = Duration::from_millis(1);
            }
            Self::OrphanTimeoutIsProof => {
                capabilities.can_be_paused = false;
                capabilities.pods_control_agent = false;
            }
            _ => {}
        }
    }

    /// Changes an event on its way to the engine.
    /// `is_silent`: the connection's cell was silent.
    pub(super) fn on_event(self, event: &mut Event, is_silent: bool) {
        match (self, event) {
            (Self::SilenceIsIgnored, event @ Event::Disconnected(_)) => *event = Event::Tick,
            (Self::ReconnectIsIgnored, event @ Event::Connected(_)) if is_silent => {
                *event = Event::Tick;
            }
            (Self::UnansweredIsFailure, Event::Launched(_, Err(error)))
                if error.class == ErrorClass::Unanswered =>
            {
                // A refusal without an effect on the offering.
                error.class = ErrorClass::Capacity;
            }
            (Self::AcceptedIsConfirmed, Event::Terminated { outcome: Ok(progress), .. }) => {
                *progress = Termination::Confirmed;
            }
            (Self::SilenceIsShutdown, Event::ShutDown(_, ended)) => *ended = true,
            (Self::RefusedIsKept, Event::Launched(_, Err(error))) => error.refusal = None,
            _ => {}
        }
    }

    /// Changes effects on their way from the engine.
    pub(super) fn on_effects(self, effects: &mut Effects, number: u64) {
        match self {
            Self::LaunchBeforeRecord => {
                for at in 1..effects.len() {
                    let is_pair = matches!(
                        (&effects[at - 1].1, &effects[at].1),
                        (Effect::Commit { changes, .. }, Effect::Launch(_))
                            if changes.iter().any(|change| matches!(change, Change::Cell(..)))
                    );
                    if is_pair {
                        effects.swap(at - 1, at);
                    }
                }
            }
            Self::NewTokenOnReplay => {
                for (_, effect) in effects {
                    if let Effect::Launch(launch) = effect {
                        let mut other = launch.as_ref().clone();
                        other.token = format!("{}-{number}", other.token);
                        *launch = Arc::new(other);
                    }
                }
            }
            Self::TakenIsNotRecorded => {
                let attached: BTreeSet<CellId> = effects
                    .iter()
                    .filter(|(_, effect)| matches!(effect, Effect::Attach(..)))
                    .filter_map(|(cell, _)| cell.clone())
                    .collect();
                effects.retain(|(cell, effect)| {
                    !matches!(effect, Effect::Commit { .. })
                        || cell.as_ref().is_none_or(|cell| !attached.contains(cell))
                });
            }
            _ => {}
        }
    }
}
