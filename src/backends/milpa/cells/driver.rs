//! The task of a cell: passes events to its state machine and carries out the effects.

use std::{net::IpAddr, sync::Arc, time::Instant};

use kiyot_link::watch::Seen;
use tokio::sync::oneshot;
use tracing::Instrument;

use super::{
    super::{
        gateway::Refusal,
        mailbox::Receiver,
        providers::{Attachment, InstanceId, LaunchSpec, ProviderError},
        store::{Batch, StoreError, Table},
    },
    Cell, CellError, CellEvent,
    message::Message,
    provider_calls::{self, Outcome, ProviderCall},
    record::Record,
    shared::{Entry, Shared, locked},
    state::{Effect, Event, State},
};

/// The reason of a cell whose instance has ended.
const INSTANCE_ENDED: &str = "its instance ended";
/// The reason of a cell whose token was used with a second key.
const OTHER_KEY: &str = "its token was spent by another key";

/// The parameters of a launch that are not in the record.
pub(super) struct Launch {
    pub(super) attachment: Attachment,
    /// Secret.
    pub(super) token: String,
    pub(super) deadline: Instant,
    pub(super) answer: oneshot::Sender<Result<(Cell, Vec<IpAddr>), CellError>>,
}

/// The cause of a failed launch.
enum Failure {
    Provider(ProviderError),
    Store(StoreError),
    Silent,
    Ended(String),
}

/// The task of a cell.
pub(super) struct Driver {
    shared: Arc<Shared>,
    entry: Arc<Entry>,
    seen_link: Seen,
    record: Record,
    state: State,
    messages: Receiver<Message>,
    /// The event with which the task starts.
    first: Event,
    /// Boxed, as most cells are launched already.
    launch: Option<Box<Launch>>,
    /// The pending call to the provider.
    call: Option<ProviderCall>,
    /// The time of the next timer event.
    timer: Option<(tokio::time::Instant, Event)>,
    started: Instant,
    failure: Option<Failure>,
    console: String,
    refusal: Option<ProviderError>,
    /// Callers that wait for the cell's end.
    terminators: Vec<oneshot::Sender<Result<(), CellError>>>,
}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Driver")
            .field("record", &self.record)
            .field("state", &self.state)
            .finish_non_exhaustive()
    }
}

impl Driver {
    /// Returns the task that launches a cell.
    pub(super) fn launch(
        shared: Arc<Shared>,
        entry: Arc<Entry>,
        record: Record,
        messages: Receiver<Message>,
        launch: Launch,
    ) -> Self {
        let timer =
            Some((launch.deadline.into(), Event::End("its agent did not connect in time".into())));
        Self {
            timer,
            launch: Some(Box::new(launch)),
            ..Self::new(shared, entry, record, State::Requested, messages, Event::Ordered)
        }
    }

    /// Returns the task of a stored cell.
    pub(super) fn resume(
        shared: Arc<Shared>,
        entry: Arc<Entry>,
        record: Record,
        state: State,
        messages: Receiver<Message>,
    ) -> Self {
        Self::new(shared, entry, record, state, messages, Event::RetryDue)
    }

    fn new(
        shared: Arc<Shared>,
        entry: Arc<Entry>,
        record: Record,
        state: State,
        messages: Receiver<Message>,
        first: Event,
    ) -> Self {
        let (launch, call, timer, failure, refusal) = (None, None, None, None, None);
        let (started, console, terminators) = (Instant::now(), String::new(), Vec::new());
        Self {
            shared,
            entry,
            seen_link: Seen::default(),
            record,
            state,
            messages,
            first,
            launch,
            call,
            timer,
            started,
            failure,
            console,
            refusal,
            terminators,
        }
    }

    /// Starts the task.
    pub(super) fn spawn(self) {
        // Before the task runs: a cell without a link counts as ended.
        self.ensure_link();
        let shared = Arc::clone(&self.shared);
        let (stop, cell) = (shared.stop.clone(), self.record.id.clone());
        // Boxed, or the task would have room for several copies of the driver.
        let run = Box::pin(Box::new(self).run());
        // At the level of debugging: at the others, events name the cell themselves.
        let span = tracing::debug_span!("cell", cell = %cell);
        let task = async move {
            stop.run_until_cancelled_owned(run).await;
        };
        shared.tasks.spawn(task.instrument(span));
    }

