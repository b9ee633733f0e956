//! gRPC service of the agent on a connection: CRI calls go to containerd, the agent handles all
//! others.

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
use kiyot_link::{architecture, http2::Profile, resolver::MAX_TCP_CONNECTIONS};
use kiyot_proto::cell::{
    BindReply, BindRequest, BlobPart, ChangeFilesReply, Event, FileChange, GetFileReply,
    GetFileRequest, HelloReply, HelloRequest, LogPart, MeasureReply, MeasureRequest,
    MissingBlobsReply, MissingBlobsRequest, MountLayersReply, MountLayersRequest, NameAnswer,
    NameQuery, OpenBulkReply, OpenBulkRequest, PullNews, PutBlobReply, PutImageReply,
    PutImageRequest, ReadLogRequest, ShutdownReply, ShutdownRequest, TrimLogReply, TrimLogRequest,
    TunnelPart, WatchPullsRequest, WatchRequest,
    agent_server::{Agent, AgentServer},
};
use tokio::{sync::Semaphore, task::spawn_blocking};
use tonic::{Request, Response, Status, Streaming, body::Body};
use tower::{BoxError, Service};

use super::{
    AgentContext, bind, blobs, boot, clock, forward, layers, logs, network, pulls, registries,
    runtime::MAX_MESSAGE_BYTES, shutdown, tunnel,
};
use crate::uplink::ConnectionInfo;

/// Upper bound on tunnels to the streaming server.
pub const MAX_TUNNELS: usize = 96;
// If the far end of every tunnel stops reading, name servers included, a third of the connection's
// window remains for logs and blobs.
const _: () = assert!(
    (MAX_TUNNELS + MAX_TCP_CONNECTIONS) * (Profile::BULK.stream_window as usize)
        <= (Profile::BULK.connection_window as usize) / 3 * 2
);
/// Upper bound on concurrent `ChangeFiles` calls.
pub const MAX_FILE_CHANGES: usize = 8;
/// Upper bound on concurrent `PutBlob` calls.
pub const MAX_BLOB_WRITES: usize = 8;
/// Upper bound on concurrent `WatchPulls` calls. By default the kubelet pulls images one by one.
pub const MAX_PULL_WATCHES: usize = 16;

/// Returns the service for a connection.
pub fn service(context: Arc<AgentContext>, connection: ConnectionInfo) -> Dispatcher {
    let calls = Calls { context: Arc::clone(&context), connection };
    let agent = AgentServer::new(calls)
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES);
    Dispatcher { agent, context }
}

/// Routes calls to containerd or to the agent.
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
                Ok(forward::forward(&context.runtime, &context.changing_calls, request).await)
            });
        }
        Box::pin(self.agent.call(request))
    }
}

/// The agent's own calls on a connection.
#[derive(Debug)]
struct Calls {
    context: Arc<AgentContext>,
    connection: ConnectionInfo,
}

/// Takes a permit, or fails with RESOURCE_EXHAUSTED.
fn permit(
    semaphore: &Arc<Semaphore>,
    what: &str,
) -> Result<tokio::sync::OwnedSemaphorePermit, Status> {
    Arc::clone(semaphore)
        .try_acquire_owned()
        .map_err(|_| Status::resource_exhausted(format!("too many {what}")))
}

fn join_error(error: tokio::task::JoinError) -> Status {
    Status::internal(format!("thread of the call panicked: {error}"))
}

