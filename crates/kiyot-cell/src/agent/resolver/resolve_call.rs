//! `Resolve`: queries go out, answers come in, each way as fast as it can.

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

use super::{Query, Resolver, TCP_CONNECTIONS, UDP_MESSAGE, UDP_QUERIES};

/// Queries that may wait for the link.
const QUEUED_QUERIES: usize = 4;
/// Queries that are known: the live ones, and as many again of which nobody has noticed yet that
/// they are not.
const MAX_PENDING: usize = 2 * (UDP_QUERIES + TCP_CONNECTIONS);

/// Queries without an answer, by id.
#[derive(Debug, Default)]
struct Pending {
    queries: HashMap<u64, oneshot::Sender<Bytes>>,
}

impl Pending {
    fn enter(&mut self, query: Query) -> NameQuery {
        if self.queries.len() >= MAX_PENDING {
            self.queries.retain(|_, answer| !answer.is_closed());
        }
        self.queries.insert(query.id, query.answer);
        NameQuery { id: query.id, resolver: query.server, tcp: query.tcp, message: query.message }
    }

    fn answered(&mut self, answer: NameAnswer) {
        let Some(waiting) = self.queries.remove(&answer.id) else { return };
        if answer.message.len() <= UDP_MESSAGE {
            // Nobody may wait any more.
            let _ = waiting.send(answer.message);
        }
    }
}

impl Resolver {
    /// Takes over the queries from the call before, which ends. The name servers are made if the
    /// agent is a new one.
    pub async fn resolve(
        self: Arc<Self>,
        mut answers: impl Stream<Item = Result<NameAnswer, Status>> + Send + Unpin + 'static,
    ) -> Result<BoxStream<'static, Result<NameQuery, Status>>, Status> {
        let first = answers.next().await.ok_or_else(|| {
            Status::invalid_argument("Resolve begins with the number of name servers")
        })??;
        let resolver = Arc::clone(&self);
        let made = tokio::task::spawn_blocking(move || resolver.ensure(first.resolvers)).await;
        made.map_err(|error| {
            Status::internal(format!("the thread that makes name servers ended: {error}"))
        })??;
        let replaced = CancellationToken::new();
        std::mem::replace(
            &mut *self.current.lock().unwrap_or_else(PoisonError::into_inner),
            replaced.clone(),
        )
        .cancel();
        let (sender, receiver) = mpsc::channel(QUEUED_QUERIES);
        let queue = Arc::clone(&self.queue);
        let carried = async move {
            let mut queue = queue.lock().await;
            let pending = Mutex::new(Pending::default());
            let locked = || pending.lock().unwrap_or_else(PoisonError::into_inner);
            let outward = async {
                while let Some(query) = queue.recv().await {
                    if query.answer.is_closed() {
                        continue;
                    }
                    let query = locked().enter(query);
                    if sender.send(Ok(query)).await.is_err() {
                        return;
                    }
                }
            };
            let inward = async {
                while let Some(Ok(answer)) = answers.next().await {
                    locked().answered(answer);
                }
            };
            tokio::select! {
                () = outward => {}
                () = inward => {}
                () = replaced.cancelled() => {
                    let _gone = sender.try_send(Err(Status::aborted("another call began")));
                }
            }
        };
        let task = AbortOnDropHandle::new(tokio::spawn(carried));
        // The stream owns the task.
        Ok(ReceiverStream::new(receiver)
            .map(move |query| {
                let _ = &task;
                query
            })
            .boxed())
    }
}