    /// Creates the cell's link, if it has none.
    fn ensure_link(&self) {
        if let Some(links) = self.shared.links.get() {
            self.entry.link.get_or_init(|| links.link(&self.record.id));
        }
    }

    /// Runs until the cell's end. Takes a box, because a future has room for its arguments twice.
    async fn run(mut self: Box<Self>) {
        let mut event = Some(self.first.clone());
        loop {
            if let Some(event) = event.take() {
                // Boxed: rare work takes no room in a task that mostly waits.
                Box::pin(self.handle(event)).await;
            }
            if matches!(self.state, State::Ended { .. }) {
                return;
            }
            event = tokio::select! {
                message = self.messages.recv() => Box::pin(self.receive(message)).await,
                outcome = provider_calls::pending(&mut self.call) => Some(self.on_outcome(outcome)),
                () = self.entry.linked.changed(&mut self.seen_link) => {
                    self.entry.linked.with(|linked| linked.then_some(Event::Connected))
                }
                event = due(&self.timer) => self.on_timer(event),
            };
        }
    }

    /// Applies an event and carries out its effects, and those of the events that follow.
    async fn handle(&mut self, event: Event) {
        let mut next = Some(event);
        while let Some(event) = next.take() {
            tracing::debug!(
                cell = %self.record.id,
                ?event,
                phase = ?self.state.phase(),
                "cell event"
            );
            let (state, effects) = std::mem::replace(&mut self.state, State::Requested).on(event);
            self.state = state;
            self.publish();
            for effect in effects {
                if let Err(event) = self.perform(effect).await {
                    next = Some(event);
                    break;
                }
            }
        }
    }

    async fn perform(&mut self, effect: Effect) -> Result<(), Event> {
        match effect {
            Effect::Record => {
                self.record.was_bound |= matches!(self.state, State::Bound { .. });
                if let Err(error) = self.write().await {
                    tracing::error!(
                        cell = %self.record.id,
                        error = &error as &dyn std::error::Error,
                        "cell state not recorded, cell ends"
                    );
                    self.fail(Failure::Store(error));
                    return Err(Event::RecordFailed);
                }
            }
            Effect::RecordIfPossible => {
                if let Err(error) = self.write().await {
                    tracing::error!(
                        cell = %self.record.id,
                        error = &error as &dyn std::error::Error,
                        "end of cell not recorded"
                    );
                }
            }
            Effect::Launch => self.start_launch(),
            Effect::Attach(instance) => self.start_attach(instance),
            Effect::Terminate(instance) => self.start_termination(instance),
            Effect::StartRetryTimer => {
                self.timer = Some((
                    tokio::time::Instant::now() + self.shared.config.retry_pause,
                    Event::RetryDue,
                ))
            }
            Effect::PublishConnected => {
                self.publish_event(CellEvent::Connected(self.record.id.clone()))
            }
            Effect::AnswerBound => self.answer_bound(),
            Effect::AnswerNotTerminated => self.answer_not_terminated(),
            Effect::PublishEnded => self.answer_ended(),
        }
        Ok(())
    }

    async fn receive(&mut self, message: Message) -> Option<Event> {
        match message {
            Message::Claim { token_sha256, key_sha256, answer } => {
                let claimed = self.claim(&token_sha256, key_sha256).await;
                let alarm = matches!(claimed, Err(Refusal::OtherKey(_)));
                let _gone = answer.send(claimed);
                if alarm {
                    // The gateway logs it, within its limits.
                    if self.state.is_launching() {
                        self.fail(Failure::Ended(OTHER_KEY.to_owned()));
                        return Some(Event::End(OTHER_KEY.into()));
                    }
                }
                None
            }
            Message::Terminate { reason, answer } => {
                self.terminators.push(answer);
                self.fail(Failure::Ended(reason.to_string()));
                Some(Event::End(reason))
            }
            Message::InstanceEnded => {
                // No effect if the cell is terminating already.
                let lives = matches!(
                    self.state,
                    State::Booting { .. } | State::Enrolled { .. } | State::Bound { .. }
                );
                if lives {
                    tracing::warn!(cell = %self.record.id, "cell instance ended");
                    self.fail(Failure::Ended(INSTANCE_ENDED.to_owned()));
                }
                lives.then(|| Event::End(INSTANCE_ENDED.into()))
            }
        }
    }

