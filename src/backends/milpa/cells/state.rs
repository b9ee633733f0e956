//! What may become of a cell: `(state, event) -> (state, effects)`, and nothing that waits.
//!
//! At most one call to the provider runs for a cell: a launch, an attach or a termination. Whatever
//! goes wrong leads to a termination, and only a confirmed termination leads to `Gone`.

use std::{net::IpAddr, sync::Arc};

use kiyot_proto::store::CellPhase;

use super::super::providers::InstanceId;

/// Where a cell is in its life.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum State {
    /// Somebody wants it; nothing is written down yet.
    Requested,
    /// The provider is making its instance.
    Launching {
        /// It has called home already.
        linked: bool,
    },
    /// Its instance is there; it has not called home.
    Booting {
        /// The provider's name of it.
        instance: InstanceId,
    },
    /// It has called home; the provider is giving it the pod's network.
    Enrolled {
        /// The provider's name of it.
        instance: InstanceId,
    },
    /// It is the pod's.
    Bound {
        /// The provider's name of it.
        instance: InstanceId,
        /// The pod's addresses.
        addresses: Vec<IpAddr>,
    },
    /// It is being ended.
    Terminating {
        /// The provider's name of it; `None` if the provider has never said.
        instance: Option<InstanceId>,
        /// Why it ends.
        reason: Arc<str>,
        /// What is being done about it.
        step: Step,
    },
    /// It has ended, and nothing of it is left.
    Gone {
        /// Why.
        reason: Arc<str>,
    },
}

/// What is being done about a cell that is to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// A launch or an attach still runs: it must come to its end first, or it could make anew what
    /// is taken away.
    AwaitProvider,
    /// The provider has been asked to end it.
    Asked,
    /// The provider could not end it; it is asked again in a while.
    Pause,
}

/// What happened to a cell.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Event {
    /// It is to be made.
    Ordered,
    /// What must be on disk first is not: the effects after [`Effect::Record`] were not carried
    /// out.
    NotRecorded,
    /// The provider made its instance.
    Launched(InstanceId),
    /// The provider did not make it, or not all of it.
    LaunchFailed(Arc<str>),
    /// It has called home, perhaps again.
    Linked,
    /// The provider gave it the pod's network.
    Attached(Vec<IpAddr>),
    /// The provider did not.
    AttachFailed(Arc<str>),
    /// It must end: it was stopped, its time is over, or its instance has ended.
    End(Arc<str>),
    /// Nothing of it is left, says the provider.
    Terminated,
    /// The provider could not end it.
    NotTerminated,
    /// The pause is over.
    Again,
}

/// What is to be done, in this order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Effect {
    /// Write the state down. If that fails, do none of the effects after it, and say
    /// [`Event::NotRecorded`].
    Record,
    /// Write the state down as well as it can be done.
    Note,
    /// Have the provider make the instance.
    Launch,
    /// Have the provider give it the pod's network.
    Attach(InstanceId),
    /// Have the provider end it, or what it lists of it if it has no name yet.
    Terminate(Option<InstanceId>),
    /// Say [`Event::Again`] after a while.
    Pause,
    /// Tell that its control connection is there.
    TellConnected,
    /// Tell who asked for it that it is the pod's.
    TellBound,
    /// Tell who waits for its end, or for its beginning, that it could not be ended.
    TellNotTerminated,
    /// Tell all that it is gone.
    TellGone,
}

