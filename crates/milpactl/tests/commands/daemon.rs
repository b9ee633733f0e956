//! A daemon that answers from data of the test.

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use async_trait::async_trait;
use futures::{StreamExt, stream, stream::BoxStream};
use kiyot_proto::admin::{
    self,
    admin_server::{Admin, AdminServer},
};
use tempfile::TempDir;
use tokio::{net::UnixListener, runtime::Runtime, sync::Notify};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Request, Response, Status, transport::Server};

/// The pods of a part.
const PART: usize = 128;

/// Behaviour of the daemon.
#[derive(Debug, Clone)]
pub(crate) struct Behaviour {
    /// The number of pods, each with a cell.
    pub pods: usize,
    /// The list of pods stops after its first part until [`Daemon::release`].
    pub holds_the_end: bool,
    /// The number of lists after which the pods have ended. The first pod runs from the second
    /// list on.
    pub ends_after: Option<usize>,
    /// Methods that change something are not known.
    pub is_older: bool,
    /// The caller has no rights.
    pub denies: bool,
}

impl Default for Behaviour {
    fn default() -> Self {
        Self { pods: 3, holds_the_end: false, ends_after: None, is_older: false, denies: false }
    }
}

#[derive(Debug)]
struct Shared {
    behaviour: Behaviour,
    released: Notify,
    lists: AtomicUsize,
    ended: Mutex<Vec<String>>,
    last_log: Mutex<Option<admin::ReadLogRequest>>,
}

/// The daemon. Dropping it closes its socket.
#[derive(Debug)]
pub(crate) struct Daemon {
    shared: Arc<Shared>,
    socket: PathBuf,
    _runtime: Runtime,
    _directory: TempDir,
}

impl Daemon {
    /// Starts a daemon.
    pub(crate) fn start(behaviour: Behaviour) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("admin.sock");
        let shared = Arc::new(Shared {
            behaviour,
            released: Notify::new(),
            lists: AtomicUsize::new(0),
            ended: Mutex::default(),
            last_log: Mutex::default(),
        });
        let runtime = Runtime::new().unwrap();
        let listener = {
            let _in_runtime = runtime.enter();
            UnixListener::bind(&socket).unwrap()
        };
        let service = AdminServer::new(Service(Arc::clone(&shared)));
        runtime.spawn(
            Server::builder()
                .add_service(service)
                .serve_with_incoming(UnixListenerStream::new(listener)),
        );
        Self { shared, socket, _runtime: runtime, _directory: directory }
    }

    /// Returns the path of its socket.
    pub(crate) fn socket(&self) -> &Path {
        &self.socket
    }

    /// Sends the rest of the list.
    pub(crate) fn release(&self) {
        self.shared.released.notify_one();
    }

    /// Returns the cells that were ended, sorted.
    pub(crate) fn ended(&self) -> Vec<String> {
        let mut ended = self.shared.ended.lock().unwrap().clone();
        ended.sort();
        ended
    }

    /// Returns the last request for a log.
    pub(crate) fn last_log(&self) -> Option<admin::ReadLogRequest> {
        self.shared.last_log.lock().unwrap().clone()
    }
}

struct Service(Arc<Shared>);

type Parts<T> = BoxStream<'static, Result<T, Status>>;

impl Service {
    fn check(&self) -> Result<(), Status> {
        let behaviour = &self.0.behaviour;
        match (behaviour.is_older, behaviour.denies) {
            (true, _) => Err(Status::unimplemented("no such method")),
            (_, true) => Err(Status::permission_denied("this is for root")),
            _ => Ok(()),
        }
    }

    fn cells(&self) -> Vec<admin::Cell> {
        let ended = self.0.ended.lock().unwrap();
        let all = (0..self.0.behaviour.pods).map(cell);
        all.filter(|cell| !ended.contains(&cell.id)).collect()
    }
}

fn offering() -> admin::Offering {
    admin::Offering {
        instance_type: "t3.nano".to_owned(),
        zone: "us-east-1a".to_owned(),
        price_micros: 5200,
        ..Default::default()
    }
}

