//! The task that keeps the objects of this node's cells current and reports events of pods.
//!
//! It makes one call at a time, each with a deadline. All writes share a pace. It reads the cells
//! through the same source as the admin API. No other task waits for it.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use futures::{StreamExt, stream::BoxStream};
use kiyot_proto::admin;
use tokio::time::sleep_until;
use tokio_util::task::AbortOnDropHandle;

use crate::{
    client::{Access, CALL_TIMEOUT, Connection},
    counter::Counter,
    failure::Failure,
    gate::{FIRST_PAUSE, Gate},
    object::{self, OwnerReference},
    pace::{MAX_WRITES_PER_SECOND, Pace},
    plan::Plan,
    pod_events::PodEvents,
    recorder::Recorder,
    source::Source,
    time,
};

mod cells;
mod denials;
mod events;
mod owner;

use denials::Denials;

/// Period of reading the cells, which finds changes without an event.
const REFRESH_INTERVAL: Duration = Duration::from_secs(5);
/// Delay from an event to reading the cells, because events come in groups.
const REFRESH_DELAY: Duration = Duration::from_millis(300);

/// Options of the publisher.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Address and credentials.
    pub access: Access,
    /// Name of this node.
    pub node: String,
    /// Shows cells as objects.
    pub cells: bool,
    /// Reports events of pods.
    pub events: bool,
    /// Periods.
    pub periods: Periods,
}

/// The periods of the publisher.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Periods {
    /// Period of reading the Node object and listing this node's objects. Other clients may have
    /// changed or deleted them.
    pub list: Duration,
    /// Pause after a first failure.
    pub first_pause: Duration,
    /// Time limit of a call.
    pub call: Duration,
}

impl Default for Periods {
    fn default() -> Self {
        Self { list: Duration::from_secs(600), first_pause: FIRST_PAUSE, call: CALL_TIMEOUT }
    }
}

