//! Files in cells, changed and read over the link.

use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use kiyot_proto::cell::{FileChange, GetFileRequest, Root, file_change};

use super::plan::CellPath;
use crate::{
    backends::milpa::{
        cell_client::{self, CHANGE_FILES_TIMEOUT, CellClient},
        failure::{Code, Failure},
        gateway::CellLink,
    },
    metrics::ByteCounter,
};

/// Longest wait for a cell that is not connected.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(20);

/// Access to the files of a cell. Tests have their own implementation.
#[async_trait]
pub(super) trait CellFiles: Send + Sync + 'static {
    /// Applies changes in order, until one fails.
    async fn change(&self, changes: Vec<FileChange>) -> Result<(), Failure>;
    /// Returns the first or last `limit` bytes of a file; `None` if it is absent.
    async fn get(&self, place: &CellPath, limit: u32, last: bool)
    -> Result<Option<Bytes>, Failure>;
    /// Returns an absolute path in the cell.
    async fn path(&self, place: &CellPath) -> Result<String, Failure>;
}

/// Files of a cell over its link.
#[derive(Debug)]
pub(super) struct LinkFiles(pub(super) CellLink, pub(super) ByteCounter);

#[async_trait]
impl CellFiles for LinkFiles {
    async fn change(&self, changes: Vec<FileChange>) -> Result<(), Failure> {
        let bytes = changes.iter().map(content_bytes).sum();
        CellClient::over(&self.0).change_files(CHANGE_FILES_TIMEOUT, changes).await?;
        self.1.add(bytes);
        Ok(())
    }

    async fn get(
        &self,
        place: &CellPath,
        limit: u32,
        last: bool,
    ) -> Result<Option<Bytes>, Failure> {
        let request =
            GetFileRequest { root: place.root.into(), path: place.path.clone(), limit, last };
        let reply = CellClient::over(&self.0).get_file(request).await?;
        Ok(reply.exists.then(|| reply.content.slice(..reply.content.len().min(limit as usize))))
    }

    async fn path(&self, place: &CellPath) -> Result<String, Failure> {
        let hello =
            cell_client::hello(&self.0.control, CONNECT_TIMEOUT, || "the cell".to_owned()).await?;
        let directory = if place.root == Root::Memory { &hello.memory_dir } else { &hello.pod_dir };
        if !directory.starts_with('/') {
            return Err(Failure::cell(Code::Internal, "the cell did not say where its files are"));
        }
        Ok(format!("{}/{}", directory.trim_end_matches('/'), place.path))
    }
}

/// Returns the number of content bytes in a change.
fn content_bytes(change: &FileChange) -> usize {
    match &change.change {
        Some(file_change::Change::WriteFile(file)) => file.content.len(),
        Some(file_change::Change::Append(content)) => content.len(),
        _ => 0,
    }
}
