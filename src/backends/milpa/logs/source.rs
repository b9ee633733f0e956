//! Logs in cells, read over their links.

use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures::{
    StreamExt as _, TryStreamExt as _,
    stream::{self, BoxStream},
};
use kiyot_proto::cell::{ReadLogRequest, TrimLogRequest, agent_client::AgentClient};
use tonic::{Request, Status};

use crate::backends::milpa::gateway::CellLink;

/// Largest part that is taken from a cell.
const MAX_PART: usize = 1 << 20;

/// How long a cell has to give a log's disk back.
const TRIM: Duration = Duration::from_secs(20);

/// What comes of a log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Part {
    /// Its next bytes.
    Bytes(Bytes),
    /// So many bytes come no more: the cell does not keep them. What follows begins with a line.
    Gap(u64),
}

/// The logs of one cell. A test plays them.
#[async_trait]
pub(super) trait Source: Send + Sync + 'static {
    /// A log from a position to its end at the time of the call.
    async fn read(
        &self,
        path: &str,
        position: u64,
    ) -> Result<BoxStream<'static, Result<Part, Status>>, Status>;
    /// Gives back the disk of a log before a position.
    async fn trim(&self, path: &str, position: u64) -> Result<(), Status>;
}

/// Over a link.
#[derive(Debug)]
pub(super) struct CellLogs(pub(super) CellLink);

#[async_trait]
impl Source for CellLogs {
    async fn read(
        &self,
        path: &str,
        position: u64,
    ) -> Result<BoxStream<'static, Result<Part, Status>>, Status> {
        let mut agent = AgentClient::new(self.0.bulk.clone()).max_decoding_message_size(MAX_PART);
        // No deadline of the call's own, which would also end a long stream: the link bounds the
        // wait for its beginning, and the writer that for each part.
        let parts = agent
            .read_log(Request::new(ReadLogRequest { path: path.to_owned(), position }))
            .await?
            .into_inner();
        let parts = parts.map_ok(|part| {
            let gap = (part.gap > 0).then_some(Part::Gap(part.gap));
            let bytes = (!part.content.is_empty()).then_some(Part::Bytes(part.content));
            stream::iter(gap.into_iter().chain(bytes).map(Ok))
        });
        Ok(parts.try_flatten().boxed())
    }

    async fn trim(&self, path: &str, position: u64) -> Result<(), Status> {
        let mut request = Request::new(TrimLogRequest { path: path.to_owned(), position });
        request.set_timeout(TRIM);
        AgentClient::new(self.0.bulk.clone())
            .max_decoding_message_size(MAX_PART)
            .trim_log(request)
            .await?;
        Ok(())
    }
}
