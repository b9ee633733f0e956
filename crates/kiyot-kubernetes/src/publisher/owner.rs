//! The node's Node object, which owns the objects of its cells.

use std::time::Instant;

use serde::Deserialize;

use super::Task;
use crate::{
    call::Call,
    failure::Failure,
    object::{Metadata, OwnerReference},
};

/// The parts of a Node object that are read.
#[derive(Debug, Deserialize)]
struct Node {
    metadata: Metadata,
}

impl Task {
    /// Reads the Node object, which may have been replaced. Without it no cell is shown.
    pub(super) async fn own(&mut self) -> Result<(), Failure> {
        let client = self.connection.client().await?;
        let name = &self.options.node;
        let owner = match client.object::<Node>(&Call::get_node(name)).await {
            Ok(node) => OwnerReference::node(name, node.metadata.uid),
            Err(Failure::NotFound(reason)) => {
                self.owner = None;
                let reason = format!("object of the node {name:?}, which owns its cells: {reason}");
                return Err(Failure::NotFound(reason));
            }
            Err(failure) => return Err(failure),
        };
        self.is_owner_read = true;
        if self.owner.as_ref() != Some(&owner) {
            self.owner = Some(owner);
            // Cells are rendered again with the new owner.
            self.refresh_at = Instant::now();
        }
        Ok(())
    }
}
