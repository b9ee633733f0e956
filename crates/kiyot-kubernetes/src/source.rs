//! The cells and events that the daemon provides.

use std::collections::BTreeMap;

use async_trait::async_trait;
use futures::stream::BoxStream;
use kiyot_proto::admin;

/// A cell with the parts of its pod that its object shows.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ShownCell {
    /// The cell, in the form of the admin API.
    pub cell: admin::Cell,
    /// The labels of its pod.
    pub labels: BTreeMap<String, String>,
}

/// The daemon's cells and events.
#[async_trait]
pub trait Source: Send + Sync + 'static {
    /// Returns all cells whose end is not proven.
    async fn cells(&self) -> Vec<ShownCell>;

    /// Returns a cell whose pod may have events; `None` if its end is proven.
    async fn cell(&self, id: &str) -> Option<ShownCell>;

    /// Returns a stream of all events from now on. A slow reader misses events.
    fn events(&self) -> BoxStream<'static, admin::Event>;
}
