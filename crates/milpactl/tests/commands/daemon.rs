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
use kiyot_proto::{
    ADMIN_REVISION,
    admin::{
        self,
        admin_server::{Admin, AdminServer},
    },
};
use kiyot_testkit::watchdog::Watchdog;
use tempfile::TempDir;
use tokio::{net::UnixListener, runtime::Runtime, sync::Notify};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Request, Response, Status, transport::Server};

use super::spdy_server;

/// The pods of a part.
const PART: usize = 128;
/// A phase that no version has yet.
const LATER: i32 = 99;

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
    /// The revision of its API.
    pub revision: u32,
    /// Methods that change something are unknown.
    pub lacks_methods: bool,
    /// The API is another, without the method for its version.
    pub lacks_version: bool,
    /// Pods and cells are in phases of a later version.
    pub has_later_phases: bool,
    /// The caller has no rights.
    pub denies: bool,
    /// Units have an input and a terminal.
    pub unit_has_terminal: bool,
    /// The first pod waits for another cell, from the second list on.
    pub replaces: bool,
    /// Lists of cells never end.
    pub hangs: bool,
    /// The support bundle does not end.
    pub dump_hangs: bool,
    /// Ends of cells never complete.
    pub end_hangs: bool,
    /// The end of the first cell takes longer than a call: the third list lacks the cell.
    pub end_is_slow: bool,
}

impl Default for Behaviour {
    fn default() -> Self {
        Self {
            pods: 3,
            holds_the_end: false,
            ends_after: None,
            revision: ADMIN_REVISION,
            lacks_methods: false,
            lacks_version: false,
            has_later_phases: false,
            denies: false,
            unit_has_terminal: false,
            replaces: false,
            hangs: false,
            dump_hangs: false,
            end_hangs: false,
            end_is_slow: false,
        }
    }
}

#[derive(Debug)]
struct Shared {
    behaviour: Behaviour,
    released: Notify,
    lists: AtomicUsize,
    /// The parts of lists of pods that were sent.
    sent: AtomicUsize,
    /// The requests for cells, and for offerings.
    cell_lists: AtomicUsize,
    offering_lists: AtomicUsize,
    ended: Mutex<Vec<String>>,
    last_log: Mutex<Option<admin::ReadLogRequest>>,
    last_exec: Mutex<Option<admin::ExecRequest>>,
    last_attach: Mutex<Option<admin::AttachRequest>>,
}

