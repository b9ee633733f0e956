//! A provider whose cells are tasks, and a containerd in each that only remembers: everything between the verbs and the cell's containerd is real.

use std::{
    collections::{BTreeMap, HashMap},
    convert::Infallible,
    net::IpAddr,
    path::PathBuf,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use bytes::{BufMut, Bytes, BytesMut};
use futures::{StreamExt, stream};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;
use kiyot::backends::milpa::{
    id::CellId,
    providers::{Attachment, Instance, InstanceId, Isolation, LaunchSpec, Provider, ProviderError},
};
use kiyot_cell::home::{ConnectionInfo, Home, HomeHandle};
use kiyot_proto::{cell, cri};
use prost::Message;
use tokio::{sync::mpsc, task::JoinHandle};
use tokio_util::sync::CancellationToken;
use tonic::{Status, body::Body};

/// The image that every cell has.
pub(crate) const IMAGE: &str = "sha256:1111111111111111111111111111111111111111111111111111111111111111";

/// A provider of played cells.
#[derive(Debug)]
pub(crate) struct Played {
    dir: PathBuf,
    cells: Mutex<HashMap<CellId, Running>>,
    launched: Mutex<Vec<CellId>>,
    /// A launch waits for one of these.
    pub(crate) gate: tokio::sync::Semaphore,
    /// The same for an end.
    pub(crate) way_out: tokio::sync::Semaphore,
    most: AtomicUsize,
    /// How many ends have been asked for.
    pub(crate) asked_to_end: AtomicUsize,
    /// What the containerd of cells that are launched from now on does, if it says so.
    pub(crate) handlers: Mutex<Option<Vec<cri::RuntimeHandler>>>,
}

#[derive(Debug)]
struct Running {
    cell: PlayedCell,
    end: CancellationToken,
    task: JoinHandle<()>,
}

impl Played {
    pub(crate) fn new(dir: PathBuf) -> Arc<Self> {
        let open = || tokio::sync::Semaphore::new(tokio::sync::Semaphore::MAX_PERMITS);
        let (gate, way_out, most, asked_to_end) = (open(), open(), AtomicUsize::new(0), AtomicUsize::new(0));
        Arc::new(Self { dir, cells: Mutex::default(), launched: Mutex::default(), gate, way_out, most, asked_to_end, handlers: Mutex::default() })
    }

    /// The only cell that runs.
    pub(crate) fn only(&self) -> PlayedCell {
        let cells = self.cells.lock().unwrap();
        assert_eq!(cells.len(), 1, "cells that run");
        cells.values().next().unwrap().cell.clone()
    }

    /// The cell that was launched after so many.
    pub(crate) fn nth(&self, n: usize) -> PlayedCell {
        let id = self.launched.lock().unwrap()[n].clone();
        self.cells.lock().unwrap()[&id].cell.clone()
    }

    /// How many run.
    pub(crate) fn running(&self) -> usize {
        self.cells.lock().unwrap().len()
    }

    /// How many ever ran at a time.
    pub(crate) fn most(&self) -> usize {
        self.most.load(Ordering::SeqCst)
    }

    /// How many were ever launched.
    pub(crate) fn launched(&self) -> usize {
        self.launched.lock().unwrap().len()
    }

    /// The agents of all cells end, and the cells live on.
    pub(crate) fn silence(&self) {
        self.cells.lock().unwrap().values().for_each(|running| running.end.cancel());
    }

    /// The only cell ends by itself.
    pub(crate) fn crash(&self) {
        for running in self.cells.lock().unwrap().values() {
            running.end.cancel();
            running.cell.0.lock().unwrap().crashed = true;
        }
    }
}

#[async_trait]
impl Provider for Played {
    fn isolation(&self) -> Isolation {
        Isolation { provider: "played", privileges: true, users: true }
    }

    async fn launch(&self, spec: &LaunchSpec, _: &str) -> Result<Instance, ProviderError> {
        self.gate.acquire().await.unwrap().forget();
        let id = InstanceId(spec.cell.as_str().to_owned());
        let private = self.dir.join(spec.cell.as_str());
        let home = Home::new(spec.bootstrap.clone(), &private, "played").unwrap();
        let cell = PlayedCell::new(spec.cell.as_str(), home.handle());
        cell.with(|state| state.handlers = self.handlers.lock().unwrap().clone());
        let (end, own) = (CancellationToken::new(), cell.clone());
        let stop = end.clone();
        let task = tokio::spawn(async move {
            home.run(|info| own.service(info), stop).await;
        });
        self.launched.lock().unwrap().push(spec.cell.clone());
        let mut cells = self.cells.lock().unwrap();
        cells.insert(spec.cell.clone(), Running { cell, end, task });
        self.most.fetch_max(cells.len(), Ordering::SeqCst);
        Ok(Instance { id, cell: spec.cell.clone(), running: true })
    }

    async fn attach(&self, _: &InstanceId, _: &Attachment) -> Result<Vec<IpAddr>, ProviderError> {
        Ok(vec!["10.200.0.2".parse().unwrap()])
    }

    async fn list_owned(&self) -> Result<Vec<Instance>, ProviderError> {
        let cells = self.cells.lock().unwrap();
        let of = |(id, running): (&CellId, &Running)| {
            let crashed = running.cell.0.lock().unwrap().crashed;
            Instance { id: InstanceId(id.as_str().to_owned()), cell: id.clone(), running: !crashed }
        };
        Ok(cells.iter().map(of).collect())
    }

    async fn terminate(&self, instances: &[InstanceId]) -> Result<(), ProviderError> {
        self.asked_to_end.fetch_add(1, Ordering::SeqCst);
        self.way_out.acquire().await.unwrap().forget();
        for instance in instances {
            let running = self.cells.lock().unwrap().remove(&CellId::parse(&instance.0).unwrap());
            if let Some(Running { end, task, .. }) = running {
                end.cancel();
                task.await.unwrap();
            }
        }
        Ok(())
    }

    async fn console(&self, _: &InstanceId) -> Result<String, ProviderError> {
        Ok(String::new())
    }

    async fn check(&self) -> Result<(), ProviderError> {
        Ok(())
    }
}

/// A cell that remembers what it was told.
#[derive(Debug, Clone)]
pub(crate) struct PlayedCell(Arc<Mutex<State>>);

#[derive(Debug)]
pub(crate) struct State {
    id: String,
    home: HomeHandle,
    crashed: bool,
    watcher: Option<mpsc::UnboundedSender<cell::Event>>,
    pub(crate) bound: Option<cell::BindRequest>,
    pub(crate) sandbox: Option<cri::RunPodSandboxRequest>,
    pub(crate) created: Vec<cri::CreateContainerRequest>,
    pub(crate) containers: BTreeMap<String, cri::ContainerStatus>,
    /// What is in each log, by its path beneath the pod's directory.
    logs: HashMap<String, Vec<u8>>,
    /// The id in the last request of each kind.
    pub(crate) asked: HashMap<&'static str, String>,
    /// The next answers that are lost: the work is done.
    pub(crate) lose: Vec<&'static str>,
    /// Calls that are answered without an end.
    pub(crate) endless: Vec<&'static str>,
    /// What is answered whatever is asked.
    pub(crate) lies: HashMap<&'static str, Answer>,
    /// Calls that are not answered for as long as they are in it.
    pub(crate) silent: Vec<&'static str>,
    /// What each container uses of the processor, if it knows that.
    pub(crate) used: Option<u64>,
    handlers: Option<Vec<cri::RuntimeHandler>>,
}

pub(crate) type Answer = Result<Vec<u8>, Status>;

impl PlayedCell {
    fn new(id: &str, home: HomeHandle) -> Self {
        Self(Arc::new(Mutex::new(State {
            id: id.to_owned(),
            home,
            crashed: false,
            watcher: None,
            bound: None,
            sandbox: None,
            created: Vec::new(),
            containers: BTreeMap::new(),
            logs: HashMap::new(),
            asked: HashMap::new(),
            lose: Vec::new(),
            endless: Vec::new(),
            lies: HashMap::new(),
            silent: Vec::new(),
            used: None,
            handlers: None,
        })))
    }

    /// Looks at, or changes, what it remembers.
    pub(crate) fn with<T>(&self, look: impl FnOnce(&mut State) -> T) -> T {
        look(&mut self.0.lock().unwrap())
    }

    /// A container writes to its log.
    pub(crate) fn write(&self, container: &str, text: &str) {
        self.with(|state| {
            let log = state.log_of(container);
            let content = state.logs.entry(log.clone()).or_default();
            content.extend_from_slice(text.as_bytes());
            let size = content.len() as u64;
            state.tell(cell::event::Event::Log(cell::LogGrown { path: log, size }));
        });
    }

    /// A container exits.
    pub(crate) fn exit(&self, container: &str, code: i32) {
        self.with(|state| state.exit(container, code));
    }

    fn service(
        &self,
        info: ConnectionInfo,
    ) -> impl tower::Service<http::Request<Body>, Response = http::Response<Body>, Error = Infallible, Future: Send> + Clone + Send + 'static {
        let own = self.clone();
        tower::service_fn(move |request: http::Request<Body>| {
            let (own, info) = (own.clone(), info.clone());
            async move {
                let path = request.uri().path().to_owned();
                let body = request.into_body().collect().await.map(|body| body.to_bytes()).unwrap_or_default();
                while own.with(|state| state.silent.iter().any(|method| path.ends_with(&format!("/{method}")))) {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
                Ok(own.answer(&info, &path, unframed(&body)))
            }
        })
    }

    fn answer(&self, info: &ConnectionInfo, path: &str, messages: Vec<Bytes>) -> http::Response<Body> {
        let message = messages.into_iter().next().unwrap_or_default();
        let mut state = self.0.lock().unwrap();
        match path.rsplit('/').next().unwrap() {
            method if state.endless.contains(&method) => endless(),
            "Watch" => {
                let (sender, receiver) = mpsc::unbounded_channel();
                state.watcher = Some(sender);
                let snapshot = state.snapshot();
                state.tell(cell::event::Event::Snapshot(snapshot));
                let frames = tokio_stream::wrappers::UnboundedReceiverStream::new(receiver);
                streamed(frames.map(|event| event.encode_to_vec()).boxed())
            }
            "ReadLog" => {
                let request = cell::ReadLogRequest::decode(message).unwrap();
                let content = state.logs.get(&request.path).cloned().unwrap_or_default();
                let rest = content.get(usize::try_from(request.position).unwrap()..).unwrap_or_default().to_vec();
                let part = cell::LogPart { content: rest.into(), gap: 0 }.encode_to_vec();
                streamed(stream::iter([part]).boxed())
            }
            method => match state.unary(info, method, message) {
                Ok(answer) => streamed(stream::iter([answer]).boxed()),
                Err(status) => status.into_http(),
            },
        }
    }
}

impl State {
    pub(crate) fn tell(&mut self, event: cell::event::Event) {
        if let Some(watcher) = &self.watcher {
            let _ = watcher.send(cell::Event { event: Some(event) });
        }
    }

    fn snapshot(&self) -> cell::Snapshot {
        let sandbox = self.sandbox.as_ref().map(|_| cri::PodSandboxStatus { id: "5a".to_owned(), ..Default::default() });
        let logs = self.logs.iter().map(|(path, content)| cell::LogGrown { path: path.clone(), size: content.len() as u64 });
        cell::Snapshot { sandboxes: sandbox.into_iter().collect(), containers: self.containers.values().cloned().collect(), logs: logs.collect() }
    }

    fn log_of(&self, container: &str) -> String {
        let n: usize = container.trim_start_matches('c').parse().unwrap();
        format!("logs/{}", self.created[n].config.as_ref().unwrap().log_path)
    }

    fn container(&mut self, id: &str) -> Result<&mut cri::ContainerStatus, Status> {
        self.containers.get_mut(id).ok_or_else(|| Status::not_found(format!("no container {id}")))
    }

    fn exit(&mut self, id: &str, exit_code: i32) {
        let status = self.container(id).unwrap();
        status.set_state(cri::ContainerState::ContainerExited);
        (status.finished_at, status.exit_code, status.reason) = (200, exit_code, "Error".to_owned());
        let status = status.clone();
        self.tell(cell::event::Event::Container(status));
    }

    fn unary(&mut self, info: &ConnectionInfo, method: &str, message: Bytes) -> Answer {
        if let Some(lie) = self.lies.get(method) {
            return lie.clone();
        }
        let answer = self.act(info, method, message);
        if let Some(n) = self.lose.iter().position(|lost| *lost == method) {
            self.lose.remove(n);
            return Err(Status::unavailable("the answer was lost"));
        }
        answer
    }

    fn act(&mut self, info: &ConnectionInfo, method: &str, message: Bytes) -> Answer {
        match method {
            "Hello" => encoded(cell::HelloReply {
                cell: self.id.clone(),
                build_id: "played".to_owned(),
                kind: info.kind.into(),
                generation: info.generation,
                incarnation: info.incarnation.to_string(),
                pod_dir: "/cell/pod".to_owned(),
                memory_dir: "/cell/memory".to_owned(),
                own_host_name: true,
                own_network: true,
            }),
            "OpenBulk" => {
                self.home.open_bulk();
                encoded(cell::OpenBulkReply {})
            }
            "Bind" => {
                self.bound = Some(cell::BindRequest::decode(message).unwrap());
                encoded(cell::BindReply {})
            }
            "ChangeFiles" => encoded(cell::ChangeFilesReply {}),
            "GetFile" => encoded(cell::GetFileReply::default()),
            "TrimLog" => encoded(cell::TrimLogReply {}),
            "RunPodSandbox" => {
                self.sandbox = Some(cri::RunPodSandboxRequest::decode(message).unwrap());
                encoded(cri::RunPodSandboxResponse { pod_sandbox_id: "5a".to_owned() })
            }
            "ImageStatus" => {
                let image = cri::Image { id: IMAGE.to_owned(), repo_tags: vec!["busybox:latest".to_owned()], size: 1, ..Default::default() };
                encoded(cri::ImageStatusResponse { image: Some(image), ..Default::default() })
            }
            "CreateContainer" => {
                let request = cri::CreateContainerRequest::decode(message).unwrap();
                let metadata = request.config.as_ref().unwrap().metadata.clone();
                if self.containers.values().any(|one| one.metadata == metadata) {
                    return Err(Status::unknown("failed to reserve container name: name is reserved"));
                }
                let id = format!("c{}", self.created.len());
                self.created.push(request);
                let status = cri::ContainerStatus { id: id.clone(), metadata, image_ref: "busybox@sha256:2".to_owned(), ..Default::default() };
                self.containers.insert(id.clone(), status);
                encoded(cri::CreateContainerResponse { container_id: id })
            }
            "StartContainer" => {
                let id = cri::StartContainerRequest::decode(message).unwrap().container_id;
                let status = self.container(&id)?;
                status.set_state(cri::ContainerState::ContainerRunning);
                status.started_at = 100;
                let status = status.clone();
                self.tell(cell::event::Event::Container(status));
                encoded(cri::StartContainerResponse {})
            }
            "StopContainer" => {
                let id = cri::StopContainerRequest::decode(message).unwrap().container_id;
                self.container(&id)?;
                self.exit(&id, 143);
                encoded(cri::StopContainerResponse {})
            }
            "RemoveContainer" => {
                let id = cri::RemoveContainerRequest::decode(message).unwrap().container_id;
                self.containers.remove(&id).ok_or_else(|| Status::not_found("no such container"))?;
                encoded(cri::RemoveContainerResponse {})
            }
            "ContainerStatus" => {
                let id = cri::ContainerStatusRequest::decode(message).unwrap().container_id;
                let status = Some(self.container(&id)?.clone());
                encoded(cri::ContainerStatusResponse { status, ..Default::default() })
            }
            "ContainerStats" => {
                let value = self.used.ok_or_else(|| Status::unimplemented("no statistics"))?;
                let cpu = cri::CpuUsage { timestamp: 101, usage_core_nano_seconds: Some(cri::UInt64Value { value }), ..Default::default() };
                encoded(cri::ContainerStatsResponse { stats: Some(cri::ContainerStats { cpu: Some(cpu), ..Default::default() }) })
            }
            "Status" => {
                let runtime_handlers = self.handlers.clone().ok_or_else(|| Status::unimplemented("no status"))?;
                encoded(cri::StatusResponse { runtime_handlers, ..Default::default() })
            }
            "UpdateContainerResources" => encoded(cri::UpdateContainerResourcesResponse {}),
            "ListContainers" => {
                let of =
                    |status: &cri::ContainerStatus| cri::Container { id: status.id.clone(), metadata: status.metadata.clone(), ..Default::default() };
                encoded(cri::ListContainersResponse { containers: self.containers.values().map(of).collect() })
            }
            "ExecSync" => {
                let request = cri::ExecSyncRequest::decode(message).unwrap();
                self.asked.insert("ExecSync", request.container_id.clone());
                if request.cmd == ["fail"] {
                    return Err(Status::deadline_exceeded(format!("container {} is slow", request.container_id)));
                }
                encoded(cri::ExecSyncResponse { stdout: b"done".to_vec(), ..Default::default() })
            }
            other => Err(Status::unimplemented(format!("the played cell has no {other}"))),
        }
    }
}

/// The begin of one message, larger than any may be, and then its bytes for ever.
fn endless() -> http::Response<Body> {
    let head = Bytes::from_static(&[0, 0xff, 0xff, 0xff, 0xff]);
    let frames = stream::iter([head]).chain(stream::repeat(Bytes::from_static(&[b'x'; 16 << 10])));
    let body = StreamBody::new(frames.map(|part| Ok::<_, Status>(Frame::data(part))));
    http::Response::builder().header("content-type", "application/grpc").body(Body::new(body)).unwrap()
}

fn encoded(message: impl Message) -> Answer {
    Ok(message.encode_to_vec())
}

fn unframed(body: &[u8]) -> Vec<Bytes> {
    let (mut rest, mut messages) = (body, Vec::new());
    while let Some((head, after)) = rest.split_first_chunk::<5>() {
        let length = u32::from_be_bytes([head[1], head[2], head[3], head[4]]) as usize;
        messages.push(Bytes::copy_from_slice(&after[..length]));
        rest = &after[length..];
    }
    messages
}

fn streamed(messages: stream::BoxStream<'static, Vec<u8>>) -> http::Response<Body> {
    let frames = messages.map(|message| {
        let mut frame = BytesMut::with_capacity(5 + message.len());
        frame.put_u8(0);
        frame.put_u32(u32::try_from(message.len()).unwrap());
        frame.put_slice(&message);
        Frame::data(frame.freeze())
    });
    let trailers = http::HeaderMap::from_iter([(http::HeaderName::from_static("grpc-status"), http::HeaderValue::from_static("0"))]);
    let frames = frames.chain(stream::iter([Frame::trailers(trailers)])).map(Ok::<_, Infallible>);
    http::Response::builder().header("content-type", "application/grpc").body(Body::new(StreamBody::new(frames))).unwrap()
}
