//! The store: the node's records in a redb file, owned by a thread. A commit that has returned is
//! on disk.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use kiyot_engine::StoreError;
use kiyot_proto::store::Envelope;
use prost::Message;
use tokio::sync::{mpsc, oneshot};

mod file;
mod reserve;
mod thread;

#[cfg(test)]
mod tests;

use thread::Request;

/// The version of the records that this build writes. Records of later versions are quarantined,
/// because this build would misread them.
const RECORD_VERSION: u32 = 1;
/// The most requests in the thread's queue; a caller waits while it is full.
const MAX_QUEUED_REQUESTS: usize = 1024;
/// The most batches of a transaction, which share a sync to disk.
const MAX_BATCHES_PER_TRANSACTION: usize = 256;
/// The most rows of a part of a list.
const MAX_LISTED_ROWS: usize = 256;

/// A table of the store: a kind of record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Table {
    /// `kiyot.store.v1.Cell` by cell id.
    Cells,
    /// `Order` by sandbox id.
    Orders,
    /// `SandboxMeta` by sandbox id.
    Sandboxes,
    /// `SandboxStatus` by sandbox id.
    SandboxStatuses,
    /// `ContainerMeta` by container id.
    Containers,
    /// `ContainerStatus` by container id.
    ContainerStatuses,
    /// `CellRuntime` by a fixed key.
    Runtime,
    /// `CertificateAuthority` by a fixed key.
    Node,
    /// `NamespaceCost` by namespace.
    Costs,
    /// `BudgetShare` by namespace/name.
    Shares,
    /// `Cordon` by a fixed key.
    Cordon,
    /// `StandalonePod` of an earlier version, by the pod's uid.
    StandalonePods,
    /// Requested ends of these pods, by the same uid.
    StandaloneEnds,
}

impl Table {
    /// Returns the name in the file.
    const fn name(self) -> &'static str {
        match self {
            Self::Cells => "cells",
            Self::Orders => "orders",
            Self::Sandboxes => "sandboxes",
            Self::SandboxStatuses => "sandbox_statuses",
            Self::Containers => "containers",
            Self::ContainerStatuses => "container_statuses",
            Self::Runtime => "runtime",
            Self::Node => "node",
            Self::Costs => "costs",
            Self::Shares => "budget_shares",
            Self::Cordon => "cordon",
            Self::StandalonePods => "standalone_pods",
            Self::StandaloneEnds => "standalone_ends",
        }
    }
}

/// A change of a record: `None` removes it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Change {
    table: Table,
    key: String,
    record: Option<Vec<u8>>,
}

/// A row of the file without its record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Row {
    /// The name of the table.
    pub table: String,
    /// The key.
    pub key: String,
    /// The length of the record with its envelope, in bytes.
    pub bytes: usize,
}

/// Changes that are committed atomically.
#[derive(Debug, Default)]
pub struct Batch {
    changes: Vec<Change>,
}

impl Batch {
    /// Adds or replaces a record.
    pub fn put<M: prost::Message>(&mut self, table: Table, key: &str, record: &M) -> &mut Self {
        let envelope = Envelope { version: RECORD_VERSION, record: record.encode_to_vec().into() };
        self.changes.push(Change {
            table,
            key: key.to_owned(),
            record: Some(envelope.encode_to_vec()),
        });
        self
    }

    /// Removes a record; an absent record is not an error.
    pub fn remove(&mut self, table: Table, key: &str) -> &mut Self {
        self.changes.push(Change { table, key: key.to_owned(), record: None });
        self
    }

    /// Returns whether the batch has no changes.
    pub fn is_empty(&self) -> bool {
        self.changes.is_empty()
    }
}

/// A handle to the store. Cheap to clone; the thread ends with the last handle.
#[derive(Debug, Clone)]
pub struct Store {
    requests: mpsc::Sender<Request>,
    path: Arc<PathBuf>,
}

impl Store {
    /// Opens or creates the file `store.redb` in a directory.
    ///
    /// Only the owner may access directory (0700) and file (0600), because the file holds the
    /// private key of the certificate authority. Waits some seconds if another process has the file
    /// open: it may be a previous daemon that is shutting down.
    pub async fn open(state_dir: &Path) -> Result<Self, StoreError> {
        let path = state_dir.join("store.redb");
        let (requests, queue) = mpsc::channel(MAX_QUEUED_REQUESTS);
        let (opened, reply) = oneshot::channel();
        let file = path.clone();
        std::thread::Builder::new()
            .name("kiyot-store".to_owned())
            .spawn(move || thread::run(file, opened, queue))
            .map_err(|error| StoreError::new("starting the thread", error))?;
        reply.await.map_err(|_| StoreError::closed())??;
        Ok(Self { requests, path: Arc::new(path) })
    }

    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Commits a batch. When this returns, the batch is on disk.
    ///
    /// Batches that wait at the same time share a transaction. After an error nothing of the batch
    /// is stored, and the store stays usable.
    pub async fn commit(&self, batch: Batch) -> Result<(), StoreError> {
        if batch.is_empty() {
            return Ok(());
        }
        self.call(|reply| Request::Commit { changes: batch.changes, reply }).await?
    }

    /// Returns all records of a table with their keys. A record that can't be decoded, or is of a
    /// later version, is logged and quarantined (moved to a table of its own).
    pub async fn load<M: prost::Message + Default>(
        &self,
        table: Table,
    ) -> Result<Vec<(String, M)>, StoreError> {
        let rows = self.call(|reply| Request::Load { table, reply }).await??;
        let (mut records, mut invalid) = (Vec::with_capacity(rows.len()), Vec::new());
        for (key, content) in rows {
            match decode::<M>(&content) {
                Ok(record) => records.push((key, record)),
                Err(error) => {
                    tracing::error!(table = table.name(), key, error, "invalid record quarantined");
                    invalid.push(key);
                }
            }
        }
        if !invalid.is_empty() {
            self.call(|reply| Request::Quarantine { table, keys: invalid, reply }).await??;
        }
        Ok(records)
    }

    /// Returns the next rows of all tables of the file, including the quarantine, without their
    /// records: the first rows after a row, or of the file. An empty part is the end. Parts are
    /// small, because commits wait for them.
    pub async fn rows(&self, after: Option<Row>) -> Result<Vec<Row>, StoreError> {
        self.call(|reply| Request::List { after, reply }).await?
    }

    /// Waits until earlier requests are done and the file is closed. Later requests fail.
    pub async fn close(&self) {
        // The thread drops the reply's sender once the file is closed.
        let _ = self.call(|reply: oneshot::Sender<()>| Request::Close { reply }).await;
    }

    /// Sends a request to the thread and waits for its reply.
    async fn call<T>(
        &self,
        request: impl FnOnce(oneshot::Sender<T>) -> Request,
    ) -> Result<T, StoreError> {
        let (sender, receiver) = oneshot::channel();
        self.requests.send(request(sender)).await.map_err(|_| StoreError::closed())?;
        receiver.await.map_err(|_| StoreError::closed())
    }
}

/// Decodes the record in an envelope.
fn decode<M: Message + Default>(content: &[u8]) -> Result<M, String> {
    let envelope = Envelope::decode(content).map_err(|error| format!("envelope: {error}"))?;
    if envelope.version == 0 || envelope.version > RECORD_VERSION {
        return Err(format!(
            "version {}: this build reads 1 to {RECORD_VERSION}",
            envelope.version
        ));
    }
    M::decode(envelope.record).map_err(|error| format!("content: {error}"))
}
