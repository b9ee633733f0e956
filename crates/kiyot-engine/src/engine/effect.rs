//! Events that the engine handles, and the effects that it asks for.

use std::{sync::Arc, time::Duration};

use kiyot_proto::store;

use crate::{
    StoreError,
    engine::{CellError, ProviderKey, cell::timeline::Step, launch::Launch},
    id::{CellId, SandboxId},
    placement::Candidate,
    provider::{Attached, Attachment, Instance, InstanceId, LeftOut, ProviderError, Termination},
    wanted::OrderKey,
};

/// The number of a redemption, by which its answer finds the caller.
pub type RedeemNumber = u64;

/// An event.
#[derive(Debug, Clone)]
pub enum Event {
    /// A commit failed; the effects that depend on it were skipped.
    CommitFailed {
        /// The cell.
        cell: CellId,
        /// The side that waits for the commit.
        of: CommitOf,
        /// Its changes.
        changes: Vec<Change>,
        /// The error.
        error: Arc<StoreError>,
        /// The skipped effects.
        skipped: Vec<Effect>,
    },
    /// The provider answered a launch.
    Launched(CellId, Result<Instance, ProviderError>),
    /// The provider answered an attachment.
    Attached(CellId, Result<Attached, ProviderError>),
    /// The agent answered a shutdown: true if all containers have ended.
    ShutDown(CellId, bool),
    /// The provider answered a detachment.
    Detached(CellId, Result<(), ProviderError>),
    /// The provider answered a termination.
    Terminated {
        /// The cell.
        cell: CellId,
        /// The outcome.
        outcome: Result<Termination, ProviderError>,
        /// The end of the console, if it was wanted.
        console: String,
    },
    /// The provider described the instance of a cell.
    Described(CellId, Result<Instance, ProviderError>),
    /// A provider listed its instances.
    Listed {
        /// The provider.
        provider: ProviderKey,
        /// The time at which the listing began, by [`super::Now::boot`].
        began: Duration,
        /// The instances.
        instances: Vec<Instance>,
    },
    /// A provider answered the termination of stray instances.
    StraysEnded {
        /// The provider.
        provider: ProviderKey,
        /// The instances that end or have ended.
        accepted: Vec<InstanceId>,
        /// The other instances.
        failed: Vec<InstanceId>,
    },
    /// The cell's control connection was established, perhaps again.
    Connected(CellId),
    /// The time for which a cell's PID 1 has run, as its agent reports.
    Running(CellId, Duration),
    /// The cell's control connection has ended, and no other is established.
    Disconnected(CellId),
    /// The agent spends its token for a key.
    Redeem {
        /// The cell.
        cell: CellId,
        /// The digest of the token.
        token_sha256: String,
        /// The digest of the key.
        key_sha256: String,
        /// The number of the redemption.
        redemption: RedeemNumber,
    },
    /// The pod of a cell has reached a step of its start.
    Reached(CellId, Step),
    /// The cell must end, because its pod ends.
    Terminate {
        /// The cell.
        cell: CellId,
        /// The reason.
        reason: Arc<str>,
    },
    /// A call waits for the cell of an order.
    Joined(OrderKey),
    /// No call waits for the cell of an order now.
    Abandoned(OrderKey),
    /// Time has passed: timers may be due.
    Tick,
}

/// The waiting side of a commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CommitOf {
    /// The state of the cell must be on disk before the next effect.
    State,
    /// The state should be on disk; the next effects don't depend on it.
    Information,
    /// The key of a redemption must be on disk before its answer.
    Redeem(RedeemNumber),
}

impl CommitOf {
    /// Returns whether a failed commit skips a later effect of the same event and cell.
    pub fn skips(self, effect: &Effect) -> bool {
        match self {
            Self::State => true,
            Self::Redeem(_) => matches!(effect, Effect::AnswerRedeem(..)),
            Self::Information => false,
        }
    }
}

/// A change of the journal.
#[derive(Debug, Clone, PartialEq)]
pub enum Change {
    /// Writes or removes the record of a cell.
    Cell(CellId, Option<Box<store::Cell>>),
    /// Writes or removes the record of an order.
    Order(SandboxId, Option<Box<store::Order>>),
    /// Writes the cost of the ended cells of a namespace.
    Cost(String, store::NamespaceCost),
}

/// The refusal of a redemption.
#[derive(Debug, Clone)]
pub enum RedeemRefusal {
    /// No such cell is expected.
    Unknown,
    /// The token is not the cell's.
    WrongToken,
    /// The token has expired.
    Expired,
    /// Another key has spent the token.
    OtherKey,
    /// The key could not be recorded.
    Store(Arc<StoreError>),
}

