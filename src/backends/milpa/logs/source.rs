//! Logs in cells, read over the link.

use async_trait::async_trait;
use bytes::Bytes;
use futures::{
    StreamExt as _, TryStreamExt as _,
    stream::{self, BoxStream},
};
use kiyot_proto::cell::{LogPart, ReadLogRequest, TrimLogRequest};

use crate::backends::milpa::{
    cell_client::CellClient,
    failure::{Code, Failure},
};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Part {
    /// The next bytes.
    Bytes(Bytes),
    /// The cell has discarded this many bytes. A line begins after them.
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
        let parts = parts.map(|part| {
            part.and_then(parts_of).map(|parts| stream::iter(parts.into_iter().flatten().map(Ok)))
        });
        Ok(parts.try_flatten().boxed())
    }

    async fn trim(&self, path: &str, position: u64) -> Result<(), Failure> {
        self.0.trim_log(TrimLogRequest { path: path.to_owned(), position }).await
    }
}

/// Returns the gap and the bytes of a message. An endless stream of messages without either would
/// be read for ever.
fn parts_of(message: LogPart) -> Result<[Option<Part>; 2], Failure> {
    let gap = (message.gap > 0).then_some(Part::Gap(message.gap));
    let bytes = (!message.content.is_empty()).then_some(Part::Bytes(message.content));
    if gap.is_none() && bytes.is_none() {
        return Err(Failure::cell(Code::Internal, "log part without gap or content"));
    }
    Ok([gap, bytes])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Verifies D44.
    #[test]
    fn message_of_a_log_has_a_gap_or_content() {
        let message = |gap, content| LogPart { gap, content: Bytes::from_static(content) };
        let line = || Part::Bytes(Bytes::from_static(b"line\n"));
        assert_eq!(parts_of(message(0, b"line\n")).unwrap(), [None, Some(line())]);
        assert_eq!(parts_of(message(7, b"")).unwrap(), [Some(Part::Gap(7)), None]);
        assert_eq!(parts_of(message(7, b"line\n")).unwrap(), [Some(Part::Gap(7)), Some(line())]);
        assert_eq!(parts_of(message(0, b"")).unwrap_err().code(), Code::Internal);
    }
}