#[async_trait::async_trait]
impl Agent for Calls {
    async fn hello(&self, request: Request<HelloRequest>) -> Result<Response<HelloReply>, Status> {
        let context = &self.context;
        context.ephemeral_storage.set_limit(request.get_ref().ephemeral_storage_limit);
        if context.owns_machine {
            clock::follow(request.get_ref().unix_nanos);
        }
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
            running_millis: boot::running_millis().unwrap_or_default(),
            architecture: architecture::of_this_machine().to_owned(),
            pause_image: context.pause_image.clone(),
        }))
    }

    async fn bind(&self, request: Request<BindRequest>) -> Result<Response<BindReply>, Status> {
        let (own, resolver) = (self.context.own, Arc::clone(&self.context.resolver));
        let owns_machine = self.context.owns_machine;
        let made = spawn_blocking(move || {
            let checked = bind::check(own, request.get_ref())?;
            // Before the sysctls, as CNI configures the network on the node: sysctls may disable
            // addresses.
            if let Some(network) = &request.get_ref().network {
                network::pod::configure(owns_machine, network)?;
            }
            checked.apply()?;
            registries::replace(owns_machine, &request.get_ref().registries)?;
            pulls::proxies::replace(owns_machine, &request.get_ref().proxies)?;
            resolver.ensure(request.get_ref().resolvers)
        });
        made.await.map_err(join_error)??;
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
        self.context
            .metrics_subscription
            .renew(Duration::from_secs(request.get_ref().seconds.into()));
        Ok(Response::new(MeasureReply {}))
    }

    type WatchStream = BoxStream<'static, Result<Event, Status>>;

    async fn watch(&self, _: Request<WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let context = &self.context;
        Ok(Response::new(context.watchers.watch(
            Arc::clone(&context.state),
            context.runtime.clone(),
            Arc::clone(&context.metrics_subscription),
            Arc::clone(&context.ephemeral_storage),
            context.own.net,
        )))
    }

    async fn change_files(
        &self,
        request: Request<Streaming<FileChange>>,
    ) -> Result<Response<ChangeFilesReply>, Status> {
        let _permit = permit(&self.context.file_changes, "concurrent ChangeFiles calls")?;
        let mut changes = request.into_inner();
        let mut writer = None;
        while let Some(change) = changes.message().await? {
            let files = Arc::clone(&self.context.files);
            // The lock is held by the change, not by the call: the change of a cancelled call
            // completes before a later call begins.
            let turn = Arc::clone(&self.context.file_change_lock).lock_owned().await;
            let applied = spawn_blocking(move || {
                let _turn = turn;
                files.apply(change, &mut writer).map(|()| writer)
            });
            writer = applied.await.map_err(join_error)??;
        }
        match writer {
            None => Ok(Response::new(ChangeFilesReply {})),
            Some(_) => {
                Err(Status::invalid_argument("the changes end before the last part of a file"))
            }
        }
    }

    async fn get_file(
        &self,
        request: Request<GetFileRequest>,
    ) -> Result<Response<GetFileReply>, Status> {
        let files = Arc::clone(&self.context.files);
        let reply =
            spawn_blocking(move || files.get(request.get_ref())).await.map_err(join_error)??;
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
            Status::invalid_argument("tunnel: stream ended before its first part")
        })?;
        let end = if first.query == 0 {
            tunnel::connect_streaming_server(
                first.port,
                self.context.stream_port,
                permit(&self.context.tunnels, "concurrent tunnels")?,
            )
            .await?
        } else {
            let waiting = self.context.resolver.take_connection(first.query);
            waiting.ok_or_else(|| {
                Status::not_found(format!(
                    "query {}: no connection to a name server is waiting",
                    first.query
                ))
            })?
        };
        Ok(Response::new(tunnel::relay(end, first, incoming)))
    }

    async fn missing_blobs(
        &self,
        request: Request<MissingBlobsRequest>,
    ) -> Result<Response<MissingBlobsReply>, Status> {
        let digests =
            blobs::missing_blobs(&self.context.runtime, request.into_inner().digests).await?;
        Ok(Response::new(MissingBlobsReply { digests }))
    }

    async fn put_blob(
        &self,
        request: Request<Streaming<BlobPart>>,
    ) -> Result<Response<PutBlobReply>, Status> {
        let _permit = permit(&self.context.blobs, "concurrent PutBlob calls")?;
        let store = self.context.dir.containerd_content();
        blobs::put_blob(&self.context.runtime, &store, request.into_inner()).await?;
        Ok(Response::new(PutBlobReply {}))
    }

    async fn mount_layers(
        &self,
        request: Request<MountLayersRequest>,
    ) -> Result<Response<MountLayersReply>, Status> {
        layers::mount_layers(&self.context.runtime, &request.into_inner().layers).await?;
        Ok(Response::new(MountLayersReply {}))
    }

    async fn put_image(
        &self,
        request: Request<PutImageRequest>,
    ) -> Result<Response<PutImageReply>, Status> {
        blobs::put_image(&self.context.runtime, request.into_inner()).await?;
        Ok(Response::new(PutImageReply {}))
    }

    type WatchPullsStream = BoxStream<'static, Result<PullNews, Status>>;

    async fn watch_pulls(
        &self,
        request: Request<WatchPullsRequest>,
    ) -> Result<Response<Self::WatchPullsStream>, Status> {
        let permit = permit(&self.context.pulls, "concurrent WatchPulls calls")?;
        Ok(Response::new(pulls::watch(self.context.runtime.clone(), request.into_inner(), permit)))
    }

    async fn shutdown(
        &self,
        _: Request<ShutdownRequest>,
    ) -> Result<Response<ShutdownReply>, Status> {
        let stopped = shutdown::stop_all(&self.context.runtime).await;
        // The rest of the containers ends with the cell.
        self.context.power_off.cancel();
        stopped.map(|()| Response::new(ShutdownReply {}))
    }
}
