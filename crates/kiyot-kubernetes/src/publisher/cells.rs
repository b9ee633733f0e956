//! Objects of this node's cells.

use std::time::Instant;

use serde::Deserialize;

use super::Task;
use crate::{call::Call, client::Client, failure::Failure, object::Cell, plan::Write};

/// Bounds the parts of a list.
const MAX_PARTS: usize = 100;

impl Task {
    /// Lists this node's objects. Objects without a cell are deleted later.
    pub(super) async fn list(&mut self) -> Result<(), Failure> {
        let client = self.connection.client().await?;
        let cells = cells_of(&client, &self.options.node).await?;
        let now = Instant::now();
        self.plan.listed(cells, now);
        self.list_at = now + self.options.periods.list;
        self.is_owner_read = false;
        Ok(())
    }

    /// Writes the next due object. Returns false if the outcome proves nothing about other writes:
    /// the object of a status is absent, or an object is denied and waits alone.
    pub(super) async fn write(&mut self) -> Result<bool, Failure> {
        let Some(write) = self.plan.next(Instant::now()) else { return Ok(true) };
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
            Ok(response) => {
                self.compare(&write, response.as_ref());
                self.plan.written(write, response.as_ref(), now);
            }
            Err(Failure::NotFound(reason)) if !matches!(write, Write::Apply(_)) => {
                if self.plan.absent(&write) {
                    return Err(Failure::NotFound(reason));
                }
                let is_deletion = matches!(write, Write::Delete { .. });
                if !is_deletion {
                    // The object may have been removed with its owner.
                    self.list_again();
                }
                return Ok(is_deletion);
            }
            Err(Failure::Invalid(reason)) => {
                tracing::warn!(cell = write.name(), reason, "object of a cell was refused");
                self.plan.refused(write);
            }
            // A policy or a webhook may deny a single object.
            Err(failure @ Failure::Denied(_)) if self.may_wait(&write) => {
                self.connection.failed(&failure);
                if self.cells_lane.gate.noted(&failure) {
                    tracing::warn!(
                        cell = write.name(),
                        error = %failure,
                        "{}, pods are not affected",
                        self.cells_lane.meaning
                    );
                }
                let first_pause = self.options.periods.first_pause;
                self.plan.denied(&write, &failure, first_pause, now, fastrand::f64());
                return Ok(false);
            }
            Err(failure) => {
                self.plan.postpone();
                return Err(failure);
            }
        }
        Ok(true)
    }
}

impl Task {
    /// Returns whether the object of a denied write may wait alone. If writes of its kind already
    /// fail, others are denied for the same reason.
    fn may_wait(&self, write: &Write) -> bool {
        !self.cells_lane.failing.contains(&write.operation()) && self.plan.may_wait(write.name())
    }

    /// Logs once that the API server drops written fields.
    fn compare(&mut self, write: &Write, response: Option<&Cell>) {
        let (Write::ApplyStatus(cell), Some(response)) = (write, response) else { return };
        if !self.is_older_logged && response.status != cell.status {
            self.is_older_logged = true;
            tracing::warn!(
                "kind Cell of the API server drops fields: apply deploy/crds of this version"
            );
        }
    }
}

/// Returns the objects of a node's cells.
async fn cells_of(client: &Client, node: &str) -> Result<Vec<Cell>, Failure> {
    let (mut cells, mut position) = (Vec::new(), None::<String>);
    for _ in 0..MAX_PARTS {
        let part: List = match client.object(&Call::list_cells(node, position.as_deref())).await {
            // Begin the list again.
            Err(Failure::Expired(_)) if position.is_some() => {
                cells.clear();
                position = None;
                continue;
            }
            part => part?,
        };
        // Nodes with names beyond 63 bytes may share a label.
        cells.extend(part.items.into_iter().filter(|cell| cell.spec.node_name == node));
        position = Some(part.metadata.r#continue).filter(|position| !position.is_empty());
        if position.is_none() {
            return Ok(cells);
        }
    }
    // With an incomplete list, missing objects would count as absent.
    Err(Failure::Server { status: 200, message: format!("list has more than {MAX_PARTS} parts") })
}

/// A part of a list of cells.
#[derive(Debug, Deserialize)]
struct List {
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
