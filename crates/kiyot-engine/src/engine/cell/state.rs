//! The state machine of a cell: `(state, event) -> (state, effects)`. `state/transitions.md` draws
//! all transitions.
//!
//! At most one call to the provider is pending for a cell. Every failure leads to a termination,
//! and only proof leads to `Ended`: a confirmed termination, or evidence that the engine accepts.

use std::{net::IpAddr, sync::Arc};

use kiyot_proto::store::CellPhase;

use crate::{
    engine::{
        Launch,
        cell::{End, OpenLaunch},
    },
    provider::{Attached, InstanceId, PodNetwork},
};

/// The state of a cell.
#[derive(Debug, Clone)]
pub enum State {
    /// Created, not yet recorded.
    Requested,
    /// The launch of its instance is recorded, and has no answer yet.
    Launching {
        /// True once its agent has connected.
        connected: bool,
        /// The progress of the call.
        call: LaunchCall,
        /// The launch.
        launch: OpenLaunch,
    },
    /// The instance is launched; its agent has not connected.
    Booting {
        /// The provider's id of the instance.
        instance: InstanceId,
    },
    /// Its agent has connected; no order wants the cell now.
    Idle {
        /// The provider's id of the instance.
        instance: InstanceId,
    },
    /// The attachment to its pod's network is recorded, and pending.
    Binding {
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
    /// The pod ends before its instance does.
    Stopping(End, InstanceId, StopStep),
    /// The termination of the instance has begun.
    Terminating(End, EndStep),
    /// The end is proven, and nothing of the cell is left.
    Ended(End),
}

/// The progress of a launch's call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LaunchCall {
    /// The call is pending.
    Pending,
    /// The outcome is unknown; a replay follows.
    Backoff,
    /// The outcome is unknown and the token has expired: the listing must show the instance.
    Searching,
}

/// The step of a pod's stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopStep {
    /// The agent's confirmation that all containers have ended is pending.
    Shutdown,
    /// The release of the shared parts of the node is pending.
    Detach,
    /// The release failed; a retry follows.
    Backoff,
}

/// The step of a termination, with the provider's id of the instance if it is known.
#[derive(Debug, Clone)]
pub enum EndStep {
    /// A launch has no answer: only its answer or the listing names the instance.
    Launching(LaunchCall, OpenLaunch),
    /// Launch and instance are unknown: the listing must show the instance.
    Lost,
    /// An attachment is pending and must finish first: it could recreate parts that the termination
    /// removes.
    Attaching(InstanceId),
    /// The provider's termination is pending.
    Pending(Option<InstanceId>),
    /// The termination failed; a retry follows.
    Backoff(Option<InstanceId>),
    /// The provider has accepted the termination; the proof is pending.
    Confirming(Option<InstanceId>),
    /// The end of the instance is proven, and the release of the shared parts of the node is
    /// pending.
    Detach(InstanceId),
}

/// An event of a cell.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CellEvent {
    /// The cell is created, with the request of its launch.
    Created(Arc<Launch>),
    /// The daemon started, and found the cell's launch in the journal.
    Resumed,
    /// A record could not be written, and no launch or attachment was skipped: these have their own
    /// events.
    RecordFailed,
    /// The instance of the launch is known.
    Launched(InstanceId),
    /// The launch was refused, or failed for good.
    LaunchFailed(Arc<str>),
    /// The outcome of the launch is unknown.
    LaunchUnanswered,
    /// The token of a launch without an answer has expired, and no call is pending.
    TokenExpired,
    /// The launch certainly made no instance.
    NothingLaunched(Arc<str>),
    /// Its agent has connected, perhaps again.
    Connected,
    /// An order wants the cell.
    Bind,
    /// The provider attached the pod's network.
    Attached(Attached),
    /// The provider did not attach the network.
    AttachFailed(Arc<str>),
    /// The pod must end, and its instance after it.
    Stop(Arc<str>),
    /// The agent has confirmed that all containers have ended.
    Shutdown,
    /// The agent did not confirm.
    ShutdownFailed,
    /// The shared parts of the node are released.
    Detached,
    /// The shared parts of the node could not be released.
    DetachFailed,
    /// The orphan timeout has passed: the cell, without contact, has stopped its pod.
    OrphanTimeout,
    /// The cell must end.
    End(Arc<str>),
    /// The end of the instance is proven.
    Terminated,
    /// The provider has accepted the termination.
    TerminationAccepted,
    /// The provider could not terminate the instance.
    TerminationFailed,
    /// The instance has ended, even if its termination was refused.
    InstanceTerminated,
    /// The pause before a retry is over.
    RetryDue,
}