/// The running publisher. Dropping it ends its task.
#[derive(Debug)]
pub struct Publisher(#[allow(dead_code, reason = "held for its drop")] AbortOnDropHandle<()>);

impl Publisher {
    /// Starts the task. Called on a runtime of tokio.
    pub fn start(options: Options, source: Arc<dyn Source>, counter: Arc<dyn Counter>) -> Self {
        let now = Instant::now();
        let lane = |meaning| Lane::new(meaning, options.periods.first_pause);
        let (cells_lane, events_lane) = (
            lane("cells are not shown in the Kubernetes API"),
            lane("events of pods are not reported"),
        );
        let task = Task {
            connection: Connection::new(
                options.access.clone(),
                Arc::clone(&counter),
                options.periods.call,
            ),
            recorder: Recorder::new(options.node.clone()),
            source,
            plan: Plan::default(),
            counter,
            pace: Pace::per_second(MAX_WRITES_PER_SECOND),
            pod_events: PodEvents::new(time::now()),
            owner: None,
            is_owner_read: false,
            refresh_at: now,
            list_at: now,
            cells_lane,
            events_lane,
            denials: Denials::new(options.periods.first_pause),
            is_event_turn: false,
            is_older_logged: false,
            options,
        };
        // Subscribed before the task runs, so that no later event is missed.
        let events = task.source.events();
        Self(AbortOnDropHandle::new(tokio::spawn(task.run(events))))
    }
}

/// Calls of a kind that fail together.
#[derive(Debug)]
struct Lane {
    gate: Gate,
    /// The operations that have failed since their last success.
    failing: Vec<&'static str>,
    /// True while denied objects wait alone. They are part of the series of failures.
    has_denied: bool,
    meaning: &'static str,
}

impl Lane {
    fn new(meaning: &'static str, first_pause: Duration) -> Self {
        Self { gate: Gate::new(first_pause), failing: Vec::new(), has_denied: false, meaning }
    }

    /// Returns the time from which a call that is due at `due` may be made.
    fn open(&self, due: Instant) -> Instant {
        self.gate.open_at().map_or(due, |open| open.max(due))
    }

    /// Notes the outcome of an operation. A series of failures ends once all failed operations have
    /// succeeded, because a server that lists objects may still fail all writes.
    fn note(&mut self, operation: &'static str, outcome: &Result<(), Failure>) {
        match outcome {
            Ok(()) => {
                self.failing.retain(|own| *own != operation);
                if !self.failing.is_empty() {
                    return;
                }
                if self.has_denied {
                    self.gate.resume();
                } else if self.gate.succeeded() {
                    tracing::info!(
                        until_now = self.meaning,
                        "calls of the Kubernetes API succeed again"
                    );
                }
            }
            Err(failure) => {
                if !self.failing.contains(&operation) {
                    self.failing.push(operation);
                }
                if self.gate.failed(failure, Instant::now(), fastrand::f64()) {
                    tracing::warn!(error = %failure, "{}, pods are not affected", self.meaning);
                }
            }
        }
    }
}

struct Task {
    options: Options,
    connection: Connection,
    counter: Arc<dyn Counter>,
    source: Arc<dyn Source>,
    plan: Plan,
    pace: Pace,
    pod_events: PodEvents,
    recorder: Recorder,
    /// The Node object; `None` until it is read, and while it is absent.
    owner: Option<OwnerReference>,
    /// True once the Node object is read for the next list.
    is_owner_read: bool,
    refresh_at: Instant,
    list_at: Instant,
    cells_lane: Lane,
    events_lane: Lane,
    denials: Denials,
    /// True if it is the events' turn, which alternates with the cells' turn.
    is_event_turn: bool,
    /// True once an outdated definition was logged.
    is_older_logged: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Own,
    List,
    Write,
    Event,
}

impl Task {
    async fn run(mut self, mut events: BoxStream<'static, admin::Event>) {
        loop {
            if self.refresh_at <= Instant::now() {
                self.refresh().await;
            }
            if let Some((step, at)) = self.next_step()
                && at <= Instant::now()
            {
                self.step(step).await;
            }
            let wake = self.next_step().map_or(self.refresh_at, |(_, at)| at.min(self.refresh_at));
            tokio::select! {
                // Events first: otherwise they would be missed while calls are always due.
                biased;
                Some(event) = events.next() => self.happened(&event).await,
                () = sleep_until(wake.into()) => {}
            }
        }
    }

    /// Returns the next due step, and its time.
    fn next_step(&mut self) -> Option<(Step, Instant)> {
        let now = Instant::now();
        let paced = self.pace.next().unwrap_or(now);
        let mut steps = Vec::with_capacity(3);
        if self.options.cells {
            let read = if self.is_owner_read { Step::List } else { Step::Own };
            steps.push((read, self.cells_lane.open(self.list_at)));
            if self.owner.is_some() && self.plan.next(now).is_some() {
                steps.push((Step::Write, self.cells_lane.open(paced)));
            }
        }
        if !self.recorder.is_empty() {
            steps.push((Step::Event, self.events_lane.open(paced)));
        }
        let order = |(step, at): &(Step, Instant)| {
            let is_turn = (*step == Step::Event) == self.is_event_turn;
            ((*at).max(now), !is_turn)
        };
        steps.into_iter().min_by_key(order)
    }

    /// Returns the operation of a step.
    fn operation(&mut self, step: Step) -> &'static str {
        match step {
            Step::Own => "get nodes",
            Step::List => "list cells",
            Step::Write => self.plan.next(Instant::now()).map_or("", |write| write.operation()),
            Step::Event => "events",
        }
    }

    async fn step(&mut self, step: Step) {
        self.is_event_turn = step == Step::Write;
        let operation = self.operation(step);
        let outcome = match step {
            Step::Own => self.own().await,
            Step::List => self.list().await,
            Step::Write => match self.write().await {
                Ok(false) => return,
                outcome => outcome.map(|_| ()),
            },
            Step::Event => self.report().await,
        };
        if let Err(failure) = &outcome {
            self.connection.failed(failure);
        }
        match step {
            Step::Own | Step::List | Step::Write => {
                if outcome.is_err() {
                    // Other clients may have changed objects meanwhile.
                    self.list_again();
                } else if step == Step::List {
                    // The failed write may not be needed any more.
                    let now = Instant::now();
                    self.cells_lane.failing.retain(|own| self.plan.needs(own, now));
                }
                self.cells_lane.has_denied = self.plan.has_denied();
                self.cells_lane.note(operation, &outcome);
            }
            Step::Event => self.events_lane.note(operation, &outcome),
        }
    }

    async fn happened(&mut self, event: &admin::Event) {
        self.refresh_at = self.refresh_at.min(Instant::now() + REFRESH_DELAY);
        if event.kind == "Cell"
            && let Some(shown) = self.source.cell(&event.name).await
        {
            self.pod_events.remember(shown);
        }
        if self.options.events {
            for event in self.pod_events.of(event) {
                if !self.recorder.add(event, Instant::now(), time::now()) {
                    self.counter.event_dropped();
                }
            }
        }
    }

    /// Schedules reading the Node object and listing the objects for as soon as calls may be made.
    fn list_again(&mut self) {
        self.list_at = Instant::now();
        self.is_owner_read = false;
    }

    /// Reads the cells.
    async fn refresh(&mut self) {
        let now = Instant::now();
        self.refresh_at = now + REFRESH_INTERVAL;
        let Some(owner) = &self.owner else { return };
        let shown = self.source.cells().await;
        self.plan.want(shown.iter().map(|shown| object::render(shown, owner)).collect(), now);
    }
}
