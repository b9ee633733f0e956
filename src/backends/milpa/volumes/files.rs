//! Files in cells, changed and read over their links.

use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use kiyot_proto::cell::{FileChange, GetFileRequest, Root, agent_client::AgentClient};
use tonic::{Request, Status};

use super::plan::Place;
use crate::backends::milpa::gateway::CellLink;

/// How long a cell has to apply changes.
const CHANGE: Duration = Duration::from_secs(120);

/// How long a cell has to give a file.
const GET: Duration = Duration::from_secs(20);

/// How long a cell that is not connected is waited for.
const HELLO: Duration = Duration::from_secs(20);

/// Largest answer that is taken from a cell.
const MAX_ANSWER: usize = 8 << 20;

/// The files of one cell. A test plays them.
#[async_trait]
pub(super) trait Files: Send + Sync + 'static {
    /// Applies changes in order, until one fails.
    async fn change(&self, changes: Vec<FileChange>) -> Result<(), Status>;
    /// A file's first `limit` bytes, or its last; `None` if there is none.
    async fn get(&self, place: &Place, limit: u32, last: bool) -> Result<Option<Bytes>, Status>;
    /// Where something is, absolute in the cell.
    async fn path(&self, place: &Place) -> Result<String, Status>;
}

/// Over a link.
#[derive(Debug)]
pub(super) struct CellFiles(pub(super) CellLink);

#[async_trait]
impl Files for CellFiles {
    async fn change(&self, changes: Vec<FileChange>) -> Result<(), Status> {
        let mut request = Request::new(futures::stream::iter(changes));
        request.set_timeout(CHANGE);
        AgentClient::new(self.0.bulk.clone())
            .max_decoding_message_size(MAX_ANSWER)
            .change_files(request)
            .await?;
        Ok(())
    }

    async fn get(&self, place: &Place, limit: u32, last: bool) -> Result<Option<Bytes>, Status> {
        let mut request = Request::new(GetFileRequest {
            root: place.root.into(),
            path: place.path.clone(),
            limit,
            last,
        });
        request.set_timeout(GET);
        let reply = AgentClient::new(self.0.bulk.clone())
            .max_decoding_message_size(MAX_ANSWER)
            .get_file(request)
            .await?
            .into_inner();
        Ok(reply.exists.then(|| reply.content.slice(..reply.content.len().min(limit as usize))))
    }

    async fn path(&self, place: &Place) -> Result<String, Status> {
        let line = tokio::time::timeout(HELLO, self.0.control.connected()).await;
        let line =
            line.ok().flatten().ok_or_else(|| Status::unavailable("the cell is not connected"))?;
        let directory = if place.root == Root::Memory {
            &line.hello().memory_dir
        } else {
            &line.hello().pod_dir
        };
        if !directory.starts_with('/') {
            return Err(Status::internal("the cell did not say where its files are"));
        }
        Ok(format!("{}/{}", directory.trim_end_matches('/'), place.path))
    }
}
