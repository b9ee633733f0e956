//! An agent that does nothing but answer.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures::{Stream, StreamExt, stream};
use kiyot_cell::uplink::{ConnectionInfo, UplinkHandle};
use kiyot_proto::cell::*;
use tonic::{Request, Response, Status, Streaming};

type Answer<T> = Result<Response<T>, Status>;
type Parts<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// A request with a deadline.
pub(crate) fn timed<T>(message: T, deadline: Duration) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(deadline);
    request
}

/// `GetFile` answers with the path; `Bind` and `Watch` never end; `ReadLog` answers as many parts
/// as its position says, and then never ends.
#[derive(Clone)]
pub(crate) struct TestAgent {
    cell: String,
    home: UplinkHandle,
    info: Option<ConnectionInfo>,
    /// Calls of `Bind` that have begun.
    pub(crate) binds: Arc<AtomicUsize>,
    /// Calls of `OpenBulk`.
    pub(crate) wishes: Arc<AtomicUsize>,
    /// Connections for bulk that the gateway has greeted.
    pub(crate) bulks: Arc<AtomicUsize>,
}

impl TestAgent {
    pub(crate) fn new(cell: String, home: UplinkHandle) -> Self {
        Self {
            cell,
            home,
            info: None,
            binds: Arc::default(),
            wishes: Arc::default(),
            bulks: Arc::default(),
        }
    }

    pub(crate) fn on(&self, info: ConnectionInfo) -> Self {
        Self { info: Some(info), ..self.clone() }
    }
}

#[tonic::async_trait]
impl agent_server::Agent for TestAgent {
    type WatchStream = Parts<Event>;
    type ReadLogStream = Parts<LogPart>;
    type TunnelStream = Parts<TunnelPart>;
    type ResolveStream = Parts<NameQuery>;
    type WatchPullsStream = Parts<PullNews>;

    async fn hello(&self, _: Request<HelloRequest>) -> Answer<HelloReply> {
        let info = self.info.clone().unwrap();
        if info.kind == ConnectionKind::Bulk {
            self.bulks.fetch_add(1, Ordering::SeqCst);
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

    async fn bind(&self, _: Request<BindRequest>) -> Answer<BindReply> {
        self.binds.fetch_add(1, Ordering::SeqCst);
        futures::future::pending().await
    }

    async fn open_bulk(&self, _: Request<OpenBulkRequest>) -> Answer<OpenBulkReply> {
        self.wishes.fetch_add(1, Ordering::SeqCst);
        self.home.open_bulk();
        Ok(Response::new(OpenBulkReply {}))
    }

    async fn measure(&self, _: Request<MeasureRequest>) -> Answer<MeasureReply> {
        Err(Status::unimplemented("not here"))
    }

    async fn watch(&self, _: Request<WatchRequest>) -> Answer<Self::WatchStream> {
        let first = Event { event: Some(event::Event::Snapshot(Snapshot::default())) };
        Ok(Response::new(Box::pin(stream::once(async { Ok(first) }).chain(stream::pending()))))
    }

    async fn change_files(
        &self,
        request: Request<Streaming<FileChange>>,
    ) -> Answer<ChangeFilesReply> {
        let mut changes = request.into_inner();
        while changes.message().await?.is_some() {}
        Ok(Response::new(ChangeFilesReply {}))
    }

    async fn get_file(&self, request: Request<GetFileRequest>) -> Answer<GetFileReply> {
        Ok(Response::new(GetFileReply { content: request.into_inner().path.into(), exists: true }))
    }

    async fn read_log(&self, request: Request<ReadLogRequest>) -> Answer<Self::ReadLogStream> {
        let parts = usize::try_from(request.into_inner().position).unwrap();
        let part = || Ok(LogPart { content: vec![b'x'; 64 * 1024].into(), gap: 0 });
        Ok(Response::new(Box::pin(stream::repeat_with(part).take(parts).chain(stream::pending()))))
    }

    async fn trim_log(&self, _: Request<TrimLogRequest>) -> Answer<TrimLogReply> {
        Err(Status::not_found("no such log"))
    }

    async fn resolve(&self, _: Request<Streaming<NameAnswer>>) -> Answer<Self::ResolveStream> {
        Err(Status::unimplemented("resolve"))
    }

    async fn tunnel(&self, request: Request<Streaming<TunnelPart>>) -> Answer<Self::TunnelStream> {
        Ok(Response::new(Box::pin(request.into_inner())))
    }

    async fn missing_blobs(&self, _: Request<MissingBlobsRequest>) -> Answer<MissingBlobsReply> {
        Err(Status::unimplemented("not here"))
    }

    async fn put_blob(&self, _: Request<Streaming<BlobPart>>) -> Answer<PutBlobReply> {
        Err(Status::unimplemented("not here"))
    }

    async fn put_image(&self, _: Request<PutImageRequest>) -> Answer<PutImageReply> {
        Err(Status::unimplemented("not here"))
    }

    async fn watch_pulls(&self, _: Request<WatchPullsRequest>) -> Answer<Self::WatchPullsStream> {
        Err(Status::unimplemented("not here"))
    }

    async fn shutdown(&self, _: Request<ShutdownRequest>) -> Answer<ShutdownReply> {
        Err(Status::unimplemented("not here"))
    }
}