/// An effect on a cell. Effects are carried out in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CellEffect {
    /// Records the state. On failure, later effects are skipped. Then the event of a skipped launch
    /// or attachment follows, or otherwise [`CellEvent::RecordFailed`].
    Record,
    /// Records the state; a failure is logged.
    RecordIfPossible,
    /// Launches the instance with the recorded parameters.
    Launch,
    /// Attaches the instance to the pod's network.
    Attach,
    /// Asks the agent to end all containers.
    ShutDown,
    /// Releases the shared parts of the node.
    Detach,
    /// Terminates the instance; without an id, all listed instances of the cell.
    Terminate,
    /// Emits [`CellEvent::RetryDue`] after a pause.
    StartRetryTimer,
    /// Publishes that the control connection is established.
    PublishConnected,
    /// Reports to the order that the cell waits for it.
    ReportIdle,
    /// Answers the order: the cell is bound, and its agent configures this network.
    AnswerBound(Option<PodNetwork>),
    /// Answers pending callers: the cell could not be terminated.
    AnswerNotTerminated,
    /// Answers pending callers and publishes the end.
    PublishEnded,
}

impl State {
    /// Returns the next state and the effects of an event. An event without meaning in a state is
    /// ignored.
    pub fn on(self, event: CellEvent) -> (Self, Vec<CellEffect>) {
        use CellEffect as F;
        use CellEvent as E;
        use EndStep as S;
        use LaunchCall as L;
        match (self, event) {
            (Self::Requested, E::Created(request)) => {
                let (call, launch) = (L::Pending, OpenLaunch::new(request));
                (Self::Launching { connected: false, call, launch }, vec![F::Record, F::Launch])
            }
            (Self::Requested, E::End(reason) | E::Stop(reason)) => ended_unlaunched(reason),

            (Self::Launching { call: L::Pending, connected, launch }, E::Resumed)
            | (Self::Launching { call: L::Backoff, connected, launch }, E::RetryDue) => {
                (Self::Launching { connected, call: L::Pending, launch }, vec![F::Launch])
            }
            (Self::Launching { call, launch, .. }, E::Connected) => {
                (Self::Launching { connected: true, call, launch }, vec![F::PublishConnected])
            }
            (Self::Launching { connected: false, .. }, E::Launched(instance)) => {
                (Self::Booting { instance }, vec![F::Record])
            }
            (Self::Launching { connected: true, .. }, E::Launched(instance)) => idle(instance),
            (Self::Launching { call: L::Pending, connected, launch }, E::LaunchUnanswered) => {
                (Self::Launching { connected, call: L::Backoff, launch }, vec![F::StartRetryTimer])
            }
            (Self::Launching { call: L::Backoff, connected, launch }, E::TokenExpired) => {
                (Self::Launching { connected, call: L::Searching, launch }, Vec::new())
            }
            (Self::Launching { .. }, E::LaunchFailed(reason)) => {
                terminating(End::new(reason, true), None)
            }
            (Self::Launching { .. }, E::NothingLaunched(reason)) => ended_unlaunched(reason),
            (Self::Launching { call, launch, .. }, E::End(reason) | E::Stop(reason)) => {
                awaiting(reason, S::Launching(call, launch))
            }

            (Self::Booting { instance }, E::Connected) => {
                let (state, mut effects) = idle(instance);
                effects.insert(0, F::PublishConnected);
                (state, effects)
            }
            (Self::Idle { instance }, E::Bind) => {
                (Self::Binding { instance }, vec![F::Record, F::Attach])
            }
            (Self::Binding { instance }, E::Attached(Attached { addresses, network })) => {
                (Self::Bound { instance, addresses }, vec![F::Record, F::AnswerBound(network)])
            }
            (Self::Binding { instance }, E::AttachFailed(reason)) => {
                terminating(End::new(reason, true), Some(instance))
            }
            (Self::Binding { instance }, E::End(reason) | E::Stop(reason)) => {
                awaiting(reason, S::Attaching(instance))
            }
            // An earlier record failed: the attachment follows its own record.
            (Self::Binding { instance }, E::RecordFailed) => {
                awaiting(NOT_RECORDED.into(), S::Attaching(instance))
            }
            (Self::Bound { instance, .. }, E::Stop(reason)) => (
                Self::Stopping(End::new(reason, false), instance, StopStep::Shutdown),
                vec![F::RecordIfPossible, F::ShutDown],
            ),
            (
                state @ (Self::Idle { .. } | Self::Binding { .. } | Self::Bound { .. }),
                E::Connected,
            ) => (state, vec![F::PublishConnected]),
            (
                Self::Booting { instance } | Self::Idle { instance } | Self::Bound { instance, .. },
                E::RecordFailed,
            ) => terminating(End::new(NOT_RECORDED.into(), false), Some(instance)),
            (Self::Booting { instance } | Self::Idle { instance }, E::End(r) | E::Stop(r)) => {
                terminating(End::new(r, true), Some(instance))
            }
            (Self::Bound { instance, .. }, E::End(reason)) => {
                terminating(End::new(reason, false), Some(instance))
            }

            (Self::Stopping(end, instance, StopStep::Shutdown), E::Shutdown) => (
                Self::Stopping(end.stopped(), instance, StopStep::Detach),
                vec![F::Record, F::Detach],
            ),
            (state @ Self::Stopping(_, _, StopStep::Shutdown), E::Resumed) => {
                (state, vec![F::ShutDown])
            }
            (
                Self::Stopping(end, instance, StopStep::Detach),
                E::DetachFailed | E::RecordFailed,
            ) => (
                Self::Stopping(end, instance, StopStep::Backoff),
                vec![F::AnswerNotTerminated, F::StartRetryTimer],
            ),
            (
                Self::Stopping(end, instance, StopStep::Backoff),
                E::RetryDue | E::Stop(_) | E::Resumed,
            ) => (Self::Stopping(end, instance, StopStep::Detach), vec![F::Record, F::Detach]),
            (Self::Stopping(end, instance, StopStep::Detach), E::Detached)
            | (Self::Stopping(end, instance, StopStep::Shutdown), E::ShutdownFailed)
            | (Self::Stopping(end, instance, _), E::End(_)) => terminating(end, Some(instance)),

            (Self::Terminating(end, S::Launching(..) | S::Lost), E::Launched(instance))
            | (
                Self::Terminating(end, S::Attaching(instance)),
                E::Attached(_) | E::AttachFailed(_),
            ) => terminating(end, Some(instance)),
            (Self::Terminating(end, S::Launching(L::Pending, _)), E::LaunchFailed(_)) => {
                terminating(end, None)
            }
            (Self::Terminating(end, S::Launching(L::Pending, launch)), E::LaunchUnanswered) => (
                Self::Terminating(end, S::Launching(L::Backoff, launch)),
                vec![F::AnswerNotTerminated, F::StartRetryTimer],
            ),
            (
                Self::Terminating(end, S::Launching(L::Backoff, launch)),
                E::RetryDue | E::Resumed,
            ) => (Self::Terminating(end, S::Launching(L::Pending, launch)), vec![F::Launch]),
            (Self::Terminating(end, S::Launching(L::Backoff, launch)), E::TokenExpired) => (
                Self::Terminating(end, S::Launching(L::Searching, launch)),
                vec![F::RecordIfPossible],
            ),
            (Self::Terminating(end, S::Launching(..) | S::Lost), E::NothingLaunched(_))
            | (
                Self::Terminating(end, S::Pending(_) | S::Confirming(_) | S::Backoff(_)),
                E::Terminated,
            )
            | (Self::Terminating(end, S::Detach(_)), E::Detached) => ended(end),
            (Self::Terminating(end, S::Pending(instance)), E::TerminationAccepted) => {
                (Self::Terminating(end, S::Confirming(instance)), Vec::new())
            }
            (Self::Terminating(end, S::Pending(instance)), E::TerminationFailed) => (
                Self::Terminating(end, S::Backoff(instance)),
                vec![F::AnswerNotTerminated, F::StartRetryTimer],
            ),
            // The provider refuses the termination, and may still hold the shared parts.
            (Self::Terminating(end, S::Backoff(Some(instance))), E::InstanceTerminated) => {
                (Self::Terminating(end, S::Detach(instance)), vec![F::Record, F::Detach])
            }
            (Self::Terminating(end, S::Detach(instance)), E::DetachFailed | E::RecordFailed) => (
                Self::Terminating(end, S::Backoff(Some(instance))),
                vec![F::AnswerNotTerminated, F::StartRetryTimer],
            ),
            // The end has overtaken the record that failed: its termination may have been skipped.
            (Self::Terminating(end, S::Pending(instance)), E::RecordFailed) => {
                (Self::Terminating(end, S::Backoff(instance)), vec![F::StartRetryTimer])
            }
            (
                Self::Terminating(end, S::Backoff(instance)),
                E::RetryDue | E::End(_) | E::Stop(_) | E::Resumed,
            )
            | (Self::Terminating(end, S::Confirming(instance)), E::RetryDue) => {
                terminating(end, instance)
            }
            (Self::Terminating(end, step), E::OrphanTimeout) if !end.stopped => {
                (Self::Terminating(end.stopped(), step), vec![F::RecordIfPossible])
            }

            (state, _) => (state, Vec::new()),
        }
    }

