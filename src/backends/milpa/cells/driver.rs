//! One task per cell: tells its state machine what happens, and does what the machine says.

use std::{net::IpAddr, sync::Arc, time::Instant};

use tokio::sync::oneshot;

use super::{
    super::{
        gateway::Refusal,
        mailbox::Receiver,
        providers::{Attachment, InstanceId, LaunchSpec, ProviderError},
        store::{Batch, StoreError, Table},
    },
    Cell, CellError, CellEvent,
    job::{self, Job, Outcome},
    record::Record,
    shared::{Entry, Shared, locked},
    state::{Effect, Event, State},
};

/// Why a cell ends whose instance was found ended.
const INSTANCE_ENDED: &str = "its instance ended";
/// Why a cell ends whose token was used twice.
const OTHER_KEY: &str = "its token was spent by another key";

/// What a cell's task is told.
#[derive(Debug)]
pub(super) enum Message {
    /// See `Ledger::claim`.
    Claim { token_sha256: String, key_sha256: String, answer: oneshot::Sender<Result<(), Refusal>> },
    /// See `Cells::terminate`.
    Terminate { reason: Arc<str>, answer: oneshot::Sender<Result<(), CellError>> },
    /// The provider does not list its instance any more, or not as running.
    InstanceEnded,
}

/// What a cell that is launched needs, beside its record.
pub(super) struct Launch {
    pub(super) attachment: Attachment,
    /// Secret.
    pub(super) token: String,
    pub(super) deadline: Instant,
    pub(super) answer: oneshot::Sender<Result<(Cell, Vec<IpAddr>), CellError>>,
}

