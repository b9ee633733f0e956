//! The node's lease, and the objects of dead nodes.

use std::time::{Duration, Instant};

use serde::Deserialize;

use super::{
    Task,
    cells::{ListMetadata, cells_of},
};
use crate::{
    call::Call,
    failure::Failure,
    lease::{self, Lease, MAX_LEASES},
    time,
};

/// Most parts of a list of leases.
const MAX_PARTS: usize = 50;

impl Task {
    /// Renews the node's lease.
    pub(super) async fn renew(&mut self) -> Result<(), Failure> {
        let client = self.connection.client().await?;
        let namespace = &self.options.lease_namespace;
        let duration = self.options.periods.lease;
        let lease = lease::renewed(&self.options.node, namespace, duration, time::now());
        let outcome = client.call(&Call::apply_lease(namespace, &lease)).await;
        let now = Instant::now();
        self.pace.wrote(now);
        outcome?;
        // Another node may have removed this node's objects meanwhile.
        if self.renewed_at.is_some_and(|renewed| now - renewed > duration / 2) {
            self.list_at = now;
        }
        self.renewed_at = Some(now);
        self.renew_at = now + self.options.periods.renewal;
        Ok(())
    }

    /// Looks at the leases of all nodes, and lists the objects of dead nodes.
    pub(super) async fn sweep(&mut self) -> Result<(), Failure> {
        let client = self.connection.client().await?;
        let namespace = self.options.lease_namespace.clone();
        let (mut leases, mut position) = (Vec::new(), String::new());
        for _ in 0..MAX_PARTS {
            let part: List = client.object(&Call::list_leases(&namespace, &position)).await?;
            leases.extend(part.items);
            position = part.metadata.r#continue;
            if position.is_empty() || leases.len() >= MAX_LEASES {
                break;
            }
        }
        let now = Instant::now();
        let mut dead = self.observed.note(leases, now);
        dead.retain(|lease| lease.spec.holder_identity != self.options.node);
        // All nodes look, and the first that sees it removes a dead node's objects.
        let spread = 0.75 + fastrand::f64() / 2.0;
        self.sweep_at = now + self.options.periods.sweep.mul_f64(spread);
        if !self.removals.is_empty() {
            return Ok(());
        }
        // A node at a time: the removals of all would be held in memory.
        let Some(lease) = dead.first() else { return Ok(()) };
        let node = &lease.spec.holder_identity;
        let cells = cells_of(&client, node).await?;
        tracing::info!(node, cells = cells.len(), "lease of another node has run out");
        let own =
            |cell: &crate::object::Cell| Call::delete_cell(&cell.metadata.name, &cell.metadata.uid);
        self.removals.extend(cells.iter().map(own));
        self.removals.push_back(Call::delete_lease(&namespace, &lease.metadata));
        if dead.len() > 1 {
            self.sweep_at = now + Duration::from_secs(1);
        }
        Ok(())
    }

    /// Makes the next removal.
    pub(super) async fn remove(&mut self) -> Result<(), Failure> {
        let client = self.connection.client().await?;
        let Some(call) = self.removals.pop_front() else { return Ok(()) };
        let outcome = client.call(&call).await;
        self.pace.wrote(Instant::now());
        match outcome {
            // Another node was faster, or the dead node is back.
            Ok(_) | Err(Failure::NotFound(_) | Failure::Conflict(_)) => Ok(()),
            Err(failure) => {
                // The lease is still there, and is seen again by a later look.
                self.removals.clear();
                Err(failure)
            }
        }
    }
}

/// A part of a list of leases.
#[derive(Debug, Deserialize)]
struct List {
    #[serde(default)]
    metadata: ListMetadata,
    #[serde(default)]
    items: Vec<Lease>,
}