fn pod(number: usize, phase: admin::PodPhase) -> admin::Pod {
    let parity = if number.is_multiple_of(2) { "even" } else { "odd" };
    admin::Pod {
        namespace: "default".to_owned(),
        name: format!("web-{number}"),
        uid: format!("uid-{number}"),
        cell: format!("cell-{number}"),
        phase: phase.into(),
        created_unix_nanos: 1_700_000_000_000_000_000,
        labels: [("app".to_owned(), parity.to_owned())].into(),
        units: vec![admin::Unit { name: "main".to_owned(), ..Default::default() }],
        offering: Some(offering()),
        ..Default::default()
    }
}

fn cell(number: usize) -> admin::Cell {
    admin::Cell {
        id: format!("cell-{number}"),
        instance: format!("i-{number}"),
        phase: admin::CellPhase::CellBound.into(),
        connected: true,
        offering: Some(offering()),
        created_unix_nanos: 1_700_000_000_000_000_000,
        pod_namespace: "default".to_owned(),
        pod_name: format!("web-{number}"),
        timeline: Some(admin::Timeline {
            launched: 1_700_000_000_200_000_000,
            first_container: 1_700_000_001_000_000_000,
            ..Default::default()
        }),
        ..Default::default()
    }
}

fn once<T: Send + 'static>(part: T) -> Result<Response<Parts<T>>, Status> {
    Ok(Response::new(stream::iter([Ok(part)]).boxed()))
}

#[async_trait]
impl Admin for Service {
    type ListPodsStream = Parts<admin::ListPodsResponse>;
    type ListCellsStream = Parts<admin::ListCellsResponse>;
    type ListEventsStream = Parts<admin::ListEventsResponse>;
    type ListUsageStream = Parts<admin::ListUsageResponse>;
    type ListOfferingsStream = Parts<admin::ListOfferingsResponse>;
    type ReadLogStream = Parts<admin::ReadLogResponse>;
    type DumpStream = Parts<admin::DumpResponse>;

    async fn version(
        &self,
        _: Request<admin::VersionRequest>,
    ) -> Result<Response<admin::VersionResponse>, Status> {
        let version = "0.0.1".to_owned();
        Ok(Response::new(admin::VersionResponse { version, revision: 1, ..Default::default() }))
    }

    async fn list_pods(
        &self,
        request: Request<admin::ListPodsRequest>,
    ) -> Result<Response<Self::ListPodsStream>, Status> {
        let namespace = request.into_inner().namespace;
        let list = self.0.lists.fetch_add(1, Ordering::SeqCst);
        let Behaviour { pods, ends_after, holds_the_end, .. } = self.0.behaviour.clone();
        let has_ended = ends_after.is_some_and(|ends| list >= ends);
        let has_none = has_ended || !(namespace.is_empty() || namespace == "default");
        let phase = match (ends_after, list) {
            (Some(_), 0) => admin::PodPhase::Dispatching,
            _ => admin::PodPhase::Running,
        };
        let pods: Vec<_> = (0..if has_none { 0 } else { pods }).map(|it| pod(it, phase)).collect();
        let parts: Vec<_> = pods.chunks(PART).map(<[_]>::to_vec).collect();
        let shared = Arc::clone(&self.0);
        let parts = stream::iter(parts.into_iter().enumerate()).then(move |(number, pods)| {
            let shared = Arc::clone(&shared);
            async move {
                if holds_the_end && number == 1 {
                    shared.released.notified().await;
                }
                Ok(admin::ListPodsResponse { pods })
            }
        });
        Ok(Response::new(parts.boxed()))
    }

    async fn list_cells(
        &self,
        _: Request<admin::ListCellsRequest>,
    ) -> Result<Response<Self::ListCellsStream>, Status> {
        once(admin::ListCellsResponse { cells: self.cells() })
    }

    async fn list_events(
        &self,
        _: Request<admin::ListEventsRequest>,
    ) -> Result<Response<Self::ListEventsStream>, Status> {
        once(admin::ListEventsResponse::default())
    }

    async fn list_usage(
        &self,
        _: Request<admin::ListUsageRequest>,
    ) -> Result<Response<Self::ListUsageStream>, Status> {
        let usage = admin::PodUsage {
            namespace: "default".to_owned(),
            name: "web-1".to_owned(),
            cpu_nanocores: 12_000_000,
            ..Default::default()
        };
        once(admin::ListUsageResponse { pods: vec![usage], ..Default::default() })
    }