/// Why nobody gets the cell.
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
    record: Record,
    state: State,
    messages: Receiver<Message>,
    /// What happens first.
    first: Event,
    /// Boxed, as most cells are there already.
    launch: Option<Box<Launch>>,
    /// The call to the provider that runs.
    job: Option<Job>,
    /// When the machine is told that time is over.
    timer: Option<(tokio::time::Instant, Event)>,
    began: Instant,
    failure: Option<Failure>,
    console: String,
    refusal: Option<ProviderError>,
    /// Who waits for its end.
    enders: Vec<oneshot::Sender<Result<(), CellError>>>,
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
    /// The task of a cell that is to be made.
    pub(super) fn launch(
        shared: Arc<Shared>,
        entry: Arc<Entry>,
        record: Record,
        messages: Receiver<Message>,
        launch: Launch,
    ) -> Self {
        let timer =
            Some((launch.deadline.into(), Event::End("it did not call home in time".into())));
        Self {
            timer,
            launch: Some(Box::new(launch)),
            ..Self::new(shared, entry, record, State::Requested, messages, Event::Ordered)
        }
    }

    /// The task of a cell that a daemon before this one made.
    pub(super) fn resume(
        shared: Arc<Shared>,
        entry: Arc<Entry>,
        record: Record,
        state: State,
        messages: Receiver<Message>,
    ) -> Self {
        Self::new(shared, entry, record, state, messages, Event::Again)
    }

    fn new(
        shared: Arc<Shared>,
        entry: Arc<Entry>,
        record: Record,
        state: State,
        messages: Receiver<Message>,
        first: Event,
    ) -> Self {
        let (launch, job, timer, failure, refusal) = (None, None, None, None, None);
        let (began, console, enders) = (Instant::now(), String::new(), Vec::new());
        Self {
            shared,
            entry,
            record,
            state,
            messages,
            first,
            launch,
            job,
            timer,
            began,
            failure,
            console,
            refusal,
            enders,
        }
    }

    /// Gives the cell its link, if it has none.
    pub(super) fn has_link(&self) {
        if let Some(links) = self.shared.links.get() {
            self.entry.link.get_or_init(|| links.link(&self.record.id));
        }
    }

    /// Runs until the cell is gone. Of a box, because a future has room for its arguments twice.
    pub(super) async fn run(mut self: Box<Self>) {
        let mut event = Some(self.first.clone());
        loop {
            if let Some(event) = event.take() {
                // Boxed: what is seldom takes no room in a task that mostly waits.
                Box::pin(self.happens(event)).await;
            }
            if matches!(self.state, State::Gone { .. }) {
                return;
            }
            event = tokio::select! {
                message = self.messages.recv() => Box::pin(self.told(message)).await,
                outcome = job::running(&mut self.job) => Some(self.came_to(outcome)),
                () = self.entry.linked.changed() => self.entry.linked.get().then_some(Event::Linked),
                event = due(&self.timer) => self.is_due(event),
            };
        }
    }

    /// Tells the machine, and does what it says.
    async fn happens(&mut self, event: Event) {
        let mut next = Some(event);
        while let Some(event) = next.take() {
            tracing::debug!(cell = %self.record.id, ?event, phase = ?self.state.phase(), "A cell's event");
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
                    tracing::error!(cell = %self.record.id, error = &error as &dyn std::error::Error, "A cell's state could not be recorded: the cell ends");
                    self.fails(Failure::Store(error));
                    return Err(Event::NotRecorded);
                }
            }
            Effect::Note => {
                if let Err(error) = self.write().await {
                    tracing::error!(cell = %self.record.id, error = &error as &dyn std::error::Error, "That a cell ends could not be recorded");
                }
            }
            Effect::Launch => self.begin_launch(),
            Effect::Attach(instance) => self.begin_attach(instance),
            Effect::Terminate(instance) => self.begin_termination(instance),
            Effect::Pause => {
                self.timer = Some((
                    tokio::time::Instant::now() + self.shared.config.retry_pause,
                    Event::Again,
                ))
            }
            Effect::TellConnected => self.tell(CellEvent::Connected(self.record.id.clone())),
            Effect::TellBound => self.tell_bound(),
            Effect::TellNotTerminated => self.tell_not_terminated(),
            Effect::TellGone => self.tell_gone(),
        }
        Ok(())
    }

    async fn told(&mut self, message: Message) -> Option<Event> {
        match message {
            Message::Claim { token_sha256, key_sha256, answer } => {
                let claimed = self.claim(&token_sha256, key_sha256).await;
                let alarm = matches!(claimed, Err(Refusal::OtherKey(_)));
                let _gone = answer.send(claimed);
                if alarm {
                    // The gateway logs it, within its limits.
                    if self.state.is_beginning() {
                        self.fails(Failure::Ended(OTHER_KEY.to_owned()));
                        return Some(Event::End(OTHER_KEY.into()));
                    }
                }
                None
            }
            Message::Terminate { reason, answer } => {
                self.enders.push(answer);
                self.fails(Failure::Ended(reason.to_string()));
                Some(Event::End(reason))
            }
            Message::InstanceEnded => {
                // Old news if the cell is ending already.
                let lives = matches!(
                    self.state,
                    State::Booting { .. } | State::Enrolled { .. } | State::Bound { .. }
                );
                if lives {
                    tracing::warn!(cell = %self.record.id, "A cell's instance has ended");
                    self.fails(Failure::Ended(INSTANCE_ENDED.to_owned()));
                }
                lives.then(|| Event::End(INSTANCE_ENDED.into()))
            }
        }
    }

    /// Spends the token for a key, on disk first.
    async fn claim(&mut self, token_sha256: &str, key_sha256: String) -> Result<(), Refusal> {
        let id = self.record.id.clone();
        if matches!(self.state, State::Requested | State::Terminating { .. } | State::Gone { .. }) {
            return Err(Refusal::Unknown(id.as_str().to_owned()));
        }
        if self.record.token_sha256 != token_sha256 {
            return Err(Refusal::WrongToken(id));
        }
        if !self.record.key_sha256.is_empty() && self.record.key_sha256 != key_sha256 {
            return Err(Refusal::OtherKey(id));
        }
        if self.record.expired() {
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

    /// What the machine is told of a call's outcome.
    fn came_to(&mut self, outcome: Outcome) -> Event {
        let cell = self.record.id.clone();
        let failed = |doing, error: &ProviderError| {
            tracing::warn!(%cell, error = error as &dyn std::error::Error, "The provider could not {doing} a cell");
            error.again().doing.into()
        };
        match outcome {
            Outcome::Launched(Ok(instance)) => Event::Launched(instance),
            Outcome::Attached(Ok(addresses)) => Event::Attached(addresses),
            Outcome::Launched(Err(error)) => {
                let reason = failed("launch", &error);
                self.fails(Failure::Provider(error));
                Event::LaunchFailed(reason)
            }
            Outcome::Attached(Err(error)) => {
                let reason = failed("attach", &error);
                self.fails(Failure::Provider(error));
                Event::AttachFailed(reason)
            }
            Outcome::Terminated { ended, console } => {
                self.console = console.unwrap_or_default();
                match ended {
                    Ok(()) => Event::Terminated,
                    Err(error) => {
                        tracing::error!(cell = %self.record.id, error = &error as &dyn std::error::Error, "A cell could not be ended, and is tried again");
                        self.refusal = Some(error);
                        Event::NotTerminated
                    }
                }
            }
        }
    }

    fn is_due(&mut self, event: Event) -> Option<Event> {
        self.timer = None;
        if matches!(event, Event::End(_)) {
            if !self.state.is_beginning() {
                return None;
            }
            let failure = if matches!(self.state, State::Enrolled { .. }) {
                Failure::Ended("its network was not made in time".to_owned())
            } else {
                Failure::Silent
            };
            self.fails(failure);
        }
        Some(event)
    }

    /// Notes why nobody gets the cell: the first reason stays.
    fn fails(&mut self, failure: Failure) {
        if self.launch.is_some() && self.failure.is_none() {
            self.failure = Some(failure);
        }
    }

    fn begin_launch(&mut self) {
        let (Some(launch), Some(links)) = (&self.launch, self.shared.links.get()) else { return };
        let spec = LaunchSpec {
            cell: self.record.id.clone(),
            bootstrap: links.bootstrap(&self.record.id, &launch.token),
        };
        self.job = Some(job::launch(Arc::clone(&self.shared.provider), spec, launch.token.clone()));
    }

    fn begin_attach(&mut self, instance: InstanceId) {
        let Some(attachment) = self.launch.as_ref().map(|launch| launch.attachment.clone()) else {
            return;
        };
        self.job = Some(job::attach(Arc::clone(&self.shared.provider), instance, attachment));
    }

    fn begin_termination(&mut self, instance: Option<InstanceId>) {
        // Somebody is still to be told why there is no cell: its console is part of it.
        let with_console = self.launch.is_some();
        self.timer = None;
        self.job = Some(job::end(
            Arc::clone(&self.shared.provider),
            self.record.id.clone(),
            instance,
            with_console,
        ));
    }

    fn tell_bound(&mut self) {
        self.timer = None;
        let State::Bound { addresses, .. } = &self.state else { return };
        let (Some(launch), Some(link)) = (self.launch.take(), self.entry.link.get()) else {
            return;
        };
        tracing::info!(cell = %self.record.id, ?addresses, milliseconds = self.began.elapsed().as_millis(), "A cell is ready for its pod");
        let cell = Cell { id: self.record.id.clone(), link: link.clone() };
        if launch.answer.send(Ok((cell, addresses.clone()))).is_err() {
            tracing::info!(cell = %self.record.id, "Nobody waits for a cell that is ready");
        }
    }

    fn tell_not_terminated(&mut self) {
        self.answer_launch();
        if let Some(error) = self.refusal.take() {
            for ender in self.enders.drain(..) {
                let _gone = ender.send(Err(CellError::Provider(error.again())));
            }
        }
    }

    fn tell_gone(&mut self) {
        let reason = self.state.reason().map(ToString::to_string).unwrap_or_default();
        let id = &self.record.id;
        tracing::info!(cell = %id, reason, "A cell is gone");
        self.shared.entries.write().unwrap_or_else(std::sync::PoisonError::into_inner).remove(id);
        if let Some(links) = self.shared.links.get() {
            links.forget(id);
        }
        self.tell(CellEvent::Gone { cell: id.clone(), reason });
        self.answer_launch();
        for ender in self.enders.drain(..) {
            let _gone = ender.send(Ok(()));
        }
    }

    fn answer_launch(&mut self) {
        let Some(launch) = self.launch.take() else { return };
        let (id, console) = (self.record.id.clone(), std::mem::take(&mut self.console));
        let seconds = launch.deadline.saturating_duration_since(self.began).as_secs();
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

    fn tell(&self, event: CellEvent) {
        let _nobody_listens = self.shared.events.send(event);
    }

    /// Shows the state to those who may not wait for this task.
    fn publish(&self) {
        let mut view = locked(&self.entry.view);
        view.phase = self.state.phase();
        view.instance = self.state.instance().cloned();
        view.key_sha256.clone_from(&self.record.key_sha256);
    }

    /// Writes record and state. A cell that is gone is remembered if it was a pod's, and dropped
    /// otherwise.
    async fn write(&mut self) -> Result<(), StoreError> {
        let id = &self.record.id;
        let mut batch = Batch::default();
        match &self.state {
            State::Gone { .. } if !self.record.was_bound => {
                batch.remove(Table::Cells, id.as_str());
            }
            State::Gone { reason } => {
                batch.put(Table::Cells, id.as_str(), &self.record.stored(&self.state));
                for forgotten in self.shared.gone.remember(id.clone(), reason.to_string()) {
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

/// Waits for the timer; forever if there is none.
async fn due(timer: &Option<(tokio::time::Instant, Event)>) -> Event {
    let Some((at, event)) = timer else { return std::future::pending().await };
    tokio::time::sleep_until(*at).await;
    event.clone()
}