    /// Spends the token for a key, which is recorded before the answer.
    async fn claim(&mut self, token_sha256: &str, key_sha256: String) -> Result<(), Refusal> {
        let id = self.record.id.clone();
        if matches!(self.state, State::Requested | State::Terminating { .. } | State::Ended { .. })
        {
            return Err(Refusal::Unknown(id.as_str().to_owned()));
        }
        if self.record.token_sha256 != token_sha256 {
            return Err(Refusal::WrongToken(id));
        }
        if !self.record.key_sha256.is_empty() && self.record.key_sha256 != key_sha256 {
            return Err(Refusal::OtherKey(id));
        }
        if self.record.is_expired() {
            return Err(Refusal::Expired(id));
        }
        if self.record.key_sha256.is_empty() {
            self.record.key_sha256 = key_sha256;
            if let Err(error) = self.write().await {
                self.record.key_sha256.clear();
                return Err(Refusal::Store(id, error));
            }
            self.publish();
        }
        Ok(())
    }

    /// Returns the event of a provider call's outcome.
    fn on_outcome(&mut self, outcome: Outcome) -> Event {
        let cell = self.record.id.clone();
        let failed = |doing, error: &ProviderError| {
            tracing::warn!(
                %cell,
                error = error as &dyn std::error::Error,
                "provider could not {doing} a cell"
            );
            error.again().doing.into()
        };
        match outcome {
            Outcome::Launched(Ok(instance)) => Event::Launched(instance),
            Outcome::Attached(Ok(addresses)) => Event::Attached(addresses),
            Outcome::Launched(Err(error)) => {
                let reason = failed("launch", &error);
                self.fail(Failure::Provider(error));
                Event::LaunchFailed(reason)
            }
            Outcome::Attached(Err(error)) => {
                let reason = failed("attach", &error);
                self.fail(Failure::Provider(error));
                Event::AttachFailed(reason)
            }
            Outcome::Terminated { ended, console } => {
                self.console = console.unwrap_or_default();
                match ended {
                    Ok(()) => Event::Terminated,
                    Err(error) => {
                        tracing::error!(
                            cell = %self.record.id,
                            error = &error as &dyn std::error::Error,
                            "cell termination failed, will be retried"
                        );
                        self.refusal = Some(error);
                        Event::TerminationFailed
                    }
                }
            }
        }
    }

    fn on_timer(&mut self, event: Event) -> Option<Event> {
        self.timer = None;
        if matches!(event, Event::End(_)) {
            if !self.state.is_launching() {
                return None;
            }
            let failure = if matches!(self.state, State::Enrolled { .. }) {
                Failure::Ended("its network was not made in time".to_owned())
            } else {
                Failure::Silent
            };
            self.fail(failure);
        }
        Some(event)
    }

    /// Records the cause of a failed launch; the first stays.
    fn fail(&mut self, failure: Failure) {
        if self.launch.is_some() && self.failure.is_none() {
            self.failure = Some(failure);
        }
    }

    fn start_launch(&mut self) {
        let (Some(launch), Some(links)) = (&self.launch, self.shared.links.get()) else { return };
        let spec = LaunchSpec {
            cell: self.record.id.clone(),
            bootstrap: links.bootstrap(&self.record.id, &launch.token),
        };
        self.call = Some(provider_calls::launch(
            Arc::clone(&self.shared.provider),
            spec,
            launch.token.clone(),
        ));
    }

    fn start_attach(&mut self, instance: InstanceId) {
        let Some(attachment) = self.launch.as_ref().map(|launch| launch.attachment.clone()) else {
            return;
        };
        self.call =
            Some(provider_calls::attach(Arc::clone(&self.shared.provider), instance, attachment));
    }

