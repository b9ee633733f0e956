//! Name servers that only the node can reach, queried for pods in cells.
//!
//! A pod selects a name server by its index in the pod's own sandbox configuration, so it can't
//! query others. Each UDP query has its own socket, so that only the queried name server can
//! respond. A TCP connection is copied as bytes.

use std::{future::Future, sync::Arc, time::Duration};

use bytes::Bytes;
use futures::{StreamExt, stream::BoxStream};
use kiyot_engine::id::CellId;
use kiyot_link::resolver::{
    DNS_HEADER_BYTES, MAX_TCP_CONNECTIONS, MAX_UDP_MESSAGE_BYTES, MAX_UDP_QUERIES, QUERY_TIMEOUT,
};
use kiyot_proto::cell::{NameAnswer, NameQuery};
use tokio::{
    sync::{Semaphore, mpsc},
    task::JoinSet,
    time::{sleep, timeout},
};

use super::{
    cell_client::CellClient,
    failure::{Code, Failure},
    gateway::CellLink,
};

mod connection;
mod message;
mod server;
mod udp;

pub use server::Server;

/// Most UDP queries of a cell at a time, as in its agent.
const MAX_CELL_QUERIES: usize = MAX_UDP_QUERIES;
/// Most UDP queries of all cells at a time. Each has a socket.
const MAX_QUERIES: usize = 1024;
/// Most connections of all cells at a time; further connections are refused.
const MAX_CONNECTIONS: usize = 1024;
/// Most responses that wait for the link.
const MAX_QUEUED_RESPONSES: usize = 4;
/// Delay before an ended call is restarted.
const RETRY_DELAY: Duration = Duration::from_millis(500);

/// Queries name servers for all cells.
#[derive(Debug)]
pub struct Resolver {
    all: Arc<Semaphore>,
    connections: Arc<Semaphore>,
}

impl Default for Resolver {
    fn default() -> Self {
        Self {
            all: Arc::new(Semaphore::new(MAX_QUERIES)),
            connections: Arc::new(Semaphore::new(MAX_CONNECTIONS)),
        }
    }
}

impl Resolver {
    /// Queries these name servers for a cell, on each of its connections, until its link is closed.
    pub async fn serve(&self, cell: &CellId, link: &CellLink, servers: &[Server]) {
        // `None` if the link is closed, and so the cell has ended.
        while link.control.connected().await.is_some() {
            match self.serve_connection(link, servers).await {
                Ok(()) => {
                    tracing::debug!(%cell, "name queries of a cell ended, restarted")
                }
                Err(failure) => {
                    if let Some(suppressed) = link.lines.admit() {
                        tracing::info!(
                            %cell,
                            error = %failure,
                            suppressed,
                            "name queries of a cell failed, restarted"
                        );
                    }
                }
            }
            sleep(RETRY_DELAY).await;
        }
    }

    async fn serve_connection(&self, link: &CellLink, servers: &[Server]) -> Result<(), Failure> {
        let (sender, answers) = mpsc::channel(MAX_QUEUED_RESPONSES);
        let first = NameAnswer {
            resolvers: u32::try_from(servers.len()).unwrap_or(u32::MAX),
            ..Default::default()
        };
        // Fits, because the channel is empty.
        let _ = sender.try_send(first);
        let client = CellClient::over(link);
        let queries = client.resolve(answers).await?;
        let query_server =
            |server, message: Bytes| async move { udp::query(&server, &message).await };
        let splice_connection =
            |server, query| connection::splice_connection(server, query, client.clone());
        self.respond(queries, sender, servers, query_server, splice_connection).await
    }

    /// Handles queries and connections until the stream ends.
    async fn respond<A, C>(
        &self,
        mut queries: BoxStream<'_, Result<NameQuery, Failure>>,
        answers: mpsc::Sender<NameAnswer>,
        servers: &[Server],
        query_server: impl Fn(Server, Bytes) -> A,
        splice_connection: impl Fn(Server, u64) -> C,
    ) -> Result<(), Failure>
    where
        A: Future<Output = std::io::Result<Bytes>> + Send + 'static,
        C: Future<Output = std::io::Result<()>> + Send + 'static,
    {
        let (of_cell, connections) = (
            Arc::new(Semaphore::new(MAX_CELL_QUERIES)),
            Arc::new(Semaphore::new(MAX_TCP_CONNECTIONS)),
        );
        // Aborted when the call ends.
        let mut tasks = JoinSet::new();
        while let Some(query) = queries.next().await {
            let NameQuery { id, resolver, tcp, message } = query?;
            let server = usize::try_from(resolver).ok().and_then(|number| servers.get(number));
            let server = server.ok_or_else(|| {
                Failure::cell(
                    Code::InvalidArgument,
                    format!("name server {resolver}: the pod has {}", servers.len()),
                )
            })?;
            while tasks.try_join_next().is_some() {}
            let answers = answers.clone();
            if tcp {
                let permits = (
                    Arc::clone(&connections).try_acquire_owned(),
                    Arc::clone(&self.connections).try_acquire_owned(),
                );
                let (Ok(of_cell), Ok(of_all)) = permits else {
                    // Answers without a task, so that the cell's next query waits until it accepts
                    // answers.
                    tracing::debug!("connection to a name server refused: too many");
                    let _gone = answers.send(NameAnswer { id, ..NameAnswer::default() }).await;
                    continue;
                };
                let carried = splice_connection(server.clone(), id);
                tasks.spawn(async move {
                    let _permits = (of_cell, of_all);
                    if let Err(error) = carried.await {
                        tracing::debug!(%error, "connection to a name server ended early");
                        let _gone = answers.send(NameAnswer { id, ..NameAnswer::default() }).await;
                    }
                });
                continue;
            }
            if !(DNS_HEADER_BYTES..=MAX_UDP_MESSAGE_BYTES).contains(&message.len()) {
                return Err(Failure::cell(
                    Code::InvalidArgument,
                    format!(
                        "a query of {} bytes; allowed are {DNS_HEADER_BYTES} to \
                     {MAX_UDP_MESSAGE_BYTES}",
                        message.len()
                    ),
                ));
            }
            // Semaphores are never closed. At the limit, the cell's next query waits.
            let Ok(of_cell) = Arc::clone(&of_cell).acquire_owned().await else { return Ok(()) };
            let (all, response) =
                (Arc::clone(&self.all), query_server(server.clone(), message.clone()));
            tasks.spawn(async move {
                let answered = async {
                    let _permit = all.acquire().await;
                    response.await
                };
                let answer = match timeout(QUERY_TIMEOUT, answered).await {
                    Ok(Ok(answer)) => answer,
                    Ok(Err(error)) => {
                        tracing::debug!(%error, "query to a name server failed");
                        message::failed(&message)
                    }
                    // Like a silent name server.
                    Err(_) => Bytes::new(),
                };
                let _gone = answers.send(NameAnswer { id, message: answer, resolvers: 0 }).await;
                drop(of_cell);
            });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
