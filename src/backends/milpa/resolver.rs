//! Name servers that only the node has, asked for pods in cells.
//!
//! A pod names them by number, and its numbers are those of its own sandbox's configuration:
//! nothing else can be asked. Each query by UDP goes over a socket of its own, so that an answer is
//! from whom it was asked of. A connection by TCP is carried byte by byte, so whatever goes over
//! one to a name server goes over this one.

use std::{future::Future, sync::Arc, time::Duration};

use bytes::Bytes;
use futures::{StreamExt, stream::BoxStream};
use kiyot_link::resolver::{
    DNS_HEADER_BYTES, MAX_TCP_CONNECTIONS, MAX_UDP_MESSAGE_BYTES, MAX_UDP_QUERIES, QUERY_TIMEOUT,
};
use kiyot_proto::cell::{NameAnswer, NameQuery, agent_client::AgentClient};
use tokio::{
    sync::{Semaphore, mpsc},
    task::JoinSet,
    time::{sleep, timeout},
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Status};

use super::{gateway::CellLink, id::CellId};

mod ask;
mod connection;
mod message;
mod server;

pub use server::Server;

/// Queries by UDP of one cell at a time: as many as its agent has.
const OF_A_CELL: usize = MAX_UDP_QUERIES;
/// Queries by UDP of all cells at a time. Each has a socket.
const OF_ALL: usize = 1024;
/// Connections of all cells at a time; more are refused.
const CONNECTIONS: usize = 1024;
/// Answers that may wait for the link.
const WAITING: usize = 4;
/// The largest part that is taken from a cell: a message, and its number.
const MAX_PART: usize = MAX_UDP_MESSAGE_BYTES + 1024;
/// How long a cell has to make its name servers.
const OPEN: Duration = Duration::from_secs(20);
/// How long to wait before a call that ended is begun again.
const AGAIN: Duration = Duration::from_millis(500);

/// Asks for all cells.
#[derive(Debug)]
pub struct Resolver {
    all: Arc<Semaphore>,
    connections: Arc<Semaphore>,
}

impl Default for Resolver {
    fn default() -> Self {
        Self {
            all: Arc::new(Semaphore::new(OF_ALL)),
            connections: Arc::new(Semaphore::new(CONNECTIONS)),
        }
    }
}

impl Resolver {
    /// Asks these name servers for a cell, on each of its connections anew, until its link is
    /// closed.
    pub async fn serve(&self, cell: &CellId, link: &CellLink, servers: &[Server]) {
        // None: the link is forgotten, so the cell is gone.
        while link.control.connected().await.is_some() {
            match self.serve_connection(link, servers).await {
                Ok(()) => {
                    tracing::debug!(%cell, "The queries of a cell ended and are asked for again")
                }
                Err(status) => {
                    if let Some(suppressed) = link.lines.admit() {
                        tracing::info!(%cell, status = status.message(), suppressed, "The queries of a cell can't be had, and are asked for again");
                    }
                }
            }
            sleep(AGAIN).await;
        }
    }

    async fn serve_connection(&self, link: &CellLink, servers: &[Server]) -> Result<(), Status> {
        let (sender, answers) = mpsc::channel(WAITING);
        let first = NameAnswer {
            resolvers: u32::try_from(servers.len()).unwrap_or(u32::MAX),
            ..Default::default()
        };
        // There is room: it is the first.
        let _ = sender.try_send(first);
        let mut agent = AgentClient::new(link.bulk.clone()).max_decoding_message_size(MAX_PART);
        // No deadline of the call's own: it lasts as long as the connection.
        let call = agent.resolve(Request::new(ReceiverStream::new(answers)));
        let queries = timeout(OPEN, call)
            .await
            .map_err(|_| Status::deadline_exceeded("Resolve was not answered"))??
            .into_inner()
            .boxed();
        let ask = |server, message: Bytes| async move { ask::ask(&server, &message).await };
        let carry = |server, query| connection::carry(server, query, link.bulk.clone());
        self.answer(queries, sender, servers, ask, carry).await
    }

    /// Answers queries, and carries connections, until there are no more.
    async fn answer<A, C>(
        &self,
        mut queries: BoxStream<'_, Result<NameQuery, Status>>,
        answers: mpsc::Sender<NameAnswer>,
        servers: &[Server],
        ask: impl Fn(Server, Bytes) -> A,
        carry: impl Fn(Server, u64) -> C,
    ) -> Result<(), Status>
    where
        A: Future<Output = std::io::Result<Bytes>> + Send + 'static,
        C: Future<Output = std::io::Result<()>> + Send + 'static,
    {
        let (of_cell, connections) =
            (Arc::new(Semaphore::new(OF_A_CELL)), Arc::new(Semaphore::new(MAX_TCP_CONNECTIONS)));
        // They end with the call.
        let mut asking = JoinSet::new();
        while let Some(query) = queries.next().await {
            let NameQuery { id, resolver, tcp, message } = query?;
            let server = usize::try_from(resolver).ok().and_then(|number| servers.get(number));
            let server = server.ok_or_else(|| {
                Status::invalid_argument(format!(
                    "name server {resolver}: the pod has {}",
                    servers.len()
                ))
            })?;
            while asking.try_join_next().is_some() {}
            let answers = answers.clone();
            if tcp {
                let places = (
                    Arc::clone(&connections).try_acquire_owned(),
                    Arc::clone(&self.connections).try_acquire_owned(),
                );
                let carried = carry(server.clone(), id);
                asking.spawn(async move {
                    let carried = if let (Ok(_), Ok(_)) = &places { carried.await } else { Err(std::io::Error::other("too many connections")) };
                    if let Err(error) = carried {
                        tracing::debug!(%error, "A connection to a name server of the node ended early");
                        let _gone = answers.send(NameAnswer { id, ..NameAnswer::default() }).await;
                    }
                });
                continue;
            }
            if !(DNS_HEADER_BYTES..=MAX_UDP_MESSAGE_BYTES).contains(&message.len()) {
                return Err(Status::invalid_argument(format!(
                    "a query of {} bytes; allowed are {DNS_HEADER_BYTES} to {MAX_UDP_MESSAGE_BYTES}",
                    message.len()
                )));
            }
            // Neither is ever closed. Until there is room the cell's next query is not read.
            let Ok(of_cell) = Arc::clone(&of_cell).acquire_owned().await else { return Ok(()) };
            let (all, asked) = (Arc::clone(&self.all), ask(server.clone(), message.clone()));
            asking.spawn(async move {
                let answered = async {
                    let _permit = all.acquire().await;
                    asked.await
                };
                let answer = match timeout(QUERY_TIMEOUT, answered).await {
                    Ok(Ok(answer)) => answer,
                    Ok(Err(error)) => {
                        tracing::debug!(%error, "A name server of the node could not be asked");
                        message::failed(&message)
                    }
                    // As from a name server that is silent.
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
