//! Logs in cells, read over the link.

use async_trait::async_trait;
use bytes::Bytes;
use futures::{
    StreamExt as _, TryStreamExt as _,
    stream::{self, BoxStream},
};
use kiyot_proto::cell::{ReadLogRequest, TrimLogRequest};

use crate::backends::milpa::{cell_client::CellClient, failure::Failure};

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
pub(super) struct CellLogs(pub(super) CellClient);

#[async_trait]
impl Source for CellLogs {
    async fn read(
        &self,
        path: &str,
        position: u64,
    ) -> Result<BoxStream<'static, Result<Part, Failure>>, Failure> {
        // The writer bounds the wait for each part.
        let parts = self.0.read_log(ReadLogRequest { path: path.to_owned(), position }).await?;
        let parts = parts.map_ok(|part| {
            let gap = (part.gap > 0).then_some(Part::Gap(part.gap));
            let bytes = (!part.content.is_empty()).then_some(Part::Bytes(part.content));
            stream::iter(gap.into_iter().chain(bytes).map(Ok))
        });
        Ok(parts.try_flatten().boxed())
    }

    async fn trim(&self, path: &str, position: u64) -> Result<(), Failure> {
        self.0.trim_log(TrimLogRequest { path: path.to_owned(), position }).await
    }
}
