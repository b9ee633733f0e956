//! The locations of container logs.

use std::path::PathBuf;

use kiyot_engine::{id::CellId, provider::ProviderError};

use super::{Inventory, PodItem, PodKey, unit, unit::Unit};

/// The log of a container, on the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogSource {
    /// The id of the container.
    pub container: String,
    /// The file on the node, which the daemon writes and the kubelet rotates.
    pub path: PathBuf,
}

/// The reason why a pod has no log of this name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NoLog {
    /// The pod waits for its cell.
    #[error("pod {0} waits for its cell, and has no containers yet")]
    Waiting(String),
    /// The pod has no container of this name.
    #[error("pod {pod} has no container {name:?}; allowed: {}", .known.join(", "))]
    NoContainer {
        /// Namespace/name of the pod.
        pod: String,
        /// The requested name; empty for the default container.
        name: String,
        /// The names of its containers.
        known: Vec<String>,
    },
}

impl Inventory {
    /// Returns the log of the latest container with a name. An empty name selects the default
    /// container of the pod.
    pub fn unit(&self, key: &PodKey, name: &str) -> Result<LogSource, NoLog> {
        let PodItem::Sandbox(sandbox) = &key.item else {
            return Err(NoLog::Waiting(key.name.clone()));
        };
        let units = Unit::all(self.pods.containers_of(sandbox));
        let found = if name.is_empty() {
            let meta = self.pods.sandbox(sandbox.as_str()).map(|found| found.meta());
            let meta = meta.unwrap_or_default();
            let first = meta.config.unwrap_or_default().annotations;
            let annotations = unit::annotations(first, meta.current_annotations);
            Unit::default_of(&units, &annotations)
        } else {
            units.iter().find(|unit| unit.name == name)
        };
        let Some(unit) = found else {
            let mut known: Vec<String> = units.iter().map(|unit| unit.name.clone()).collect();
            known.sort_unstable();
            return Err(NoLog::NoContainer { pod: key.name.clone(), name: name.to_owned(), known });
        };
        let path = unit.latest.meta().log_path.into();
        Ok(LogSource { container: unit.latest.id.to_string(), path })
    }

    /// Returns whether the log of a container is complete.
    pub fn has_whole_log(&self, container: &str) -> bool {
        self.pods.container(container).map_or(true, |container| container.status.log_whole)
    }

    /// Returns the sandbox of a pod; `None` while it waits for its cell.
    pub fn sandbox(&self, key: &PodKey) -> Option<String> {
        match &key.item {
            PodItem::Sandbox(sandbox) => Some(sandbox.to_string()),
            PodItem::Waiting(_) => None,
        }
    }

    /// Returns the end of the console of a cell's instance.
    pub async fn console(&self, cell: &CellId) -> Result<String, ProviderError> {
        self.cells.console(cell).await
    }
}
