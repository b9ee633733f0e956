//! The service of an agent that has no containerd.

use std::{
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures::{Stream, StreamExt, stream};
use kiyot_cell::uplink::{ConnectionInfo, UplinkHandle};
use kiyot_proto::cell::*;
use ring::digest::{Context, SHA256};
use tonic::{Request, Response, Status, Streaming};

type Reply<T> = Result<Response<T>, Status>;
type BoxStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

pub(crate) fn timed<T>(message: T, timeout: Duration) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(timeout);
    request
}

/// A service with fixed responses. `GetFile` returns the path. `Bind` and `Watch` never end.
/// `ReadLog` returns the number of parts that is the requested position, and then never ends.
#[derive(Clone)]
pub(crate) struct TestAgent {
    cell: String,
    home: UplinkHandle,
    info: Option<ConnectionInfo>,
    /// The number of `Bind` calls that have begun.
    pub(crate) bind_calls: Arc<AtomicUsize>,
    /// The number of `OpenBulk` calls.
    pub(crate) open_bulk_calls: Arc<AtomicUsize>,
    /// The digests of all received blobs, in the order of their arrival.
    pub(crate) blobs: Arc<Mutex<Vec<String>>>,
    /// The number of bulk connections on which the gateway has called `Hello`.
    pub(crate) bulk_connections: Arc<AtomicUsize>,
}

impl TestAgent {
    pub(crate) fn new(cell: String, home: UplinkHandle) -> Self {
        Self {
            cell,
            home,
            info: None,
            bind_calls: Arc::default(),
            open_bulk_calls: Arc::default(),
            blobs: Arc::default(),
            bulk_connections: Arc::default(),
        }
    }

    pub(crate) fn for_connection(&self, info: ConnectionInfo) -> Self {
        Self { info: Some(info), ..self.clone() }
    }
}

#[tonic::async_trait]
impl agent_server::Agent for TestAgent {
    type WatchStream = BoxStream<Event>;
    type ReadLogStream = BoxStream<LogPart>;
    type TunnelStream = BoxStream<TunnelPart>;
    type ResolveStream = BoxStream<NameQuery>;
    type WatchPullsStream = BoxStream<PullNews>;

    async fn hello(&self, _: Request<HelloRequest>) -> Reply<HelloReply> {
        let info = self.info.clone().unwrap();
        if info.kind == ConnectionKind::Bulk {
            self.bulk_connections.fetch_add(1, Ordering::SeqCst);
        }
        Ok(Response::new(HelloReply {
            cell: self.cell.clone(),
            build_id: "agent".to_owned(),
            kind: info.kind.into(),
            generation: info.generation,
            incarnation: info.incarnation.to_string(),
            ..HelloReply::default()
        }))
    }

    async fn bind(&self, _: Request<BindRequest>) -> Reply<BindReply> {
        self.bind_calls.fetch_add(1, Ordering::SeqCst);
        futures::future::pending().await
    }

    async fn open_bulk(&self, _: Request<OpenBulkRequest>) -> Reply<OpenBulkReply> {
        self.open_bulk_calls.fetch_add(1, Ordering::SeqCst);
        self.home.open_bulk();
        Ok(Response::new(OpenBulkReply {}))
    }

    async fn measure(&self, _: Request<MeasureRequest>) -> Reply<MeasureReply> {
        Err(Status::unimplemented("not implemented"))
    }

    async fn watch(&self, _: Request<WatchRequest>) -> Reply<Self::WatchStream> {
        let first = Event { event: Some(event::Event::Snapshot(Snapshot::default())) };
        Ok(Response::new(Box::pin(stream::once(async { Ok(first) }).chain(stream::pending()))))
    }

    async fn change_files(
        &self,
        request: Request<Streaming<FileChange>>,
    ) -> Reply<ChangeFilesReply> {
        let mut changes = request.into_inner();
        while changes.message().await?.is_some() {}
        Ok(Response::new(ChangeFilesReply {}))
    }

    async fn get_file(&self, request: Request<GetFileRequest>) -> Reply<GetFileReply> {
        Ok(Response::new(GetFileReply { content: request.into_inner().path.into(), exists: true }))
    }

    async fn read_log(&self, request: Request<ReadLogRequest>) -> Reply<Self::ReadLogStream> {
        let parts = usize::try_from(request.into_inner().position).unwrap();
        let part = || Ok(LogPart { content: vec![b'x'; 64 * 1024].into(), gap: 0 });
        Ok(Response::new(Box::pin(stream::repeat_with(part).take(parts).chain(stream::pending()))))
    }

    async fn trim_log(&self, _: Request<TrimLogRequest>) -> Reply<TrimLogReply> {
        Err(Status::not_found("no such log"))
    }

    async fn resolve(&self, _: Request<Streaming<NameAnswer>>) -> Reply<Self::ResolveStream> {
        Err(Status::unimplemented("resolve"))
    }

    async fn tunnel(&self, request: Request<Streaming<TunnelPart>>) -> Reply<Self::TunnelStream> {
        Ok(Response::new(Box::pin(request.into_inner())))
    }

    async fn missing_blobs(&self, _: Request<MissingBlobsRequest>) -> Reply<MissingBlobsReply> {
        Err(Status::unimplemented("not implemented"))
    }

    async fn put_blob(&self, request: Request<Streaming<BlobPart>>) -> Reply<PutBlobReply> {
        let mut parts = request.into_inner();
        let mut digest = Context::new(&SHA256);
        while let Some(part) = parts.message().await? {
            digest.update(&part.content);
        }
        self.blobs.lock().unwrap().push(hex::encode(digest.finish()));
        Ok(Response::new(PutBlobReply {}))
    }

    async fn mount_layers(&self, _: Request<MountLayersRequest>) -> Reply<MountLayersReply> {
        Err(Status::unimplemented("not implemented"))
    }

    async fn put_image(&self, _: Request<PutImageRequest>) -> Reply<PutImageReply> {
        Err(Status::unimplemented("not implemented"))
    }

    async fn watch_pulls(&self, _: Request<WatchPullsRequest>) -> Reply<Self::WatchPullsStream> {
        Err(Status::unimplemented("not implemented"))
    }

    async fn shutdown(&self, _: Request<ShutdownRequest>) -> Reply<ShutdownReply> {
        Err(Status::unimplemented("not implemented"))
    }
}