    fn start_termination(&mut self, instance: Option<InstanceId>) {
        // The error of a failed launch has the end of the console.
        let with_console = self.launch.is_some();
        self.timer = None;
        self.call = Some(provider_calls::terminate(
            Arc::clone(&self.shared.provider),
            self.record.id.clone(),
            instance,
            with_console,
        ));
    }

    fn answer_bound(&mut self) {
        self.timer = None;
        let State::Bound { addresses, .. } = &self.state else { return };
        let (Some(launch), Some(link)) = (self.launch.take(), self.entry.link.get()) else {
            return;
        };
        tracing::info!(
            cell = %self.record.id,
            ?addresses,
            elapsed_ms = self.started.elapsed().as_millis(),
            "cell bound"
        );
        let cell = Cell { id: self.record.id.clone(), link: link.clone() };
        if launch.answer.send(Ok((cell, addresses.clone()))).is_err() {
            tracing::info!(cell = %self.record.id, "cell bound without a caller");
        }
    }

    fn answer_not_terminated(&mut self) {
        self.answer_launch();
        if let Some(error) = self.refusal.take() {
            for terminator in self.terminators.drain(..) {
                let _gone = terminator.send(Err(CellError::Provider(error.again())));
            }
        }
    }

    fn answer_ended(&mut self) {
        let reason = self.state.reason().map(ToString::to_string).unwrap_or_default();
        let id = &self.record.id;
        tracing::info!(cell = %id, reason, "cell ended");
        self.shared.entries.write().unwrap_or_else(std::sync::PoisonError::into_inner).remove(id);
        if let Some(links) = self.shared.links.get() {
            links.forget(id);
        }
        self.publish_event(CellEvent::Gone { cell: id.clone(), reason });
        self.answer_launch();
        for terminator in self.terminators.drain(..) {
            let _gone = terminator.send(Ok(()));
        }
    }

    fn answer_launch(&mut self) {
        let Some(launch) = self.launch.take() else { return };
        let (id, console) = (self.record.id.clone(), std::mem::take(&mut self.console));
        let seconds = launch.deadline.saturating_duration_since(self.started).as_secs();
        let error = match self.failure.take() {
            Some(Failure::Provider(error)) => CellError::Provider(error),
            Some(Failure::Store(error)) => CellError::Store(id, error),
            Some(Failure::Ended(reason)) if console.is_empty() => CellError::Ended(id, reason),
            Some(Failure::Ended(reason)) => {
                CellError::Ended(id, format!("{reason}; its console ends: {console}"))
            }
            Some(Failure::Silent) | None => CellError::Silent { cell: id, seconds, console },
        };
        let _gone = launch.answer.send(Err(error));
    }

    fn publish_event(&self, event: CellEvent) {
        let _nobody_listens = self.shared.events.send(event);
    }

    /// Publishes the state for readers that do not wait for this task.
    fn publish(&self) {
        let mut view = locked(&self.entry.view);
        view.phase = self.state.phase();
        view.instance = self.state.instance().cloned();
        view.key_sha256.clone_from(&self.record.key_sha256);
    }

    /// Writes record and state. The record of an ended cell becomes a tombstone if the cell was
    /// bound, and is removed otherwise.
    async fn write(&mut self) -> Result<(), StoreError> {
        let id = &self.record.id;
        let mut batch = Batch::default();
        match &self.state {
            State::Ended { .. } if !self.record.was_bound => {
                batch.remove(Table::Cells, id.as_str());
            }
            State::Ended { reason } => {
                batch.put(Table::Cells, id.as_str(), &self.record.stored(&self.state));
                for forgotten in self.shared.tombstones.add(id.clone(), reason.to_string()) {
                    batch.remove(Table::Cells, forgotten.as_str());
                }
            }
            state => {
                batch.put(Table::Cells, id.as_str(), &self.record.stored(state));
            }
        }
        self.shared.store.commit(batch).await
    }
}

/// Waits for the timer, forever without a timer.
async fn due(timer: &Option<(tokio::time::Instant, Event)>) -> Event {
    let Some((at, event)) = timer else { return std::future::pending().await };
    tokio::time::sleep_until(*at).await;
    event.clone()
}