/// The daemon. Dropping it closes its socket.
#[derive(Debug)]
pub(crate) struct Daemon {
    shared: Arc<Shared>,
    socket: PathBuf,
    _runtime: Runtime,
    _watchdog: Watchdog,
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
            sent: AtomicUsize::new(0),
            cell_lists: AtomicUsize::new(0),
            offering_lists: AtomicUsize::new(0),
            ended: Mutex::default(),
            last_log: Mutex::default(),
            last_exec: Mutex::default(),
            last_attach: Mutex::default(),
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
        let watchdog = Watchdog::start(|| ());
        Self { shared, socket, _runtime: runtime, _watchdog: watchdog, _directory: directory }
    }

    /// Returns the path of its socket.
    pub(crate) fn socket(&self) -> &Path {
        &self.socket
    }

    /// Sends the rest of the list.
    pub(crate) fn release(&self) {
        self.shared.released.notify_one();
    }

    /// Returns the number of parts of lists of pods that were sent.
    pub(crate) fn sent_parts(&self) -> usize {
        self.shared.sent.load(Ordering::SeqCst)
    }

    /// Returns the number of lists of pods that were requested.
    pub(crate) fn lists(&self) -> usize {
        self.shared.lists.load(Ordering::SeqCst)
    }

    /// Returns the number of requests for cells.
    pub(crate) fn cell_lists(&self) -> usize {
        self.shared.cell_lists.load(Ordering::SeqCst)
    }

    /// Returns the number of requests for offerings.
    pub(crate) fn offering_lists(&self) -> usize {
        self.shared.offering_lists.load(Ordering::SeqCst)
    }

    /// Returns the cells that were ended, sorted.
    pub(crate) fn ended(&self) -> Vec<String> {
        let mut ended = self.shared.ended.lock().unwrap().clone();
        ended.sort();
        ended
    }

    /// Returns the last request for an exec.
    pub(crate) fn last_exec(&self) -> Option<admin::ExecRequest> {
        self.shared.last_exec.lock().unwrap().clone()
    }

    /// Returns the last request for an attach.
    pub(crate) fn last_attach(&self) -> Option<admin::AttachRequest> {
        self.shared.last_attach.lock().unwrap().clone()
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
        match (behaviour.lacks_methods, behaviour.denies) {
            (true, _) => Err(Status::unimplemented("no such method")),
            (_, true) => Err(Status::permission_denied("this is for root")),
            _ => Ok(()),
        }
    }

    fn cells(&self) -> Vec<admin::Cell> {
        let ended = self.0.ended.lock().unwrap();
        let all = (0..self.0.behaviour.pods).map(cell);
        let mut cells: Vec<_> = all.filter(|cell| !ended.contains(&cell.id)).collect();
        if self.0.behaviour.has_later_phases {
            cells.iter_mut().for_each(|cell| cell.phase = LATER);
        }
        cells
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
        provider: "ec2".to_owned(),
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
        let Behaviour { revision, lacks_version, .. } = self.0.behaviour;
        if lacks_version {
            return Err(Status::unimplemented(""));
        }
        let version = "0.0.1".to_owned();
        Ok(Response::new(admin::VersionResponse { version, revision, ..Default::default() }))
    }

    async fn list_pods(
        &self,
        request: Request<admin::ListPodsRequest>,
    ) -> Result<Response<Self::ListPodsStream>, Status> {
        let admin::ListPodsRequest { namespace, name } = request.into_inner();
        let list = self.0.lists.fetch_add(1, Ordering::SeqCst);
        let Behaviour { pods, ends_after, holds_the_end, .. } = self.0.behaviour.clone();
        let has_ended = ends_after.is_some_and(|ends| list >= ends);
        let has_none = has_ended || !(namespace.is_empty() || namespace == "default");
        let phase = match (ends_after, list) {
            (Some(_), 0) => admin::PodPhase::Dispatching,
            _ => admin::PodPhase::Running,
        };
        let mut pods: Vec<_> =
            (0..if has_none { 0 } else { pods }).map(|it| pod(it, phase)).collect();
        let has_terminal = self.0.behaviour.unit_has_terminal;
        for unit in pods.iter_mut().flat_map(|pod| &mut pod.units) {
            (unit.stdin, unit.tty) = (has_terminal, has_terminal);
        }
        if self.0.behaviour.has_later_phases {
            pods.iter_mut().for_each(|pod| pod.phase = LATER);
            pods.iter_mut().flat_map(|pod| &mut pod.units).for_each(|unit| unit.state = LATER);
        }
        if self.0.behaviour.replaces && list > 0 && !pods.is_empty() {
            let newer =
                admin::Pod { sandbox: "milpab".to_owned(), cell: String::new(), ..pods[0].clone() };
            (pods[0].is_replaced, pods[0].sandbox) = (true, "milpaa".to_owned());
            pods.insert(1, newer);
        }
        pods.retain(|pod| name.is_empty() || [&pod.name, &pod.uid, &pod.sandbox].contains(&&name));
        let parts: Vec<_> = pods.chunks(PART).map(<[_]>::to_vec).collect();
        let shared = Arc::clone(&self.0);
        let parts = stream::iter(parts.into_iter().enumerate()).then(move |(number, pods)| {
            let shared = Arc::clone(&shared);
            async move {
                if holds_the_end && number == 1 {
                    shared.released.notified().await;
                }
                shared.sent.fetch_add(1, Ordering::SeqCst);
                Ok(admin::ListPodsResponse { pods })
            }
        });
        Ok(Response::new(parts.boxed()))
    }

    async fn list_cells(
        &self,
        _: Request<admin::ListCellsRequest>,
    ) -> Result<Response<Self::ListCellsStream>, Status> {
        let list = self.0.cell_lists.fetch_add(1, Ordering::SeqCst);
        if self.0.behaviour.end_is_slow && list == 2 {
            self.0.ended.lock().unwrap().push(cell(0).id);
        }
        if self.0.behaviour.hangs {
            std::future::pending::<()>().await;
        }
        once(admin::ListCellsResponse { cells: self.cells() })
    }

    async fn list_events(
        &self,
        request: Request<admin::ListEventsRequest>,
    ) -> Result<Response<Self::ListEventsStream>, Status> {
        let wanted = request.into_inner().name;
        let event = |number, kind: &str, name: &str| admin::Event {
            number,
            kind: kind.to_owned(),
            name: name.to_owned(),
            ..Default::default()
        };
        let mut events = vec![
            event(1, "Pod", "default/web-0"),
            event(2, "Cell", "cell-0"),
            event(3, "Pod", "shop/ended"),
        ];
        events.retain(|event| wanted.is_empty() || event.name == wanted);
        once(admin::ListEventsResponse { events })
    }

    async fn list_usage(
        &self,
        _: Request<admin::ListUsageRequest>,
    ) -> Result<Response<Self::ListUsageStream>, Status> {
        let usage = admin::PodUsage {
            namespace: "default".to_owned(),
            name: "web-1".to_owned(),
            cpu_nanocores: 12_000_000,
            window_nanos: 9_996_000_000,
            ..Default::default()
        };
        let types = ["t3.nano", "c5.large"]
            .map(|name| admin::TypeUsage { instance_type: name.to_owned(), ..Default::default() });
        once(admin::ListUsageResponse {
            pods: vec![usage],
            types: types.to_vec(),
            ..Default::default()
        })
    }

    async fn list_backends(
        &self,
        _: Request<admin::ListBackendsRequest>,
    ) -> Result<Response<admin::ListBackendsResponse>, Status> {
        let backends = ["containerd", "milpa"]
            .map(|name| admin::Backend { name: name.to_owned(), ..Default::default() });
        Ok(Response::new(admin::ListBackendsResponse { backends: backends.to_vec() }))
    }

    async fn list_offerings(
        &self,
        request: Request<admin::ListOfferingsRequest>,
    ) -> Result<Response<Self::ListOfferingsStream>, Status> {
        self.0.offering_lists.fetch_add(1, Ordering::SeqCst);
        let wanted = request.into_inner().instance_type;
        let zones = ["us-east-1a", "us-east-1b"].map(|zone| admin::CatalogueOffering {
            offering: Some(admin::Offering { zone: zone.to_owned(), ..offering() }),
            ..Default::default()
        });
        let mut offerings = zones.to_vec();
        offerings.retain(|_| wanted.is_empty() || wanted == offering().instance_type);
        once(admin::ListOfferingsResponse { offerings })
    }

    async fn list_pools(
        &self,
        _: Request<admin::ListPoolsRequest>,
    ) -> Result<Response<admin::ListPoolsResponse>, Status> {
        let pools = ["small", "large"]
            .map(|name| admin::Pool { name: name.to_owned(), ..Default::default() });
        Ok(Response::new(admin::ListPoolsResponse { pools: pools.to_vec() }))
    }

    async fn plan(
        &self,
        request: Request<admin::PlanRequest>,
    ) -> Result<Response<admin::PlanResponse>, Status> {
        self.check()?;
        let text = request.into_inner().files.into_iter().map(|file| file.text);
        let text: String = text.collect();
        let refused = text.contains("bad");
        let mut facts = vec![format!("goes to milpa: {text}\u{1b}")];
        facts.extend(refused.then(|| "refused: no room".to_owned()));
        let pod = admin::PlannedPod { heading: "Pod default/web".to_owned(), facts, refused };
        Ok(Response::new(admin::PlanResponse { pods: vec![pod], notes: vec!["a Role".to_owned()] }))
    }

    async fn read_log(
        &self,
        request: Request<admin::ReadLogRequest>,
    ) -> Result<Response<Self::ReadLogStream>, Status> {
        self.check()?;
        *self.0.last_log.lock().unwrap() = Some(request.into_inner());
        once(admin::ReadLogResponse { stdout: "out\n".into(), stderr: "err\n".into() })
    }

    async fn exec(
        &self,
        request: Request<admin::ExecRequest>,
    ) -> Result<Response<admin::StreamingUrl>, Status> {
        self.check()?;
        let request = request.into_inner();
        *self.0.last_exec.lock().unwrap() = Some(request.clone());
        Ok(Response::new(admin::StreamingUrl { url: spdy_server::exec(request.command).await }))
    }

    async fn attach(
        &self,
        request: Request<admin::AttachRequest>,
    ) -> Result<Response<admin::StreamingUrl>, Status> {
        self.check()?;
        let request = request.into_inner();
        let played = if request.tty { "terminal" } else { "exit 7" };
        *self.0.last_attach.lock().unwrap() = Some(request);
        let words = played.split(' ').map(str::to_owned).collect();
        Ok(Response::new(admin::StreamingUrl { url: spdy_server::exec(words).await }))
    }

    async fn port_forward(
        &self,
        _: Request<admin::PortForwardRequest>,
    ) -> Result<Response<admin::StreamingUrl>, Status> {
        self.check()?;
        Ok(Response::new(admin::StreamingUrl { url: spdy_server::port_forward().await }))
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
        if self.0.behaviour.end_hangs {
            std::future::pending::<()>().await;
        }
        let ended = request.into_inner().cell;
        if self.0.behaviour.end_is_slow && ended == cell(0).id {
            return Err(Status::deadline_exceeded("EndCell takes longer"));
        }
        self.0.ended.lock().unwrap().push(ended);
        Ok(Response::new(admin::EndCellResponse {}))
    }

    async fn dump(
        &self,
        _: Request<admin::DumpRequest>,
    ) -> Result<Response<Self::DumpStream>, Status> {
        let part = |file: &str, content: &'static str| {
            Ok(admin::DumpResponse { file: file.to_owned(), content: content.into() })
        };
        let parts = [part("pods.txt", "first "), part("", "second"), part("log.txt", "lines")];
        let parts = stream::iter(parts);
        if self.0.behaviour.dump_hangs {
            return Ok(Response::new(parts.chain(stream::pending()).boxed()));
        }
        Ok(Response::new(parts.boxed()))
    }
}
