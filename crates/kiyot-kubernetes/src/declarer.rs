//! The task that declares the node's capacity.
//!
//! It reads the Node object once a period, and when the room for further pods changes. It patches
//! the Node object when figures are due, and compares the response with the declared figures.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use kiyot_values::names::{CELL, DEFAULT_NAMESPACE};
use serde_json::{Value, json};
use tokio::time::sleep;
use tokio_util::task::AbortOnDropHandle;

use crate::{
    call::Call,
    capacity::{self, Figures, KEY, Node},
    client::{Access, CALL_TIMEOUT, Connection},
    counter::Counter,
    event_object::{self, EventObject},
    failure::Failure,
    gate::{FIRST_PAUSE, Gate},
    informer::Counted,
    tap::{Room, RoomSource, Tap},
    time,
};

/// Period of reading the Node object, which the kubelet or another client may change.
const CHECK_PERIOD: Duration = Duration::from_secs(60);
/// Period of the tap's steps. A refused launch takes less time.
const STEP_PERIOD: Duration = Duration::from_secs(5);
/// Bounds the message of an event, in characters.
const MAX_MESSAGE_CHARS: usize = 1000;

/// Options of the declarer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeclarerOptions {
    /// Address and credentials.
    pub access: Access,
    /// Name of this node.
    pub node: String,
    /// The configured figures.
    pub figures: Figures,
    /// Reports events of the node.
    pub events: bool,
    /// Period of reading the Node object.
    pub check: Duration,
    /// Period of the tap's steps.
    pub step: Duration,
    /// Pause after a first failure, and between checks until the node's pods and its room are
    /// known.
    pub first_pause: Duration,
}

impl DeclarerOptions {
    /// Returns the options of a node, with the usual periods.
    pub fn new(access: Access, node: String, figures: Figures, events: bool) -> Self {
        let (check, step, first_pause) = (CHECK_PERIOD, STEP_PERIOD, FIRST_PAUSE);
        Self { access, node, figures, events, check, step, first_pause }
    }
}

/// The running declarer. Dropping it ends its task; the declared figures stay.
#[derive(Debug)]
pub struct CapacityDeclarer(
    #[allow(dead_code, reason = "held for its drop")] AbortOnDropHandle<()>,
);

impl CapacityDeclarer {
    /// Starts the task. Called on a runtime of tokio.
    pub fn start(
        options: DeclarerOptions,
        counted: Counted,
        room: Arc<dyn RoomSource>,
        counter: Arc<dyn Counter>,
    ) -> Self {
        let access = options.access.clone();
        counter.capacity_unapplied(options.figures.len());
        let task = Task {
            connection: Connection::new(access, Arc::clone(&counter), CALL_TIMEOUT),
            gate: Gate::new(options.first_pause),
            is_unapplied: false,
            is_exhausted: false,
            tap: Tap::default(),
            declared: None,
            options,
            counted,
            room,
            counter,
        };
        Self(AbortOnDropHandle::new(tokio::spawn(task.run())))
    }
}

struct Task {
    options: DeclarerOptions,
    connection: Connection,
    counted: Counted,
    room: Arc<dyn RoomSource>,
    counter: Arc<dyn Counter>,
    gate: Gate,
    tap: Tap,
    /// The last declared figures, and the time of the next check.
    declared: Option<(Figures, Instant)>,
    /// True while the API server does not apply the declared figures.
    is_unapplied: bool,
    /// True from a report that the node takes no further pods until it takes all pods again.
    is_exhausted: bool,
}

impl Task {
    async fn run(mut self) {
        loop {
            let pause = match self.declare().await {
                Ok(pause) => {
                    if self.gate.succeeded() {
                        tracing::info!("capacity of the node is declared again");
                    }
                    pause
                }
                Err(failure) => {
                    self.connection.failed(&failure);
                    if self.gate.failed(&failure, Instant::now(), fastrand::f64()) {
                        tracing::warn!(
                            error = %failure,
                            "capacity of the node is not declared, new pods may not fit"
                        );
                    }
                    self.gate.left(Instant::now())
                }
            };
            sleep(pause).await;
        }
    }

