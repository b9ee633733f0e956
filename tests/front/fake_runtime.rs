//! A fake container runtime: an HTTP/2 server on a unix socket with a handler of the test.

use std::{
    future::{Future, poll_fn},
    path::Path,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use bytes::Bytes;
use h2::{RecvStream, SendStream, server::SendResponse};
use http::{HeaderMap, HeaderValue, Response, request::Parts};
use tokio::{net::UnixListener, task::JoinSet};
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};

use crate::caller::frame;

/// A received call.
pub(crate) struct Call {
    pub(crate) head: Parts,
    pub(crate) body: RecvStream,
    pub(crate) respond: SendResponse<Bytes>,
}

type Handler = Arc<dyn Fn(Call) -> Pin<Box<dyn Future<Output = ()> + Send>> + Send + Sync>;

/// A running fake. Dropping it closes its connections.
pub(crate) struct FakeRuntime {
    task: AbortOnDropHandle<()>,
    stop: CancellationToken,
    connections: Arc<AtomicUsize>,
}

impl FakeRuntime {
    pub(crate) fn listen<F: Future<Output = ()> + Send + 'static>(
        path: &Path,
        handler: impl Fn(Call) -> F + Send + Sync + 'static,
    ) -> Self {
        let _ = std::fs::remove_file(path);
        let listener = UnixListener::bind(path).unwrap();
        let handler: Handler = Arc::new(move |call| Box::pin(handler(call)));
        let connections = Arc::new(AtomicUsize::new(0));
        let count = connections.clone();
        let stop = CancellationToken::new();
        let stopped = stop.clone();
        let task = tokio::spawn(async move {
            let mut tasks = JoinSet::new();
            loop {
                let (stream, _) = tokio::select! {
                    accepted = listener.accept() => accepted.unwrap(),
                    () = stopped.cancelled() => return tasks.shutdown().await,
                };
                count.fetch_add(1, Ordering::SeqCst);
                let handler = handler.clone();
                tasks.spawn(async move {
                    let mut calls = JoinSet::new();
                    let mut builder = h2::server::Builder::new();
                    builder
                        .initial_window_size(1 << 20)
                        .initial_connection_window_size(8 << 20)
                        .max_pending_accept_reset_streams(10_000);
                    let Ok(mut connection) = builder.handshake(stream).await else { return };
                    while let Some(Ok((request, respond))) = connection.accept().await {
                        let (head, body) = request.into_parts();
                        calls.spawn(handler(Call { head, body, respond }));
                    }
                });
            }
        });
        Self { task: AbortOnDropHandle::new(task), stop, connections }
    }

    /// Closes the socket and all connections. After a drop they close a moment later, and a call in
    /// this moment is reset.
    pub(crate) async fn stop(self) {
        self.stop.cancel();
        self.task.await.unwrap();
    }

    /// Answers each call with the message `answer to <method>`.
    pub(crate) fn named(path: &Path) -> Self {
        Self::listen(path, |call| async move {
            let name = call.head.uri.path().rsplit('/').next().unwrap().to_string();
            call.answer(format!("answer to {name}").as_bytes()).await;
        })
    }

    /// Answers each call with these bytes as the message.
    pub(crate) fn constant(path: &Path, message: Vec<u8>) -> Self {
        let message = Bytes::from(message);
        Self::listen(path, move |call| {
            let message = message.clone();
            async move { call.answer(&message).await }
        })
    }

    pub(crate) fn connections(&self) -> usize {
        self.connections.load(Ordering::SeqCst)
    }
}

pub(crate) fn ok_trailers() -> HeaderMap {
    let mut trailers = HeaderMap::new();
    trailers.insert("grpc-status", HeaderValue::from_static("0"));
    trailers
}

/// Reads a body to its end.
pub(crate) async fn read_all(body: &mut RecvStream) -> Result<Vec<u8>, h2::Error> {
    let mut all = Vec::new();
    while let Some(part) = body.data().await {
        let part = part?;
        let _ = body.flow_control().release_capacity(part.len());
        all.extend_from_slice(&part);
    }
    Ok(all)
}

/// Sends data as the receiver grants capacity. Returns whether all was sent.
pub(crate) async fn send_all(stream: &mut SendStream<Bytes>, mut data: Bytes) -> bool {
    while !data.is_empty() {
        stream.reserve_capacity(data.len().min(64 << 10));
        let room = match stream.capacity() {
            0 => match poll_fn(|cx| stream.poll_capacity(cx)).await {
                Some(Ok(_)) => continue,
                _ => return false,
            },
            room => room.min(data.len()),
        };
        if stream.send_data(data.split_to(room), false).is_err() {
            return false;
        }
    }
    true
}

impl Call {
    /// Reads the request, and responds with a message and OK.
    pub(crate) async fn answer(mut self, message: &[u8]) {
        if read_all(&mut self.body).await.is_err() {
            return;
        }
        let response =
            Response::builder().header("content-type", "application/grpc").body(()).unwrap();
        let Ok(mut stream) = self.respond.send_response(response, false) else { return };
        if send_all(&mut stream, frame(message).into()).await {
            let _ = stream.send_trailers(ok_trailers());
        }
    }
}
