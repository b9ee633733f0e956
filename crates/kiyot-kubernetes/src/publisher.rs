//! The task that keeps the objects of this node's cells current.
//!
//! It makes a call at a time, each with a deadline, and writes at a bounded pace. It reads the
//! cells as the admin API does, and nothing waits for it.

use std::{
    collections::BTreeSet,
    sync::Arc,
    time::{Duration, Instant},
};

use futures::StreamExt;
use kiyot_proto::admin;
use serde::Deserialize;
use tokio::time::sleep_until;
use tokio_util::task::AbortOnDropHandle;

use crate::{
    call::Call,
    client::{Access, Connection},
    failure::Failure,
    gate::Gate,
    object::{self, Cell},
    pace::{MAX_WRITES_PER_SECOND, Pace},
    plan::{Plan, Write},
    source::Source,
    time,
};

/// Period of reading the cells, for changes without an event.
const REFRESH_INTERVAL: Duration = Duration::from_secs(5);
/// Time from an event to reading the cells: events come in groups.
const REFRESH_DELAY: Duration = Duration::from_millis(300);
/// Period of listing this node's objects, which somebody may have changed or deleted.
const LIST_INTERVAL: Duration = Duration::from_secs(600);
/// Most parts of a list.
const MAX_PARTS: usize = 100;
/// Status of the event of a cell whose agent was given up.
const LOST: &str = "Lost";

/// Options of the publisher.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Address and credentials.
    pub access: Access,
    /// Name of this node.
    pub node: String,
}

/// The running publisher. Dropping it ends its task.
#[derive(Debug)]
pub struct Publisher(#[allow(dead_code, reason = "held for its drop")] AbortOnDropHandle<()>);

impl Publisher {
    /// Starts the task. Called on a runtime of tokio.
    pub fn start(options: Options, source: Arc<dyn Source>) -> Self {
        let task = Task {
            connection: Connection::new(options.access),
            node: options.node,
            source,
            plan: Plan::default(),
            pace: Pace::per_second(MAX_WRITES_PER_SECOND),
            gate: Gate::default(),
            lost: BTreeSet::new(),
            refresh_at: Instant::now(),
            list_at: Instant::now(),
        };
        Self(AbortOnDropHandle::new(tokio::spawn(task.run())))
    }
}

struct Task {
    connection: Connection,
    node: String,
    source: Arc<dyn Source>,
    plan: Plan,
    pace: Pace,
    gate: Gate,
    /// The cells whose agents were given up, until they end.
    lost: BTreeSet<String>,
    refresh_at: Instant,
    list_at: Instant,
}

impl Task {
    async fn run(mut self) {
        let mut events = self.source.events();
        loop {
            if self.refresh_at <= Instant::now() {
                self.refresh().await;
            }
            self.step().await;
            let wake = self.wake().into();
            tokio::select! {
                () = sleep_until(wake) => {}
                Some(event) = events.next() => self.happened(&event),
            }
        }
    }

    /// Returns the time of the next step.
    fn wake(&self) -> Instant {
        let now = Instant::now();
        let open = self.gate.open_at().unwrap_or(now);
        let mut wake = self.refresh_at.min(self.list_at.max(open));
        if self.plan.waiting() > 0 {
            wake = wake.min(self.pace.next().unwrap_or(now).max(open));
        }
        wake
    }

    fn happened(&mut self, event: &admin::Event) {
        if event.status == LOST {
            self.lost.insert(event.name.clone());
        }
        self.refresh_at = self.refresh_at.min(Instant::now() + REFRESH_DELAY);
    }

    /// Reads the cells.
    async fn refresh(&mut self) {
        let shown = self.source.cells().await;
        let now = Instant::now();
        self.lost.retain(|lost| shown.iter().any(|shown| shown.cell.id == *lost));
        let render = |shown| object::render(shown, self.lost.contains(&shown.cell.id));
        self.plan.want(shown.iter().map(render).collect(), now, time::now());
        self.refresh_at = now + REFRESH_INTERVAL;
    }

    /// Makes a call that is due.
    async fn step(&mut self) {
        let now = Instant::now();
        if self.gate.open_at().is_some_and(|open| open > now) {
            return;
        }
        let outcome = if self.list_at <= now {
            self.list().await
        } else if self.pace.next().is_none_or(|next| next <= now) {
            match self.plan.next(now) {
                Some(write) => self.write(write).await,
                None => return,
            }
        } else {
            return;
        };
        match outcome {
            Ok(()) => {
                if self.gate.succeeded() {
                    tracing::info!("cells are shown in the Kubernetes API again");
                }
            }
            Err(failure) => self.failed(&failure),
        }
    }

    fn failed(&mut self, failure: &Failure) {
        self.connection.failed(failure);
        // Somebody may have deleted objects meanwhile.
        self.list_at = Instant::now();
        if self.gate.failed(failure, Instant::now(), fastrand::f64()) {
            tracing::warn!(
                error = %failure,
                "cells are not shown in the Kubernetes API, pods are not affected"
            );
        }
    }

    /// Lists this node's objects: those without a cell are deleted.
    async fn list(&mut self) -> Result<(), Failure> {
        let client = self.connection.client().await?;
        let mut cells = Vec::new();
        let mut position = String::new();
        for _ in 0..MAX_PARTS {
            let call = Call::list_cells(&self.node, &position);
            let part: CellList = match client.object(&call).await {
                // The list begins again.
                Err(Failure::Expired(_)) if !position.is_empty() => {
                    cells.clear();
                    position.clear();
                    continue;
                }
                part => part?,
            };
            let own = |cell: &Cell| cell.spec.node_name == self.node;
            cells.extend(part.items.into_iter().filter(own));
            position = part.metadata.r#continue;
            if position.is_empty() {
                break;
            }
        }
        let now = Instant::now();
        self.plan.listed(cells, now);
        self.list_at = now + LIST_INTERVAL;
        Ok(())
    }

    async fn write(&mut self, write: Write) -> Result<(), Failure> {
        let client = self.connection.client().await?;
        let call = match &write {
            Write::Apply(cell) => Call::apply_cell(cell),
            Write::ApplyStatus(cell) => Call::apply_cell_status(cell),
            Write::Delete { name, uid } => Call::delete_cell(name, uid),
        };
        let outcome = match &write {
            Write::Delete { .. } => client.call(&call).await.map(|_| None),
            _ => client.object::<Cell>(&call).await.map(Some),
        };
        let now = Instant::now();
        self.pace.wrote(now);
        match outcome {
            Ok(response) => self.plan.written(write, response.as_ref(), now),
            Err(Failure::NotFound(_)) if !matches!(write, Write::Apply(_)) => {
                self.plan.absent(&write);
            }
            Err(Failure::Invalid(reason)) => {
                tracing::warn!(cell = write.name(), reason, "object of a cell was refused");
                self.plan.refused(write);
            }
            Err(failure) => {
                self.plan.postpone();
                return Err(failure);
            }
        }
        Ok(())
    }
}

/// A part of a list of cells.
#[derive(Debug, Deserialize)]
struct CellList {
    #[serde(default)]
    metadata: ListMetadata,
    #[serde(default)]
    items: Vec<Cell>,
}

#[derive(Debug, Default, Deserialize)]
struct ListMetadata {
    #[serde(default)]
    r#continue: String,
}
