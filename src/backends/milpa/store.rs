//! The store: one redb file on the node, on a thread of its own. What it says it has kept is on
//! disk.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use kiyot_proto::store::Envelope;
use prost::Message;
use tokio::sync::{mpsc, oneshot};

mod file;
mod reserve;
mod thread;

#[cfg(test)]
mod tests;

use thread::Job;

/// The version of the records that this program writes. One of a later version would be misread,
/// and is set aside.
const RECORD_VERSION: u32 = 1;
/// Jobs that wait for the thread; a caller of a full queue waits.
const QUEUED_JOBS: usize = 1024;
/// Batches that one transaction keeps at most: they share one write to disk.
const BATCHES_IN_ONE_TRANSACTION: usize = 256;

/// One kind of record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Table {
    /// `kiyot.store.v1.Cell` by cell id.
    Cells,
    /// `SandboxMeta` by sandbox id.
    Sandboxes,
    /// `SandboxStatus` by sandbox id.
    SandboxStatuses,
    /// `ContainerMeta` by container id.
    Containers,
    /// `ContainerStatus` by container id.
    ContainerStatuses,
    /// `CellRuntime` by a name.
    Runtime,
    /// The certificate authority, by a name.
    Node,
}

impl Table {
    /// Its name in the file.
    const fn name(self) -> &'static str {
        match self {
            Self::Cells => "cells",
            Self::Sandboxes => "sandboxes",
            Self::SandboxStatuses => "sandbox_statuses",
            Self::Containers => "containers",
            Self::ContainerStatuses => "container_statuses",
            Self::Runtime => "runtime",
            Self::Node => "node",
        }
    }
}

/// Why the store did not do it.
#[derive(Debug, thiserror::Error)]
#[error("store: {doing}")]
pub struct StoreError {
    doing: String,
    #[source]
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

impl StoreError {
    fn new(
        doing: impl Into<String>,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        Self { doing: doing.into(), source: Some(source.into()) }
    }

    fn ended() -> Self {
        Self { doing: "its thread has ended".to_owned(), source: None }
    }
}

/// A record to keep, or, without content, to drop.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Change {
    table: Table,
    key: String,
    record: Option<Vec<u8>>,
}

/// Changes that are kept together or not at all.
#[derive(Debug, Default)]
pub struct Batch {
    changes: Vec<Change>,
}

impl Batch {
    /// Keeps a record.
    pub fn put<M: prost::Message>(&mut self, table: Table, key: &str, record: &M) -> &mut Self {
        let envelope = Envelope { version: RECORD_VERSION, record: record.encode_to_vec().into() };
        self.changes.push(Change {
            table,
            key: key.to_owned(),
            record: Some(envelope.encode_to_vec()),
        });
        self
    }

    /// Drops a record; absent is fine.
    pub fn remove(&mut self, table: Table, key: &str) -> &mut Self {
        self.changes.push(Change { table, key: key.to_owned(), record: None });
        self
    }

    /// Whether it changes nothing.
    pub fn is_empty(&self) -> bool {
        self.changes.is_empty()
    }
}

/// The store. Cheap to clone; the thread ends with the last handle.
#[derive(Debug, Clone)]
pub struct Store {
    jobs: mpsc::Sender<Job>,
    path: Arc<PathBuf>,
}

impl Store {
    /// Opens or makes the file `store.redb` in a directory.
    ///
    /// The directory is made for the owner alone (0700) if it is not there, and so is the file
    /// (0600): it holds the private key of the cells' authority. A file that another process has
    /// open is waited for, for a moment: the process before this one may be ending.
    pub async fn open(state_dir: &Path) -> Result<Self, StoreError> {
        let path = state_dir.join("store.redb");
        let (jobs, queue) = mpsc::channel(QUEUED_JOBS);
        let (opened, answer) = oneshot::channel();
        let file = path.clone();
        std::thread::Builder::new()
            .name("kiyot-store".to_owned())
            .spawn(move || thread::run(file, opened, queue))
            .map_err(|error| StoreError::new("starting its thread", error))?;
        answer.await.map_err(|_| StoreError::ended())??;
        Ok(Self { jobs, path: Arc::new(path) })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Keeps a batch. When it returns, it is on disk.
    ///
    /// Batches that wait at the same time share one transaction. After an error nothing of the
    /// batch is kept, and the store goes on.
    pub async fn commit(&self, batch: Batch) -> Result<(), StoreError> {
        if batch.is_empty() {
            return Ok(());
        }
        let (done, answer) = oneshot::channel();
        self.jobs
            .send(Job::Commit { changes: batch.changes, done })
            .await
            .map_err(|_| StoreError::ended())?;
        answer.await.map_err(|_| StoreError::ended())?
    }

    /// All records of a table by key. A record that can't be read, or is of a later version, is
    /// logged and set aside (copied to a table of broken ones).
    pub async fn load<M: prost::Message + Default>(
        &self,
        table: Table,
    ) -> Result<Vec<(String, M)>, StoreError> {
        let (done, answer) = oneshot::channel();
        self.jobs.send(Job::Load { table, done }).await.map_err(|_| StoreError::ended())?;
        let rows = answer.await.map_err(|_| StoreError::ended())??;
        let (mut records, mut broken) = (Vec::with_capacity(rows.len()), Vec::new());
        for (key, content) in rows {
            match opened::<M>(&content) {
                Ok(record) => records.push((key, record)),
                Err(why) => {
                    tracing::error!(
                        table = table.name(),
                        key,
                        why,
                        "A record of the store can't be read and is set aside"
                    );
                    broken.push(key);
                }
            }
        }
        if !broken.is_empty() {
            let (done, answer) = oneshot::channel();
            self.jobs
                .send(Job::SetAside { table, keys: broken, done })
                .await
                .map_err(|_| StoreError::ended())?;
            answer.await.map_err(|_| StoreError::ended())??;
        }
        Ok(records)
    }

    /// Waits until all that was sent before is kept and the file is closed. Other handles then get
    /// errors.
    pub async fn close(&self) {
        let (done, answer) = oneshot::channel();
        if self.jobs.send(Job::Close { done }).await.is_ok() {
            // The error that comes says that it is closed.
            let _ = answer.await;
        }
    }
}

/// The record in an envelope, or why it can't be had.
fn opened<M: Message + Default>(content: &[u8]) -> Result<M, String> {
    let envelope = Envelope::decode(content).map_err(|error| format!("its envelope: {error}"))?;
    if envelope.version == 0 || envelope.version > RECORD_VERSION {
        return Err(format!(
            "it has version {}, and this program knows 1 to {RECORD_VERSION}",
            envelope.version
        ));
    }
    M::decode(envelope.record).map_err(|error| format!("its content: {error}"))
}
