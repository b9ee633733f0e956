//! Files in cells, changed and read over the link.

use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use kiyot_proto::cell::{FileChange, GetFileRequest, Root};

use super::plan::CellPath;
use crate::backends::milpa::{
    cell_client::{
        self, CHANGE_FILES_TIMEOUT, MAX_FILE_RESPONSE_BYTES, QUERY_TIMEOUT, with_timeout,
    },
    failure::{Class, Failure},
    gateway::CellLink,
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
pub(super) struct LinkFiles(pub(super) CellLink);

#[async_trait]
impl CellFiles for LinkFiles {
    async fn change(&self, changes: Vec<FileChange>) -> Result<(), Failure> {
        let request = with_timeout(CHANGE_FILES_TIMEOUT, futures::stream::iter(changes));
        cell_client::agent(&self.0.bulk, MAX_FILE_RESPONSE_BYTES)
            .change_files(request)
            .await
            .map_err(Failure::of_cell)?;
        Ok(())
    }

    async fn get(
        &self,
        place: &CellPath,
        limit: u32,
        last: bool,
    ) -> Result<Option<Bytes>, Failure> {
        let message =
            GetFileRequest { root: place.root.into(), path: place.path.clone(), limit, last };
        let request = with_timeout(QUERY_TIMEOUT, message);
        let reply = cell_client::agent(&self.0.bulk, MAX_FILE_RESPONSE_BYTES)
            .get_file(request)
            .await
            .map_err(Failure::of_cell)?
            .into_inner();
        Ok(reply.exists.then(|| reply.content.slice(..reply.content.len().min(limit as usize))))
    }

    async fn path(&self, place: &CellPath) -> Result<String, Failure> {
        let line = tokio::time::timeout(CONNECT_TIMEOUT, self.0.control.connected()).await;
        let line = line
            .ok()
            .flatten()
            .ok_or_else(|| Failure::cell(Class::Unavailable, "the cell is not connected"))?;
        let directory = if place.root == Root::Memory {
            &line.hello().memory_dir
        } else {
            &line.hello().pod_dir
        };
        if !directory.starts_with('/') {
            return Err(Failure::cell(Class::Internal, "the cell did not say where its files are"));
        }
        Ok(format!("{}/{}", directory.trim_end_matches('/'), place.path))
    }
}