    /// Returns the phase for the record. `Requested` is never stored.
    pub fn phase(&self) -> CellPhase {
        match self {
            Self::Requested => CellPhase::Requested,
            Self::Launching { .. } => CellPhase::Launching,
            Self::Booting { .. } => CellPhase::Booting,
            Self::Idle { .. } => CellPhase::Idle,
            Self::Binding { .. } => CellPhase::Enrolled,
            Self::Bound { .. } => CellPhase::Bound,
            Self::Stopping(..) => CellPhase::Stopping,
            Self::Terminating(..) => CellPhase::Terminating,
            Self::Ended(_) => CellPhase::Gone,
        }
    }

    /// Returns the provider's id of the instance, if it is known.
    pub fn instance(&self) -> Option<&InstanceId> {
        match self {
            Self::Booting { instance }
            | Self::Idle { instance }
            | Self::Binding { instance }
            | Self::Bound { instance, .. }
            | Self::Stopping(_, instance, _) => Some(instance),
            Self::Terminating(_, step) => step.instance(),
            Self::Requested | Self::Launching { .. } | Self::Ended(_) => None,
        }
    }

    /// Returns the reason of the end.
    pub fn reason(&self) -> Option<&Arc<str>> {
        self.end().map(|end| &end.reason)
    }

    /// Returns the end that has begun.
    pub(in crate::engine) fn end(&self) -> Option<&End> {
        match self {
            Self::Stopping(end, ..) | Self::Terminating(end, _) | Self::Ended(end) => Some(end),
            _ => None,
        }
    }

