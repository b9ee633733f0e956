//! `Resolve`: streams queries to the daemon and its answers back.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use bytes::Bytes;
use futures::{Stream, StreamExt, stream::BoxStream};
use kiyot_proto::cell::{NameAnswer, NameQuery};
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};
use tonic::Status;

use super::{MAX_TCP_CONNECTIONS, MAX_UDP_MESSAGE_BYTES, MAX_UDP_QUERIES, Query, Resolver};

/// Queries buffered for the uplink.
const QUEUED_QUERIES: usize = 4;
/// Upper bound on tracked queries: all live queries, and as many timed-out queries that were not
/// noticed yet.
const MAX_PENDING: usize = 2 * (MAX_UDP_QUERIES + MAX_TCP_CONNECTIONS);

/// Unanswered queries by id.
#[derive(Debug, Default)]
struct Pending {
    queries: HashMap<u64, oneshot::Sender<Bytes>>,
}

impl Pending {
    fn track(&mut self, query: Query) -> NameQuery {
        if self.queries.len() >= MAX_PENDING {
            self.queries.retain(|_, answer| !answer.is_closed());
        }
        self.queries.insert(query.id, query.answer);
        NameQuery { id: query.id, resolver: query.server, tcp: query.tcp, message: query.message }
    }

    fn resolve_query(&mut self, answer: NameAnswer) {
        let Some(waiting) = self.queries.remove(&answer.id) else { return };
        if answer.message.len() <= MAX_UDP_MESSAGE_BYTES {
            // The query may have timed out.
            let _ = waiting.send(answer.message);
        }
    }
}

impl Resolver {
    /// Takes over the queries of the previous call, which ends with ABORTED. Creates the listeners
    /// again after a restart of the agent.
    pub async fn resolve(
        self: Arc<Self>,
        mut answers: impl Stream<Item = Result<NameAnswer, Status>> + Send + Unpin + 'static,
    ) -> Result<BoxStream<'static, Result<NameQuery, Status>>, Status> {
        let first = answers.next().await.ok_or_else(|| {
            Status::invalid_argument("Resolve: stream ended before its first message")
        })??;
        let resolver = Arc::clone(&self);
        let made = tokio::task::spawn_blocking(move || resolver.ensure(first.resolvers)).await;
        made.map_err(|error| {
            Status::internal(format!("thread that creates the DNS listeners panicked: {error}"))
        })??;
        let replaced = CancellationToken::new();
        std::mem::replace(
            &mut *self.current.lock().unwrap_or_else(PoisonError::into_inner),
            replaced.clone(),
        )
        .cancel();
        let (sender, receiver) = mpsc::channel(QUEUED_QUERIES);
        let queue = Arc::clone(&self.queue);
        let forward = async move {
            let mut queue = queue.lock().await;
            let pending = Mutex::new(Pending::default());
            let locked = || pending.lock().unwrap_or_else(PoisonError::into_inner);
            let send_queries = async {
                while let Some(query) = queue.recv().await {
                    if query.answer.is_closed() {
                        continue;
                    }
                    let query = locked().track(query);
                    if sender.send(Ok(query)).await.is_err() {
                        return;
                    }
                }
            };
            let receive_answers = async {
                while let Some(Ok(answer)) = answers.next().await {
                    locked().resolve_query(answer);
                }
            };
            tokio::select! {
                () = send_queries => {}
                () = receive_answers => {}
                () = replaced.cancelled() => {
                    let replaced = Status::aborted("replaced by another Resolve call");
                    let _closed = sender.try_send(Err(replaced));
                }
            }
        };
        let task = AbortOnDropHandle::new(tokio::spawn(forward));
        // The stream owns the task.
        Ok(ReceiverStream::new(receiver)
            .map(move |query| {
                let _ = &task;
                query
            })
            .boxed())
    }
}
