//! The pure state machine of a cell: `(state, event) -> (state, effects)`.
//!
//! At most one provider call is pending for a cell: a launch, an attach or a termination. Every
//! failure leads to a termination, and only a confirmed termination leads to `Ended`.

use std::{net::IpAddr, sync::Arc};

use kiyot_proto::store::CellPhase;

use super::super::providers::InstanceId;

/// The state of a cell.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum State {
    /// Ordered, not yet recorded.
    Requested,
    /// The launch of its instance is pending.
    Launching {
        /// True once its agent has connected.
        connected: bool,
    },
    /// The instance is launched; its agent has not connected.
    Booting {
        /// The provider's id of the instance.
        instance: InstanceId,
    },
    /// Its agent has connected; the attachment to the pod's network is pending.
    Enrolled {
        /// The provider's id of the instance.
        instance: InstanceId,
    },
    /// Bound to its pod.
    Bound {
        /// The provider's id of the instance.
        instance: InstanceId,
        /// The pod's addresses.
        addresses: Vec<IpAddr>,
    },
    /// The termination has begun.
    Terminating {
        /// The provider's id of the instance; `None` if it is unknown.
        instance: Option<InstanceId>,
        /// The reason.
        reason: Arc<str>,
        /// The step of the termination.
        step: Step,
    },
    /// The end is confirmed, and nothing of the cell is left.
    Ended {
        /// The reason.
        reason: Arc<str>,
    },
}

/// The step of a termination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// A launch or an attach is pending and must finish first, or it could recreate what is
    /// removed.
    AwaitProvider,
    /// The provider's termination is pending.
    Pending,
    /// The termination failed; a retry follows.
    Backoff,
}

/// An event of a cell.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Event {
    /// The cell is ordered.
    Ordered,
    /// The record could not be written: the effects after [`Effect::Record`] were skipped.
    RecordFailed,
    /// The provider launched the instance.
    Launched(InstanceId),
    /// The provider did not launch the instance, or only partly.
    LaunchFailed(Arc<str>),
    /// Its agent has connected, perhaps again.
    Connected,
    /// The provider attached the pod's network.
    Attached(Vec<IpAddr>),
    /// The provider did not attach the network.
    AttachFailed(Arc<str>),
    /// The cell must end: it was stopped, timed out, or its instance has ended.
    End(Arc<str>),
    /// The provider confirms that nothing of the instance is left.
    Terminated,
    /// The provider could not terminate the instance.
    TerminationFailed,
    /// The pause before a retry is over.
    RetryDue,
}

/// An effect, carried out in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Effect {
    /// Records the state. On failure the effects after it are skipped, and [`Event::RecordFailed`]
    /// follows.
    Record,
    /// Records the state; a failure is logged.
    RecordIfPossible,
    /// Launches the instance.
    Launch,
    /// Attaches the instance to the pod's network.
    Attach(InstanceId),
    /// Terminates the instance, or without an id all listed instances of the cell.
    Terminate(Option<InstanceId>),
    /// Emits [`Event::RetryDue`] after a pause.
    StartRetryTimer,
    /// Publishes that the control connection is established.
    PublishConnected,
    /// Answers the launch: the cell is bound.
    AnswerBound,
    /// Answers pending callers: the cell could not be terminated.
    AnswerNotTerminated,
    /// Answers pending callers and publishes the confirmed end.
    PublishEnded,
}