impl State {
    /// What the state becomes when something happens, and what is to be done about it. An event
    /// that means nothing in a state changes nothing.
    pub(super) fn on(self, event: Event) -> (Self, Vec<Effect>) {
        use Effect as F;
        use Event as E;
        match (self, event) {
            (Self::Requested, E::Ordered) => {
                (Self::Launching { linked: false }, vec![F::Record, F::Launch])
            }
            (Self::Requested, E::End(reason)) => ending(None, reason, false),

            (Self::Launching { .. }, E::Linked) => {
                (Self::Launching { linked: true }, vec![F::TellConnected])
            }
            (Self::Launching { linked: false }, E::Launched(instance)) => {
                (Self::Booting { instance }, vec![F::Record])
            }
            (Self::Launching { linked: true }, E::Launched(instance)) => enrolled(instance),
            (Self::Launching { .. }, E::LaunchFailed(reason)) => ending(None, reason, false),
            (Self::Launching { .. }, E::NotRecorded) => ending(None, NOT_RECORDED.into(), false),
            (Self::Launching { .. }, E::End(reason)) => ending(None, reason, true),

            (Self::Booting { instance }, E::Linked) => {
                let (state, mut effects) = enrolled(instance);
                effects.insert(0, F::TellConnected);
                (state, effects)
            }
            (Self::Booting { instance }, E::NotRecorded) => {
                ending(Some(instance), NOT_RECORDED.into(), false)
            }
            (Self::Booting { instance }, E::End(reason)) => ending(Some(instance), reason, false),

            (Self::Enrolled { instance }, E::Attached(addresses)) => {
                (Self::Bound { instance, addresses }, vec![F::Record, F::TellBound])
            }
            (Self::Enrolled { instance }, E::AttachFailed(reason)) => {
                ending(Some(instance), reason, false)
            }
            (Self::Enrolled { instance }, E::NotRecorded) => {
                ending(Some(instance), NOT_RECORDED.into(), false)
            }
            (Self::Enrolled { instance }, E::End(reason)) => ending(Some(instance), reason, true),
            (state @ Self::Enrolled { .. }, E::Linked) => (state, vec![F::TellConnected]),

            (state @ Self::Bound { .. }, E::Linked) => (state, vec![F::TellConnected]),
            (Self::Bound { instance, .. }, E::NotRecorded) => {
                ending(Some(instance), NOT_RECORDED.into(), false)
            }
            (Self::Bound { instance, .. }, E::End(reason)) => ending(Some(instance), reason, false),

            (
                Self::Terminating { reason, step: Step::AwaitProvider, .. },
                E::Launched(instance),
            ) => asked(Some(instance), reason),
            (
                Self::Terminating { instance, reason, step: Step::AwaitProvider },
                E::LaunchFailed(_) | E::Attached(_) | E::AttachFailed(_),
            ) => asked(instance, reason),
            (Self::Terminating { reason, step: Step::Asked, .. }, E::Terminated) => {
                (Self::Gone { reason }, vec![F::Note, F::TellGone])
            }
            (Self::Terminating { instance, reason, step: Step::Asked }, E::NotTerminated) => (
                Self::Terminating { instance, reason, step: Step::Pause },
                vec![F::TellNotTerminated, F::Pause],
            ),
            (Self::Terminating { instance, reason, step: Step::Pause }, E::Again | E::End(_)) => {
                asked(instance, reason)
            }

            (state, _) => (state, Vec::new()),
        }
    }

    /// As the store has it. `Requested` is never stored.
    pub(super) fn phase(&self) -> CellPhase {
        match self {
            Self::Requested => CellPhase::Requested,
            Self::Launching { .. } => CellPhase::Launching,
            Self::Booting { .. } => CellPhase::Booting,
            Self::Enrolled { .. } => CellPhase::Enrolled,
            Self::Bound { .. } => CellPhase::Bound,
            Self::Terminating { .. } => CellPhase::Terminating,
            Self::Gone { .. } => CellPhase::Gone,
        }
    }

    /// The provider's name of its instance, once there is one.
    pub(super) fn instance(&self) -> Option<&InstanceId> {
        match self {
            Self::Booting { instance }
            | Self::Enrolled { instance }
            | Self::Bound { instance, .. } => Some(instance),
            Self::Terminating { instance, .. } => instance.as_ref(),
            Self::Requested | Self::Launching { .. } | Self::Gone { .. } => None,
        }
    }

    /// Why it ends or ended.
    pub(super) fn reason(&self) -> Option<&Arc<str>> {
        match self {
            Self::Terminating { reason, .. } | Self::Gone { reason } => Some(reason),
            _ => None,
        }
    }

    /// Whether somebody may still be waiting for it to become a pod's.
    pub(super) fn is_beginning(&self) -> bool {
        matches!(
            self,
            Self::Requested | Self::Launching { .. } | Self::Booting { .. } | Self::Enrolled { .. }
        )
    }
}

/// Why a cell ends whose state could not be written down.
const NOT_RECORDED: &str = "its state could not be recorded";

fn enrolled(instance: InstanceId) -> (State, Vec<Effect>) {
    (State::Enrolled { instance: instance.clone() }, vec![Effect::Record, Effect::Attach(instance)])
}

fn ending(
    instance: Option<InstanceId>,
    reason: Arc<str>,
    provider_runs: bool,
) -> (State, Vec<Effect>) {
    if provider_runs {
        (State::Terminating { instance, reason, step: Step::AwaitProvider }, vec![Effect::Note])
    } else {
        (
            State::Terminating { instance: instance.clone(), reason, step: Step::Asked },
            vec![Effect::Note, Effect::Terminate(instance)],
        )
    }
}

fn asked(instance: Option<InstanceId>, reason: Arc<str>) -> (State, Vec<Effect>) {
    (
        State::Terminating { instance: instance.clone(), reason, step: Step::Asked },
        vec![Effect::Note, Effect::Terminate(instance)],
    )
}

#[cfg(test)]
mod tests;
