//! The agent's service on one connection: CRI goes to containerd, the rest is the agent's own.

use std::{
    convert::Infallible,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use futures::{StreamExt, stream::BoxStream};
use http::{Request as HttpRequest, Response as HttpResponse};
use http_body::Body as HttpBody;
use kiyot_link::{http2::Profile, resolver::MAX_TCP_CONNECTIONS};
use kiyot_proto::cell::{
    BindReply, BindRequest, BlobPart, ChangeFilesReply, Event, FileChange, GetFileReply,
    GetFileRequest, HelloReply, HelloRequest, LogPart, MeasureReply, MeasureRequest,
    MissingBlobsReply, MissingBlobsRequest, NameAnswer, NameQuery, OpenBulkReply, OpenBulkRequest,
    PullNews, PutBlobReply, PutImageReply, PutImageRequest, ReadLogRequest, ShutdownReply,
    ShutdownRequest, TrimLogReply, TrimLogRequest, TunnelPart, WatchPullsRequest, WatchRequest,
    agent_server::{Agent, AgentServer},
};
use tokio::{sync::Semaphore, task::spawn_blocking};
use tonic::{Request, Response, Status, Streaming, body::Body};
use tower::{BoxError, Service};

use super::{
    AgentContext, bind, blobs, forward, logs, pulls, runtime::MESSAGE_LIMIT, shutdown, tunnel,
};
use crate::home::ConnectionInfo;

/// Tunnels to the streaming server at a time.
pub const TUNNELS: usize = 96;
// When nobody reads at the end of any tunnel, those of name servers among them, logs and blobs
// still have a third of the connection's window.
const _: () = assert!(
    (TUNNELS + MAX_TCP_CONNECTIONS) * (Profile::BULK.stream_window as usize)
        <= (Profile::BULK.connection_window as usize) / 3 * 2
);
/// Calls that change files at a time.
pub const CHANGERS: usize = 8;
/// Blobs that are written at a time.
pub const BLOBS: usize = 8;
/// Watchers of pulls at a time. The kubelet pulls one image after another, unless it is told
/// otherwise.
pub const PULLS: usize = 16;

/// The service for one connection.
pub fn service(context: Arc<AgentContext>, connection: ConnectionInfo) -> Dispatcher {
    let calls = Calls { context: Arc::clone(&context), connection };
    let agent = AgentServer::new(calls)
        .max_decoding_message_size(MESSAGE_LIMIT)
        .max_encoding_message_size(MESSAGE_LIMIT);
    Dispatcher { agent, context }
}

/// Sends each call where it belongs.
#[derive(Debug, Clone)]
pub struct Dispatcher {
    agent: AgentServer<Calls>,
    context: Arc<AgentContext>,
}

impl<B> Service<HttpRequest<B>> for Dispatcher
where
    B: HttpBody<Data = Bytes, Error: Into<BoxError> + Send + 'static> + Send + 'static,
{
    type Response = HttpResponse<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: HttpRequest<B>) -> Self::Future {
        if forward::is_cri(request.uri().path()) {
            let context = Arc::clone(&self.context);
            return Box::pin(async move {
                Ok(forward::forward(&context.runtime, &context.uncancelled, request).await)
            });
        }
        Box::pin(self.agent.call(request))
    }
}

/// The agent's own calls, on one connection.
#[derive(Debug)]
struct Calls {
    context: Arc<AgentContext>,
    connection: ConnectionInfo,
}

/// One of a bounded number; refused when all are taken.
fn permit(
    semaphore: &Arc<Semaphore>,
    what: &str,
) -> Result<tokio::sync::OwnedSemaphorePermit, Status> {
    Arc::clone(semaphore)
        .try_acquire_owned()
        .map_err(|_| Status::resource_exhausted(format!("too many {what} at a time")))
}

fn ended(error: tokio::task::JoinError) -> Status {
    Status::internal(format!("the call's thread ended: {error}"))
}

#[async_trait::async_trait]
impl Agent for Calls {
    async fn hello(&self, request: Request<HelloRequest>) -> Result<Response<HelloReply>, Status> {
        let context = &self.context;
        context.disk.set_limit(request.get_ref().ephemeral_storage_limit);
        Ok(Response::new(HelloReply {
            cell: context.cell.clone(),
            build_id: super::BUILD_ID.to_owned(),
            kind: self.connection.kind.into(),
            generation: self.connection.generation,
            incarnation: self.connection.incarnation.to_string(),
            pod_dir: context.dir.pod().to_string_lossy().into_owned(),
            memory_dir: context.dir.memory().to_string_lossy().into_owned(),
            own_host_name: context.own.uts,
            own_network: context.own.net,
        }))
    }

    async fn bind(&self, request: Request<BindRequest>) -> Result<Response<BindReply>, Status> {
        let (own, resolver) = (self.context.own, Arc::clone(&self.context.resolver));
        let made = spawn_blocking(move || {
            bind::bind(own, request.get_ref())?;
            resolver.ensure(request.get_ref().resolvers)
        });
        made.await.map_err(ended)??;
        Ok(Response::new(BindReply {}))
    }

    type ResolveStream = BoxStream<'static, Result<NameQuery, Status>>;

    async fn resolve(
        &self,
        request: Request<Streaming<NameAnswer>>,
    ) -> Result<Response<Self::ResolveStream>, Status> {
        Ok(Response::new(Arc::clone(&self.context.resolver).resolve(request.into_inner()).await?))
    }