/// An effect. The effects on a cell are carried out in order.
#[derive(Debug, Clone)]
pub enum Effect {
    /// Commits changes. On failure the effects of the same event and cell that depend on it are
    /// skipped ([`CommitOf::skips`]), and [`Event::CommitFailed`] follows.
    Commit {
        /// The changes, in one transaction.
        changes: Vec<Change>,
        /// The side that waits for the commit.
        of: CommitOf,
    },
    /// Launches an instance.
    Launch(Arc<Launch>),
    /// Attaches an instance to a pod's network.
    Attach(InstanceId, Box<Attachment>),
    /// Asks the agent to end all containers of the pod.
    ShutDown,
    /// Releases the parts of the node that an instance shares.
    Detach(InstanceId),
    /// Terminates an instance; without an id, all listed instances of the cell. Releases the shared
    /// parts of the node first.
    Terminate {
        /// The instance.
        instance: Option<InstanceId>,
        /// True if the end of the console is wanted.
        with_console: bool,
    },
    /// Closes the link for good: the agent can't open it again, and has no contact from now on.
    Disconnect,
    /// Describes an instance.
    Describe(InstanceId),
    /// Terminates instances of a provider that belong to no cell.
    EndStrays(ProviderKey, Vec<InstanceId>),
    /// Releases a removed provider that has neither cells nor strays left.
    ReleaseProvider(ProviderKey),
    /// Answers a redemption.
    AnswerRedeem(RedeemNumber, Result<(), RedeemRefusal>),
    /// Answers an order.
    AnswerOrder(SandboxId, Result<Attached, CellError>),
    /// Answers the callers that wait for the end of the pod.
    AnswerEnd(Result<(), ProviderError>),
    /// Publishes that the control connection is established.
    PublishConnected,
    /// Publishes that the cell waits for a pod in its warm pool.
    PublishWarm,
    /// Publishes the end of the cell, which the engine has removed.
    PublishEnded(Arc<str>),
    /// Logs a notice.
    Log(Notice),
}

/// A notice for the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Notice {
    /// The instance of a cell has ended by itself. Has the provider's reason, if known.
    InstanceEnded(Option<String>),
    /// Another call of the pod has joined its launch.
    Joined(SandboxId),
    /// An order waits for the end of another cell of its pod.
    Waits(SandboxId),
    /// No offering of a launch is known to start within the time that the pod asks for.
    StartsLate {
        /// The id of the pod's sandbox.
        sandbox: SandboxId,
        /// The time that the pod asks for.
        within: Duration,
        /// The measured time of the fastest offering, which is launched.
        fastest: Duration,
    },
    /// A cell waits in its warm pool.
    Warm(Arc<str>),
    /// A pod takes a cell of a warm pool.
    Taken {
        /// The id of the pod's sandbox.
        sandbox: SandboxId,
        /// The pool.
        pool: Arc<str>,
    },
    /// A cell that no call waits for joins a warm pool.
    JoinedPool(Arc<str>),
    /// A cell of a warm pool was not launched, or has ended.
    PoolFailed {
        /// The pool.
        pool: Arc<str>,
        /// The reason.
        reason: String,
        /// The time until the pool is filled again, in seconds.
        seconds: u64,
    },
    /// Launches of a kind of boots pause in a zone.
    LaunchesPaused {
        /// The boots that did not enrol, with the end of the last console.
        reason: Arc<str>,
        /// The pause, in seconds.
        seconds: u64,
    },
    /// The provider launched an offering that was not requested, at this price.
    NotRequested(Candidate),
    /// A launch that a previous daemon began goes on.
    Resumed,
    /// The first container of a cell runs: the milliseconds of each step since the cell's creation.
    Started(Vec<(&'static str, i64)>),
    /// Many instances are not found at once: the provider is taken to have an outage.
    Outage {
        /// The instances that were not found.
        absent: usize,
        /// The instances that are expected.
        expected: usize,
        /// The cluster whose instances are listed.
        cluster: String,
        /// The node whose instances are listed.
        node: String,
    },
    /// The agent of a cell was silent for too long: the cell ends.
    Lost {
        /// The silence, in seconds.
        seconds: u64,
    },
    /// Many cells are silent at once: the node may be cut off, and no cell is lost.
    CutOff {
        /// The bound and warm cells that are silent.
        silent: usize,
        /// All bound and warm cells.
        all: usize,
    },
    /// Mass silence is over.
    CutOffOver,
    /// Labels of a pod can't become tags of its instance.
    LabelsLeftOut {
        /// The namespace and the name of the pod.
        pod: String,
        /// The labels, with the reasons.
        left_out: LeftOut,
    },
    /// A daemon with another certificate authority launched an instance of the same owner.
    Foreign(InstanceId),
}
