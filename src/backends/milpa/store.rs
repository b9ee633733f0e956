//! The store: one redb file on the node, on a thread of its own. What it says it has kept is on disk.

use std::path::Path;

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
    /// Single values by name: the node's boot id, the certificate authority.
    Node,
}

/// Why the store did not do it.
#[derive(Debug, thiserror::Error)]
#[error("store: {doing}")]
pub struct StoreError {
    doing: String,
    #[source]
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

/// Changes that are kept together or not at all.
#[derive(Debug, Default)]
pub struct Batch {}

impl Batch {
    /// Keeps a record.
    pub fn put<M: prost::Message>(&mut self, _table: Table, _key: &str, _record: &M) -> &mut Self {
        unimplemented!()
    }

    /// Drops a record; absent is fine.
    pub fn remove(&mut self, _table: Table, _key: &str) -> &mut Self {
        unimplemented!()
    }
}

/// The store. Cheap to clone; the thread ends with the last handle.
#[derive(Debug, Clone)]
pub struct Store {}

impl Store {
    /// Opens or makes the file `store.redb` in a directory.
    pub async fn open(_state_dir: &Path) -> Result<Self, StoreError> {
        unimplemented!()
    }

    /// Keeps a batch. When it returns, it is on disk.
    pub async fn commit(&self, _batch: Batch) -> Result<(), StoreError> {
        unimplemented!()
    }

    /// All records of a table by key. A record that can't be read, or is of a later version, is logged and set aside (copied to a table of broken ones).
    pub async fn load<M: prost::Message + Default>(&self, _table: Table) -> Result<Vec<(String, M)>, StoreError> {
        unimplemented!()
    }
}
