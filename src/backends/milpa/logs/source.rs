//! Logs in cells, read over the link.

use async_trait::async_trait;
use bytes::Bytes;
use futures::{
    StreamExt as _, TryStreamExt as _,
    stream::{self, BoxStream},
};
use kiyot_proto::cell::{ReadLogRequest, TrimLogRequest};
use tonic::Request;

use crate::backends::milpa::{
    cell_client::{self, MAX_PART_BYTES, QUERY_TIMEOUT, with_timeout},
    failure::Failure,
    gateway::CellLink,
};

/// Part of a log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Part {
    /// The next bytes.
    Bytes(Bytes),
    /// This many bytes were discarded by the cell. A line begins after them.
    Gap(u64),
}

/// Access to the logs of a cell. Tests have their own implementation.
#[async_trait]
pub(super) trait Source: Send + Sync + 'static {
    /// Reads a log from a position to its end at the time of the call.
    async fn read(
        &self,
        path: &str,
        position: u64,
    ) -> Result<BoxStream<'static, Result<Part, Failure>>, Failure>;
    /// Discards a log before a position on the cell's disk.
    async fn trim(&self, path: &str, position: u64) -> Result<(), Failure>;
}

/// Logs of a cell over its link.
#[derive(Debug)]
pub(super) struct CellLogs(pub(super) CellLink);

#[async_trait]
impl Source for CellLogs {
    async fn read(
        &self,
        path: &str,
        position: u64,
    ) -> Result<BoxStream<'static, Result<Part, Failure>>, Failure> {
        let mut agent = cell_client::agent(&self.0.bulk, MAX_PART_BYTES);
        // Without a deadline, which would also end a long stream. The link bounds the wait for the
        // start, the writer the wait for each part.
        let parts = agent
            .read_log(Request::new(ReadLogRequest { path: path.to_owned(), position }))
            .await
            .map_err(Failure::of_cell)?
            .into_inner();
        let parts = parts.map_err(Failure::of_cell).map_ok(|part| {
            let gap = (part.gap > 0).then_some(Part::Gap(part.gap));
            let bytes = (!part.content.is_empty()).then_some(Part::Bytes(part.content));
            stream::iter(gap.into_iter().chain(bytes).map(Ok))
        });
        Ok(parts.try_flatten().boxed())
    }

    async fn trim(&self, path: &str, position: u64) -> Result<(), Failure> {
        let message = TrimLogRequest { path: path.to_owned(), position };
        let request = with_timeout(QUERY_TIMEOUT, message);
        cell_client::agent(&self.0.bulk, MAX_PART_BYTES)
            .trim_log(request)
            .await
            .map_err(Failure::of_cell)?;
        Ok(())
    }
}