impl State {
    /// Returns the next state and the effects of an event. An event without meaning in a state is
    /// ignored.
    pub(super) fn on(self, event: Event) -> (Self, Vec<Effect>) {
        use Effect as F;
        use Event as E;
        match (self, event) {
            (Self::Requested, E::Ordered) => {
                (Self::Launching { connected: false }, vec![F::Record, F::Launch])
            }
            (Self::Requested, E::End(reason)) => ending(None, reason, false),

            (Self::Launching { .. }, E::Connected) => {
                (Self::Launching { connected: true }, vec![F::PublishConnected])
            }
            (Self::Launching { connected: false }, E::Launched(instance)) => {
                (Self::Booting { instance }, vec![F::Record])
            }
            (Self::Launching { connected: true }, E::Launched(instance)) => enrolled(instance),
            (Self::Launching { .. }, E::LaunchFailed(reason)) => ending(None, reason, false),
            (Self::Launching { .. }, E::RecordFailed) => ending(None, NOT_RECORDED.into(), false),
            (Self::Launching { .. }, E::End(reason)) => ending(None, reason, true),

            (Self::Booting { instance }, E::Connected) => {
                let (state, mut effects) = enrolled(instance);
                effects.insert(0, F::PublishConnected);
                (state, effects)
            }
            (Self::Booting { instance }, E::RecordFailed) => {
                ending(Some(instance), NOT_RECORDED.into(), false)
            }
            (Self::Booting { instance }, E::End(reason)) => ending(Some(instance), reason, false),

            (Self::Enrolled { instance }, E::Attached(addresses)) => {
                (Self::Bound { instance, addresses }, vec![F::Record, F::AnswerBound])
            }
            (Self::Enrolled { instance }, E::AttachFailed(reason)) => {
                ending(Some(instance), reason, false)
            }
            (Self::Enrolled { instance }, E::RecordFailed) => {
                ending(Some(instance), NOT_RECORDED.into(), false)
            }
            (Self::Enrolled { instance }, E::End(reason)) => ending(Some(instance), reason, true),
            (state @ Self::Enrolled { .. }, E::Connected) => (state, vec![F::PublishConnected]),

            (state @ Self::Bound { .. }, E::Connected) => (state, vec![F::PublishConnected]),
            (Self::Bound { instance, .. }, E::RecordFailed) => {
                ending(Some(instance), NOT_RECORDED.into(), false)
            }
            (Self::Bound { instance, .. }, E::End(reason)) => ending(Some(instance), reason, false),

            (
                Self::Terminating { reason, step: Step::AwaitProvider, .. },
                E::Launched(instance),
            ) => terminating(Some(instance), reason),
            (
                Self::Terminating { instance, reason, step: Step::AwaitProvider },
                E::LaunchFailed(_) | E::Attached(_) | E::AttachFailed(_),
            ) => terminating(instance, reason),
            (Self::Terminating { reason, step: Step::Pending, .. }, E::Terminated) => {
                (Self::Ended { reason }, vec![F::RecordIfPossible, F::PublishEnded])
            }
            (Self::Terminating { instance, reason, step: Step::Pending }, E::TerminationFailed) => {
                (
                    Self::Terminating { instance, reason, step: Step::Backoff },
                    vec![F::AnswerNotTerminated, F::StartRetryTimer],
                )
            }
            (
                Self::Terminating { instance, reason, step: Step::Backoff },
                E::RetryDue | E::End(_),
            ) => terminating(instance, reason),

            (state, _) => (state, Vec::new()),
        }
    }

    /// Returns the phase for the record. `Requested` is never stored.
    pub(super) fn phase(&self) -> CellPhase {
        match self {
            Self::Requested => CellPhase::Requested,
            Self::Launching { .. } => CellPhase::Launching,
            Self::Booting { .. } => CellPhase::Booting,
            Self::Enrolled { .. } => CellPhase::Enrolled,
            Self::Bound { .. } => CellPhase::Bound,
            Self::Terminating { .. } => CellPhase::Terminating,
            Self::Ended { .. } => CellPhase::Gone,
        }
    }

    /// Returns the provider's id of the instance, if it is known.
    pub(super) fn instance(&self) -> Option<&InstanceId> {
        match self {
            Self::Booting { instance }
            | Self::Enrolled { instance }
            | Self::Bound { instance, .. } => Some(instance),
            Self::Terminating { instance, .. } => instance.as_ref(),
            Self::Requested | Self::Launching { .. } | Self::Ended { .. } => None,
        }
    }

    /// Returns the reason of the termination.
    pub(super) fn reason(&self) -> Option<&Arc<str>> {
        match self {
            Self::Terminating { reason, .. } | Self::Ended { reason } => Some(reason),
            _ => None,
        }
    }

    /// Returns true before the cell is bound or terminating.
    pub(super) fn is_launching(&self) -> bool {
        matches!(
            self,
            Self::Requested | Self::Launching { .. } | Self::Booting { .. } | Self::Enrolled { .. }
        )
    }
}

/// The reason of a cell whose state could not be recorded.
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
        (
            State::Terminating { instance, reason, step: Step::AwaitProvider },
            vec![Effect::RecordIfPossible],
        )
    } else {
        (
            State::Terminating { instance: instance.clone(), reason, step: Step::Pending },
            vec![Effect::RecordIfPossible, Effect::Terminate(instance)],
        )
    }
}

fn terminating(instance: Option<InstanceId>, reason: Arc<str>) -> (State, Vec<Effect>) {
    (
        State::Terminating { instance: instance.clone(), reason, step: Step::Pending },
        vec![Effect::RecordIfPossible, Effect::Terminate(instance)],
    )
}

#[cfg(test)]
mod tests;