    /// Returns the end that has begun, to change it.
    pub(in crate::engine) fn end_mut(&mut self) -> Option<&mut End> {
        match self {
            Self::Stopping(end, ..) | Self::Terminating(end, _) | Self::Ended(end) => Some(end),
            _ => None,
        }
    }

    /// Returns whether the cell is not bound yet and need not end.
    pub fn is_unbound(&self) -> bool {
        matches!(
            self,
            Self::Requested
                | Self::Launching { .. }
                | Self::Booting { .. }
                | Self::Idle { .. }
                | Self::Binding { .. }
        )
    }

    /// Returns whether the instance is expected to run.
    pub fn expects_instance(&self) -> bool {
        matches!(
            self,
            Self::Booting { .. }
                | Self::Idle { .. }
                | Self::Binding { .. }
                | Self::Bound { .. }
                | Self::Stopping { .. }
        )
    }

    /// Returns whether a launch without an answer may have made an instance.
    pub fn has_open_launch(&self) -> bool {
        self.open_launch().is_some() || matches!(self, Self::Terminating(_, EndStep::Lost))
    }

    /// Returns the launch that has no answer.
    pub(in crate::engine) fn open_launch(&self) -> Option<&OpenLaunch> {
        match self {
            Self::Launching { launch, .. }
            | Self::Terminating(_, EndStep::Launching(_, launch)) => Some(launch),
            _ => None,
        }
    }