    async fn open_bulk(
        &self,
        _: Request<OpenBulkRequest>,
    ) -> Result<Response<OpenBulkReply>, Status> {
        self.context.bulk.call();
        Ok(Response::new(OpenBulkReply {}))
    }

    async fn measure(
        &self,
        request: Request<MeasureRequest>,
    ) -> Result<Response<MeasureReply>, Status> {
        self.context.measures.want(Duration::from_secs(request.get_ref().seconds.into()));
        Ok(Response::new(MeasureReply {}))
    }

    type WatchStream = BoxStream<'static, Result<Event, Status>>;

    async fn watch(&self, _: Request<WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let context = &self.context;
        Ok(Response::new(context.watchers.watch(
            Arc::clone(&context.board),
            context.runtime.clone(),
            Arc::clone(&context.measures),
            Arc::clone(&context.disk),
            context.own.net,
        )))
    }

    async fn change_files(
        &self,
        request: Request<Streaming<FileChange>>,
    ) -> Result<Response<ChangeFilesReply>, Status> {
        let _permit = permit(&self.context.changers, "calls that change files")?;
        let mut changes = request.into_inner();
        let mut writing = None;
        while let Some(change) = changes.message().await? {
            let files = Arc::clone(&self.context.files);
            // Goes with the change: what a call that has ended has begun is done before anything of
            // the next one is.
            let turn = Arc::clone(&self.context.changing).lock_owned().await;
            let applied = spawn_blocking(move || {
                let _turn = turn;
                files.apply(change, &mut writing).map(|()| writing)
            });
            writing = applied.await.map_err(ended)??;
        }
        match writing {
            None => Ok(Response::new(ChangeFilesReply {})),
            Some(_) => Err(Status::invalid_argument("the changes end within a file")),
        }
    }

    async fn get_file(
        &self,
        request: Request<GetFileRequest>,
    ) -> Result<Response<GetFileReply>, Status> {
        let files = Arc::clone(&self.context.files);
        let reply = spawn_blocking(move || files.get(request.get_ref())).await.map_err(ended)??;
        Ok(Response::new(reply))
    }

    type ReadLogStream = BoxStream<'static, Result<LogPart, Status>>;

    async fn read_log(
        &self,
        request: Request<ReadLogRequest>,
    ) -> Result<Response<Self::ReadLogStream>, Status> {
        let parts = logs::read(Arc::clone(&self.context.files), request.into_inner()).await?;
        Ok(Response::new(parts.boxed()))
    }

    async fn trim_log(
        &self,
        request: Request<TrimLogRequest>,
    ) -> Result<Response<TrimLogReply>, Status> {
        logs::trim(Arc::clone(&self.context.files), request.into_inner()).await?;
        Ok(Response::new(TrimLogReply {}))
    }

    type TunnelStream = BoxStream<'static, Result<TunnelPart, Status>>;

    async fn tunnel(
        &self,
        request: Request<Streaming<TunnelPart>>,
    ) -> Result<Response<Self::TunnelStream>, Status> {
        let mut incoming = request.into_inner();
        let first = incoming.message().await?.ok_or_else(|| {
            Status::invalid_argument("a tunnel begins with a part that says where it leads")
        })?;
        let end = if first.query == 0 {
            tunnel::server(
                first.port,
                self.context.stream_port,
                permit(&self.context.tunnels, "tunnels")?,
            )
            .await?
        } else {
            let waiting = self.context.resolver.take(first.query);
            waiting.ok_or_else(|| {
                Status::not_found(format!(
                    "no connection to a name server waits for {}",
                    first.query
                ))
            })?
        };
        Ok(Response::new(tunnel::carry(end, first, incoming)))
    }

    async fn missing_blobs(
        &self,
        request: Request<MissingBlobsRequest>,
    ) -> Result<Response<MissingBlobsReply>, Status> {
        let digests = blobs::missing(&self.context.runtime, request.into_inner().digests).await?;
        Ok(Response::new(MissingBlobsReply { digests }))
    }

    async fn put_blob(
        &self,
        request: Request<Streaming<BlobPart>>,
    ) -> Result<Response<PutBlobReply>, Status> {
        let _permit = permit(&self.context.blobs, "blobs")?;
        blobs::put(&self.context.runtime, request.into_inner()).await?;
        Ok(Response::new(PutBlobReply {}))
    }

    async fn put_image(
        &self,
        request: Request<PutImageRequest>,
    ) -> Result<Response<PutImageReply>, Status> {
        blobs::name(&self.context.runtime, request.into_inner()).await?;
        Ok(Response::new(PutImageReply {}))
    }

    type WatchPullsStream = BoxStream<'static, Result<PullNews, Status>>;

    async fn watch_pulls(
        &self,
        request: Request<WatchPullsRequest>,
    ) -> Result<Response<Self::WatchPullsStream>, Status> {
        let permit = permit(&self.context.pulls, "watchers of pulls")?;
        Ok(Response::new(pulls::watch(self.context.runtime.clone(), request.into_inner(), permit)))
    }

    async fn shutdown(
        &self,
        _: Request<ShutdownRequest>,
    ) -> Result<Response<ShutdownReply>, Status> {
        let stopped = shutdown::stop_all(&self.context.runtime).await;
        // Whatever could not be stopped ends with the cell.
        self.context.power_off.cancel();
        stopped.map(|()| Response::new(ShutdownReply {}))
    }
}
