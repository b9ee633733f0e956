//! Calls to a cell's agent: its pod, files, logs, tunnels and name queries.

use std::time::Duration;

use futures::{StreamExt as _, TryStreamExt as _, future::BoxFuture, stream::BoxStream};
use kiyot_link::{channel::Channel, resolver::MAX_UDP_MESSAGE_BYTES};
use kiyot_proto::{
    bounds,
    cell::{
        BindReply, BindRequest, FileChange, GetFileReply, GetFileRequest, LogPart, NameAnswer,
        NameQuery, ReadLogRequest, TrimLogRequest, TunnelPart, agent_client::AgentClient,
    },
};
use tokio::{sync::mpsc, time::timeout};
use tokio_stream::wrappers::ReceiverStream;

use super::{CellClient, QUERY_TIMEOUT, call, with_timeout};
use crate::backends::milpa::failure::{Code, Failure};

/// Largest file that is accepted from a cell, in bytes.
const MAX_FILE_RESPONSE_BYTES: usize = 8 << 20;
/// Largest part of a log or a tunnel that is accepted from a cell, in bytes.
const MAX_PART_BYTES: usize = 1 << 20;
/// Largest name query that is accepted from a cell, in bytes: a message with its metadata.
const MAX_NAME_QUERY_BYTES: usize = MAX_UDP_MESSAGE_BYTES + 1024;

impl CellClient {
    pub(super) fn agent(&self, max_response_bytes: usize) -> AgentClient<Channel> {
        AgentClient::new(self.bulk.clone()).max_decoding_message_size(max_response_bytes)
    }

    /// Gives the cell to a pod.
    pub(crate) fn bind(
        &self,
        timeout: Duration,
        request: BindRequest,
    ) -> BoxFuture<'static, Result<BindReply, Failure>> {
        let mut agent = self.agent(bounds::MAX_RESPONSE_BYTES);
        call(timeout, "Bind", async move { agent.bind(with_timeout(timeout, request)).await })
    }

    /// Changes files in the cell, in order, until a change fails.
    pub(crate) async fn change_files(
        &self,
        timeout: Duration,
        changes: Vec<FileChange>,
    ) -> Result<(), Failure> {
        let mut agent = self.agent(bounds::MAX_RESPONSE_BYTES);
        let request = with_timeout(timeout, tokio_stream::iter(changes));
        call(timeout, "ChangeFiles", async move { agent.change_files(request).await }).await?;
        Ok(())
    }

    pub(crate) fn get_file(
        &self,
        request: GetFileRequest,
    ) -> BoxFuture<'static, Result<GetFileReply, Failure>> {
        let mut agent = self.agent(MAX_FILE_RESPONSE_BYTES);
        let request = with_timeout(QUERY_TIMEOUT, request);
        call(QUERY_TIMEOUT, "GetFile", async move { agent.get_file(request).await })
    }

    /// Reads a log from a position to its end at the time of the call.
    ///
    /// Has no deadline, because it would also end a long stream. The link limits the wait for the
    /// start, and the reader limits the wait for each part.
    pub(crate) async fn read_log(
        &self,
        request: ReadLogRequest,
    ) -> Result<BoxStream<'static, Result<LogPart, Failure>>, Failure> {
        let read = self.agent(MAX_PART_BYTES).read_log(request).await;
        Ok(read.map_err(Failure::of_cell)?.into_inner().map_err(Failure::of_cell).boxed())
    }

    /// Discards a log before a position on the cell's disk.
    pub(crate) async fn trim_log(&self, request: TrimLogRequest) -> Result<(), Failure> {
        let mut agent = self.agent(MAX_PART_BYTES);
        let request = with_timeout(QUERY_TIMEOUT, request);
        call(QUERY_TIMEOUT, "TrimLog", async move { agent.trim_log(request).await }).await?;
        Ok(())
    }

    /// Opens a tunnel: sends the parts of `up` to the cell, and returns the parts from the cell.
    ///
    /// Has no deadline: a tunnel lasts until one of its ends closes it.
    pub(crate) async fn tunnel(
        &self,
        up: mpsc::Receiver<TunnelPart>,
    ) -> Result<BoxStream<'static, Result<TunnelPart, Failure>>, Failure> {
        let mut agent = self.agent(MAX_PART_BYTES);
        let opened = timeout(QUERY_TIMEOUT, agent.tunnel(ReceiverStream::new(up))).await;
        let down = opened
            .map_err(|_| {
                Failure::cell(Code::DeadlineExceeded, "the cell did not open a tunnel in time")
            })?
            .map_err(Failure::of_cell)?;
        Ok(down.into_inner().map_err(Failure::of_cell).boxed())
    }

    /// Answers the name queries of the cell's pod: sends `answers`, and returns the queries.
    ///
    /// Has no deadline: the call lasts as long as the connection.
    pub(crate) async fn resolve(
        &self,
        answers: mpsc::Receiver<NameAnswer>,
    ) -> Result<BoxStream<'static, Result<NameQuery, Failure>>, Failure> {
        let mut agent = self.agent(MAX_NAME_QUERY_BYTES);
        let begun = timeout(QUERY_TIMEOUT, agent.resolve(ReceiverStream::new(answers))).await;
        let queries = begun
            .map_err(|_| Failure::cell(Code::DeadlineExceeded, "Resolve was not answered"))?
            .map_err(Failure::of_cell)?;
        Ok(queries.into_inner().map_err(Failure::of_cell).boxed())
    }
}