    /// Returns the launch that has no answer, to change it.
    pub(in crate::engine) fn open_launch_mut(&mut self) -> Option<&mut OpenLaunch> {
        match self {
            Self::Launching { launch, .. }
            | Self::Terminating(_, EndStep::Launching(_, launch)) => Some(launch),
            _ => None,
        }
    }

    /// Returns whether a launch without an answer waits for its replay.
    pub fn awaits_replay(&self) -> bool {
        matches!(
            self,
            Self::Launching { call: LaunchCall::Backoff, .. }
                | Self::Terminating(_, EndStep::Launching(LaunchCall::Backoff, _))
        )
    }

    /// Returns whether only a listing can show the instance of a launch without an answer.
    pub fn is_searching(&self) -> bool {
        matches!(
            self,
            Self::Launching { call: LaunchCall::Searching, .. }
                | Self::Terminating(
                    _,
                    EndStep::Launching(LaunchCall::Searching, _) | EndStep::Lost
                )
        )
    }

    /// Returns whether the end is proven.
    pub fn is_ended(&self) -> bool {
        matches!(self, Self::Ended(_))
    }

    /// Returns whether the proof of an accepted termination is pending.
    pub fn is_confirming(&self) -> bool {
        matches!(self, Self::Terminating(_, EndStep::Confirming(_)))
    }

    /// Returns whether a failed termination waits for its retry.
    pub fn awaits_termination(&self) -> bool {
        matches!(self, Self::Terminating(_, EndStep::Backoff(_)))
    }

    /// Returns whether it is proven that no container of the pod runs, for the record.
    pub fn containers_ended(&self) -> bool {
        self.end().is_some_and(|end| end.stopped)
    }

    /// Returns whether the cell has released its pod: no container of the pod runs or will run, and
    /// the node shares nothing with the cell.
    pub fn is_released(&self) -> bool {
        matches!(self, Self::Ended(_) | Self::Terminating(End { stopped: true, .. }, _))
    }
}

impl EndStep {
    fn instance(&self) -> Option<&InstanceId> {
        match self {
            Self::Launching(..) | Self::Lost => None,
            Self::Attaching(instance) | Self::Detach(instance) => Some(instance),
            Self::Pending(instance) | Self::Backoff(instance) | Self::Confirming(instance) => {
                instance.as_ref()
            }
        }
    }
}

/// The end reason of a cell whose state could not be recorded.
pub(in crate::engine) const NOT_RECORDED: &str = "its state could not be recorded";

fn idle(instance: InstanceId) -> (State, Vec<CellEffect>) {
    (State::Idle { instance }, vec![CellEffect::ReportIdle])
}

fn ended_unlaunched(reason: Arc<str>) -> (State, Vec<CellEffect>) {
    ended(End::new(reason, true))
}

fn ended(end: End) -> (State, Vec<CellEffect>) {
    (State::Ended(end.stopped()), vec![CellEffect::RecordIfPossible, CellEffect::PublishEnded])
}

fn awaiting(reason: Arc<str>, step: EndStep) -> (State, Vec<CellEffect>) {
    (State::Terminating(End::new(reason, true), step), vec![CellEffect::RecordIfPossible])
}

fn terminating(end: End, instance: Option<InstanceId>) -> (State, Vec<CellEffect>) {
    (
        State::Terminating(end, EndStep::Pending(instance)),
        vec![CellEffect::RecordIfPossible, CellEffect::Terminate],
    )
}

#[cfg(test)]
mod tests;
