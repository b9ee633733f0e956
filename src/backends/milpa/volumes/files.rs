//! Files in cells, changed and read over the link.

use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use kiyot_proto::cell::{FileChange, GetFileRequest, Root, agent_client::AgentClient};
use tonic::Request;

use super::plan::CellPath;
use crate::backends::milpa::{
    failure::{Class, Failure},
    gateway::CellLink,
};

/// Deadline for a cell to apply changes.
const CHANGE_TIMEOUT: Duration = Duration::from_secs(120);

/// Deadline for a cell to return a file.
const GET_TIMEOUT: Duration = Duration::from_secs(20);

/// Longest wait for a cell that is not connected.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(20);

/// Largest response that is accepted from a cell.
const MAX_RESPONSE_BYTES: usize = 8 << 20;

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
        let mut request = Request::new(futures::stream::iter(changes));
        request.set_timeout(CHANGE_TIMEOUT);
        AgentClient::new(self.0.bulk.clone())
            .max_decoding_message_size(MAX_RESPONSE_BYTES)
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
        let mut request = Request::new(GetFileRequest {
            root: place.root.into(),
            path: place.path.clone(),
            limit,
            last,
        });
        request.set_timeout(GET_TIMEOUT);
        let reply = AgentClient::new(self.0.bulk.clone())
            .max_decoding_message_size(MAX_RESPONSE_BYTES)
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