    /// Declares the figures if the node's figures differ. Returns the pause until the next step.
    async fn declare(&mut self) -> Result<Duration, Failure> {
        let (counted, room) = (self.counted.sum(), self.room.room().await);
        // Without the pods, the figures could be less than the running pods request.
        let (Some(counted), Some(room)) = (counted, room) else {
            return Ok(self.options.first_pause);
        };
        let cells = self.tap.turn(&room, counted.amount(CELL));
        let Room { refusal, figures: mut wanted, .. } = room;
        wanted.extend(self.options.figures.clone());
        let mut figures = capacity::figures(&wanted, &counted);
        figures.insert(CELL.to_owned(), cells);
        let is_due = |(declared, check): &(Figures, Instant)| {
            *declared != figures || *check <= Instant::now()
        };
        let is_due = self.declared.as_ref().is_none_or(is_due);
        if is_due {
            let client = self.connection.client().await?;
            let name = &self.options.node;
            let mut node: Node = client.object(&Call::get_node(name)).await?;
            let patch = if node.is_declared() { capacity::patch(&figures, &node) } else { None };
            if let Some(patch) = patch {
                node = client.object(&Call::patch_node_status(name, patch)).await?;
            }
            self.declared = Some((figures.clone(), Instant::now() + self.options.check));
            self.compare(&figures, &node).await;
            self.report_tap(refusal, &node).await;
        }
        Ok(self.options.step)
    }

    /// Reports once that the node takes no further pods, until it takes all pods again.
    async fn report_tap(&mut self, refusal: Option<String>, node: &Node) {
        let is_exhausted = !self.tap.is_open() && node.is_declared();
        self.counter.cells_exhausted(is_exhausted);
        match (self.is_exhausted, refusal) {
            (false, Some(reason)) if is_exhausted => {
                self.is_exhausted = true;
                tracing::warn!(reason, "node takes no further pods, no cell can be launched");
                let message = format!("no cell can be launched: {reason}");
                self.report(node, "CellsExhausted", &message).await;
            }
            (true, _) if !is_exhausted => {
                self.is_exhausted = false;
                tracing::info!("node takes as many pods as cells are allowed");
            }
            _ => {}
        }
    }

    /// Reports once the figures that the API server does not apply, until it applies them.
    async fn compare(&mut self, figures: &Figures, node: &Node) {
        let lacking = node.lacks(figures);
        self.counter.capacity_unapplied(lacking.len());
        let was_unapplied = std::mem::replace(&mut self.is_unapplied, !lacking.is_empty());
        if lacking.is_empty() {
            if was_unapplied {
                tracing::info!("declared capacity of the node is applied again");
            }
            return;
        }
        if was_unapplied {
            return;
        }
        let reason = if node.is_declared() {
            "the policy kiyot-capacity is not applied".to_owned()
        } else {
            format!("the node has no label {KEY}=declared")
        };
        let figures = lacking.join(",");
        tracing::warn!(figures, reason, "declared capacity of the node is not applied");
        let message = format!("{reason}, and the node has less than {figures}");
        self.report(node, "CapacityNotApplied", &message).await;
    }

    async fn report(&mut self, node: &Node, reason: &str, message: &str) {
        if !self.options.events {
            return;
        }
        let event = self.event(node, reason, message);
        let outcome = match self.connection.client().await {
            Ok(client) => client.call(&Call::create_event(DEFAULT_NAMESPACE, event)).await.err(),
            Err(failure) => Some(failure),
        };
        if outcome.is_some() {
            self.counter.event_dropped();
        }
    }

    fn event(&self, node: &Node, reason: &str, message: &str) -> Value {
        let (name, now) = (&self.options.node, time::now());
        let message: String = message.chars().take(MAX_MESSAGE_CHARS).collect();
        let subject = json!({
            "apiVersion": "v1", "kind": "Node", "name": name, "uid": node.metadata.uid,
        });
        let object = EventObject {
            name: &event_object::name(name, now.unsigned_abs()),
            namespace: DEFAULT_NAMESPACE,
            subject,
            is_warning: true,
            reason,
            message: &message,
            first_unix_nanos: now,
            last_unix_nanos: now,
            count: 1,
        };
        object.of_node(name)
    }
}