    async fn list_backends(
        &self,
        _: Request<admin::ListBackendsRequest>,
    ) -> Result<Response<admin::ListBackendsResponse>, Status> {
        Ok(Response::new(admin::ListBackendsResponse::default()))
    }

    async fn list_offerings(
        &self,
        _: Request<admin::ListOfferingsRequest>,
    ) -> Result<Response<Self::ListOfferingsStream>, Status> {
        once(admin::ListOfferingsResponse::default())
    }

    async fn list_pools(
        &self,
        _: Request<admin::ListPoolsRequest>,
    ) -> Result<Response<admin::ListPoolsResponse>, Status> {
        Ok(Response::new(admin::ListPoolsResponse::default()))
    }

    async fn read_log(
        &self,
        request: Request<admin::ReadLogRequest>,
    ) -> Result<Response<Self::ReadLogStream>, Status> {
        *self.0.last_log.lock().unwrap() = Some(request.into_inner());
        once(admin::ReadLogResponse { stdout: "out\n".into(), stderr: "err\n".into() })
    }

    async fn exec(
        &self,
        _: Request<admin::ExecRequest>,
    ) -> Result<Response<admin::StreamingUrl>, Status> {
        Err(Status::unimplemented("not played"))
    }

    async fn attach(
        &self,
        _: Request<admin::AttachRequest>,
    ) -> Result<Response<admin::StreamingUrl>, Status> {
        Err(Status::unimplemented("not played"))
    }

    async fn port_forward(
        &self,
        _: Request<admin::PortForwardRequest>,
    ) -> Result<Response<admin::StreamingUrl>, Status> {
        Err(Status::unimplemented("not played"))
    }

    async fn cordon(
        &self,
        _: Request<admin::CordonRequest>,
    ) -> Result<Response<admin::CordonResponse>, Status> {
        self.check()?;
        Ok(Response::new(admin::CordonResponse { cells: 3 }))
    }

    async fn uncordon(
        &self,
        _: Request<admin::UncordonRequest>,
    ) -> Result<Response<admin::UncordonResponse>, Status> {
        self.check()?;
        Ok(Response::new(admin::UncordonResponse {}))
    }

    async fn end_cell(
        &self,
        request: Request<admin::EndCellRequest>,
    ) -> Result<Response<admin::EndCellResponse>, Status> {
        self.0.ended.lock().unwrap().push(request.into_inner().cell);
        Ok(Response::new(admin::EndCellResponse {}))
    }

    async fn create_pods(
        &self,
        request: Request<admin::CreatePodsRequest>,
    ) -> Result<Response<admin::CreatePodsResponse>, Status> {
        self.check()?;
        let created = |file: admin::ManifestFile| admin::CreatedPod {
            namespace: "default".to_owned(),
            name: file.text.trim().to_owned(),
            uid: "uid".to_owned(),
        };
        let pods = request.into_inner().files.into_iter().map(created).collect();
        Ok(Response::new(admin::CreatePodsResponse { pods }))
    }

    async fn delete_pod(
        &self,
        request: Request<admin::DeletePodRequest>,
    ) -> Result<Response<admin::DeletePodResponse>, Status> {
        self.check()?;
        let admin::DeletePodRequest { name, .. } = request.into_inner();
        let mut ended = self.0.ended.lock().unwrap();
        match name.as_str() {
            // Its end takes longer than a call.
            "slow" if !ended.contains(&name) => {
                ended.push(name);
                Err(Status::deadline_exceeded("DeletePod takes longer"))
            }
            "slow" => Err(Status::not_found("no pod")),
            "kubelets" => Err(Status::failed_precondition("it is the kubelet's pod")),
            _ => {
                let namespace = "default".to_owned();
                Ok(Response::new(admin::DeletePodResponse { namespace, name }))
            }
        }
    }

    async fn dump(
        &self,
        _: Request<admin::DumpRequest>,
    ) -> Result<Response<Self::DumpStream>, Status> {
        let part = |file: &str, content: &'static str| {
            Ok(admin::DumpResponse { file: file.to_owned(), content: content.into() })
        };
        let parts = [part("pods.txt", "first "), part("", "second"), part("log.txt", "lines")];
        Ok(Response::new(stream::iter(parts).boxed()))
    }
}
