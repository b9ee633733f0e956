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

use super::{Asked, MAX_TCP_CONNECTIONS, MAX_UDP_MESSAGE_BYTES, MAX_UDP_QUERIES, Resolver};

/// Queries that may wait for the link.
const WAITING: usize = 4;
/// Queries that are known: the live ones, and as many again of which nobody has noticed yet that
/// they are not.
const KNOWN: usize = 2 * (MAX_UDP_QUERIES + MAX_TCP_CONNECTIONS);

/// Queries without an answer, by id.
#[derive(Debug, Default)]
struct Pending {
    queries: HashMap<u64, oneshot::Sender<Bytes>>,
}

impl Pending {
    fn enter(&mut self, asked: Asked) -> NameQuery {
        if self.queries.len() >= KNOWN {
            self.queries.retain(|_, answer| !answer.is_closed());
        }
        self.queries.insert(asked.id, asked.answer);
        NameQuery { id: asked.id, resolver: asked.server, tcp: asked.tcp, message: asked.message }
    }

    fn answered(&mut self, answer: NameAnswer) {
        let Some(waiting) = self.queries.remove(&answer.id) else { return };
        if answer.message.len() <= MAX_UDP_MESSAGE_BYTES {
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
        let (sender, receiver) = mpsc::channel(WAITING);
        let queue = Arc::clone(&self.queue);
        let carried = async move {
            let mut queue = queue.lock().await;
            let pending = Mutex::new(Pending::default());
            let locked = || pending.lock().unwrap_or_else(PoisonError::into_inner);
            let outward = async {
                while let Some(asked) = queue.recv().await {
                    if asked.answer.is_closed() {
                        continue;
                    }
                    let query = locked().enter(asked);
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
