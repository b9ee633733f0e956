//! A played cell: an agent that is real as far as the link goes, and beneath it a containerd that
//! only remembers. Everything of the daemon's before it is real.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    convert::Infallible,
    sync::{Arc, Mutex},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use bytes::{BufMut, Bytes, BytesMut};
use futures::{
    StreamExt,
    stream::{self, BoxStream},
};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;
use kiyot_cell::uplink::{ConnectionInfo, UplinkHandle};
use kiyot_proto::{cell, cri};
use prost::Message;
use tokio::{sync::mpsc, time::interval};
use tokio_stream::wrappers::{IntervalStream, UnboundedReceiverStream};
use tonic::{Status, body::Body};

/// The image that every cell has.
pub const IMAGE: &str = "sha256:1111111111111111111111111111111111111111111111111111111111111111";
/// The reference by which every cell knows it.
pub const REFERENCE: &str =
    "busybox@sha256:2222222222222222222222222222222222222222222222222222222222222222";
/// Between two looks at whether a call is answered now.
const LOOK: Duration = Duration::from_millis(5);

/// An encoded answer.
pub type Answer = Result<Vec<u8>, Status>;

/// What one cell does otherwise than another.
#[derive(Debug, Clone, Default)]
pub struct Ways {
    /// What its ids begin with; the sandbox's ends with `5a`, those of containers with `c0`, `c1`
    /// and so on.
    pub ids: String,
    /// How often it tells what its containers use; `None` for never.
    pub heartbeat: Option<Duration>,
}

/// A cell that remembers what it was told. Clones are the same cell.
#[derive(Debug, Clone)]
pub struct PlayedCell(Arc<Mutex<State>>);

/// What a cell remembers, and what it does when it is asked.
#[derive(Debug)]
pub struct State {
    id: String,
    home: UplinkHandle,
    ways: Ways,
    watcher: Option<mpsc::UnboundedSender<cell::Event>>,
    /// It has ended by itself.
    pub crashed: bool,
    /// What it was told to be.
    pub bound: Option<cell::BindRequest>,
    /// Its sandbox, as it was asked for.
    pub sandbox: Option<cri::RunPodSandboxRequest>,
    /// The containers that were ever made, as they were asked for.
    pub created: Vec<cri::CreateContainerRequest>,
    /// Those that there are, by id.
    pub containers: BTreeMap<String, cri::ContainerStatus>,
    /// What is in each log, by its path beneath the pod's directory.
    logs: HashMap<String, Vec<u8>>,
    /// The id in the last request of each kind.
    pub asked: HashMap<&'static str, String>,
    /// The next answers that are lost: the work is done.
    pub lose: Vec<&'static str>,
    /// Calls that are answered without an end.
    pub endless: Vec<&'static str>,
    /// Those that were.
    pub answered_without_end: BTreeSet<String>,
    /// What is answered whatever is asked.
    pub lies: HashMap<&'static str, Answer>,
    /// The messages that answer a call whatever is asked, as many as there are.
    pub says: HashMap<&'static str, Vec<Vec<u8>>>,
    /// Calls that are not answered for as long as they are in it.
    pub silent: Vec<&'static str>,
    /// Those that have come and were not answered at once.
    pub kept_waiting: BTreeSet<String>,
    /// What each container uses of the processor, if it knows that.
    pub used: Option<u64>,
    /// For how long metrics are wanted of it, in seconds: once they are, it tells them for ever.
    pub measured: Option<u32>,
    /// What it tells then.
    pub metrics: Option<cell::Metrics>,
    /// What its containerd's handlers do, if it says so.
    pub handlers: Option<Vec<cri::RuntimeHandler>>,
    /// The time at which its clock stands, in nanoseconds since 1970; `None` for the true one.
    pub clock: Option<i64>,
    /// The user of its images.
    pub user: String,
}

impl PlayedCell {
    /// The cell of this id, whose agent is at home there.
    pub fn new(id: &str, home: UplinkHandle, ways: Ways) -> Self {
        Self(Arc::new(Mutex::new(State {
            id: id.to_owned(),
            home,
            ways,
            watcher: None,
            crashed: false,
            bound: None,
            sandbox: None,
            created: Vec::new(),
            containers: BTreeMap::new(),
            logs: HashMap::new(),
            asked: HashMap::new(),
            lose: Vec::new(),
            endless: Vec::new(),
            answered_without_end: BTreeSet::new(),
            lies: HashMap::new(),
            says: HashMap::new(),
            silent: Vec::new(),
            kept_waiting: BTreeSet::new(),
            used: None,
            measured: None,
            metrics: None,
            handlers: None,
            clock: None,
            user: String::new(),
        })))
    }

    /// Looks at, or changes, what it remembers.
    pub fn with<T>(&self, look: impl FnOnce(&mut State) -> T) -> T {
        look(&mut self.0.lock().unwrap())
    }

    /// A container writes to its log.
    pub fn write(&self, container: &str, text: &str) {
        self.with(|state| {
            let log = state.log_of(container);
            let content = state.logs.entry(log.clone()).or_default();
            content.extend_from_slice(text.as_bytes());
            let size = content.len() as u64;
            state.tell(cell::event::Event::Log(cell::LogGrown { path: log, size }));
        });
    }

    /// A container exits.
    pub fn exit(&self, container: &str, code: i32) {
        self.with(|state| state.exit(container, code));
    }

    /// What answers the calls that come by a connection.
    pub fn service(
        &self,
        info: ConnectionInfo,
    ) -> impl tower::Service<
        http::Request<Body>,
        Response = http::Response<Body>,
        Error = Infallible,
        Future: Send,
    >
    + Clone
    + Send
    + 'static
    + use<> {
        let own = self.clone();
        tower::service_fn(move |request: http::Request<Body>| {
            let (own, info) = (own.clone(), info.clone());
            async move {
                let path = request.uri().path().to_owned();
                let method = path.rsplit('/').next().unwrap_or_default();
                let body = request
                    .into_body()
                    .collect()
                    .await
                    .map(|body| body.to_bytes())
                    .unwrap_or_default();
                while own.with(|state| state.silent.contains(&method)) {
                    own.with(|state| state.kept_waiting.insert(method.to_owned()));
                    tokio::time::sleep(LOOK).await;
                }
                // What follows the first message is nothing that is remembered.
                Ok(own.answer(&info, method, first_message(&body)))
            }
        })
    }

    fn answer(&self, info: &ConnectionInfo, method: &str, message: &[u8]) -> http::Response<Body> {
        let mut state = self.0.lock().unwrap();
        match method {
            method if state.endless.contains(&method) => {
                state.answered_without_end.insert(method.to_owned());
                endless()
            }
            method if state.says.contains_key(method) => {
                streamed(stream::iter(state.says[method].clone()).boxed())
            }
            "Watch" => {
                let changes = state.watch();
                drop(state);
                streamed(self.with_heartbeat(changes).map(|event| event.encode_to_vec()).boxed())
            }
            "ReadLog" => {
                let request = cell::ReadLogRequest::decode(message).unwrap();
                let content = state.logs.get(&request.path).cloned().unwrap_or_default();
                let rest = content
                    .get(usize::try_from(request.position).unwrap()..)
                    .unwrap_or_default()
                    .to_vec();
                let part = cell::LogPart { content: rest.into(), gap: 0 }.encode_to_vec();
                streamed(stream::iter([part]).boxed())
            }
            method => match state.unary(info, method, message) {
                Ok(answer) => streamed(stream::iter([answer]).boxed()),
                Err(status) => status.into_http(),
            },
        }
    }

    /// Adds what its containers use, from time to time.
    fn with_heartbeat(
        &self,
        changes: UnboundedReceiverStream<cell::Event>,
    ) -> BoxStream<'static, cell::Event> {
        let Some(period) = self.with(|state| state.ways.heartbeat) else { return changes.boxed() };
        let own = self.clone();
        let beats =
            IntervalStream::new(interval(period)).map(move |_| own.with(|state| state.heartbeat()));
        stream::select(
            changes,
            beats.map(|beat| cell::Event { event: Some(cell::event::Event::Heartbeat(beat)) }),
        )
        .boxed()
    }
}

impl State {
    /// Tells the daemon, if it listens.
    pub fn tell(&mut self, event: cell::event::Event) {
        if let Some(watcher) = &self.watcher {
            let _ = watcher.send(cell::Event { event: Some(event) });
        }
    }

    /// Ends the stream of events: the daemon asks for another one.
    pub fn end_watch(&mut self) {
        self.watcher = None;
    }

    /// What is, and then what changes.
    fn watch(&mut self) -> UnboundedReceiverStream<cell::Event> {
        let (sender, receiver) = mpsc::unbounded_channel();
        self.watcher = Some(sender);
        let snapshot = self.snapshot();
        self.tell(cell::event::Event::Snapshot(snapshot));
        UnboundedReceiverStream::new(receiver)
    }

    fn snapshot(&self) -> cell::Snapshot {
        let sandbox = self
            .sandbox
            .as_ref()
            .map(|_| cri::PodSandboxStatus { id: self.sandbox_id(), ..Default::default() });
        let logs = self.logs.iter().map(|(path, content)| cell::LogGrown {
            path: path.clone(),
            size: content.len() as u64,
        });
        cell::Snapshot {
            sandboxes: sandbox.into_iter().collect(),
            containers: self.containers.values().cloned().collect(),
            logs: logs.collect(),
        }
    }

    fn heartbeat(&self) -> cell::Heartbeat {
        let of = |status: &cri::ContainerStatus| cri::ContainerStats {
            attributes: Some(cri::ContainerAttributes {
                id: status.id.clone(),
                metadata: status.metadata.clone(),
                ..Default::default()
            }),
            cpu: Some(cri::CpuUsage {
                timestamp: self.now(),
                usage_core_nano_seconds: Some(cri::UInt64Value { value: 1 << 40 }),
                ..Default::default()
            }),
            memory: Some(cri::MemoryUsage {
                timestamp: self.now(),
                working_set_bytes: Some(cri::UInt64Value { value: 1 << 30 }),
                ..Default::default()
            }),
            ..Default::default()
        };
        let attributes = cri::PodSandboxAttributes { id: self.sandbox_id(), ..Default::default() };
        let sandbox = self
            .sandbox
            .as_ref()
            .map(|_| cri::PodSandboxStats { attributes: Some(attributes), ..Default::default() });
        cell::Heartbeat {
            containers: self.containers.values().map(of).collect(),
            sandbox,
            metrics: self.metrics(),
            ..Default::default()
        }
    }

    /// As many metrics of each container as a containerd of today has, unless others were set, when
    /// they are wanted.
    fn metrics(&self) -> Option<cell::Metrics> {
        self.measured?;
        if self.metrics.is_some() {
            return self.metrics.clone();
        }
        let of = |id: &String| {
            let samples = (0..50).map(|n| cell::Sample {
                name: format!("container_played_{n:02}_bytes"),
                value: n << 20,
                labels: Vec::new(),
            });
            cell::ContainerSamples {
                container: id.clone(),
                timestamp: self.now(),
                samples: samples.collect(),
            }
        };
        Some(cell::Metrics {
            containers: self.containers.keys().map(of).collect(),
            ..Default::default()
        })
    }

    /// Returns the time by the cell's clock, in nanoseconds.
    fn now(&self) -> i64 {
        self.clock.unwrap_or_else(|| {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
            i64::try_from(now.as_nanos()).unwrap()
        })
    }

    fn sandbox_id(&self) -> String {
        format!("{}5a", self.ways.ids)
    }

    fn log_of(&self, container: &str) -> String {
        let n: usize =
            container.strip_prefix(&format!("{}c", self.ways.ids)).unwrap().parse().unwrap();
        format!("logs/{}", self.created[n].config.as_ref().unwrap().log_path)
    }

    fn container(&mut self, id: &str) -> Result<&mut cri::ContainerStatus, Status> {
        self.containers.get_mut(id).ok_or_else(|| Status::not_found(format!("no container {id}")))
    }

    fn exit(&mut self, id: &str, exit_code: i32) {
        let now = self.now();
        let status = self.container(id).unwrap();
        status.set_state(cri::ContainerState::ContainerExited);
        (status.finished_at, status.exit_code, status.reason) =
            (now, exit_code, "Error".to_owned());
        let status = status.clone();
        self.tell(cell::event::Event::Container(status));
    }

    fn unary(&mut self, info: &ConnectionInfo, method: &str, message: &[u8]) -> Answer {
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

    fn act(&mut self, info: &ConnectionInfo, method: &str, message: &[u8]) -> Answer {
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
            "Measure" => {
                self.measured = Some(cell::MeasureRequest::decode(message).unwrap().seconds);
                let usage = self.ways.heartbeat.map(|_| self.heartbeat()).unwrap_or_default();
                self.tell(cell::event::Event::Heartbeat(cell::Heartbeat {
                    metrics: self.metrics(),
                    ..usage
                }));
                encoded(cell::MeasureReply {})
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
                encoded(cri::RunPodSandboxResponse { pod_sandbox_id: self.sandbox_id() })
            }
            "ImageStatus" => {
                let image = cri::Image {
                    id: IMAGE.to_owned(),
                    repo_tags: vec!["busybox:latest".to_owned()],
                    size: 1,
                    username: self.user.clone(),
                    ..Default::default()
                };
                encoded(cri::ImageStatusResponse { image: Some(image), ..Default::default() })
            }
            "CreateContainer" => {
                let request = cri::CreateContainerRequest::decode(message).unwrap();
                let metadata = request.config.as_ref().unwrap().metadata.clone();
                if self.containers.values().any(|one| one.metadata == metadata) {
                    return Err(Status::unknown(
                        "failed to reserve container name: name is reserved",
                    ));
                }
                let id = format!("{}c{}", self.ways.ids, self.created.len());
                self.created.push(request);
                let status = cri::ContainerStatus {
                    id: id.clone(),
                    metadata,
                    image_ref: REFERENCE.to_owned(),
                    ..Default::default()
                };
                self.containers.insert(id.clone(), status);
                encoded(cri::CreateContainerResponse { container_id: id })
            }
            "StartContainer" => {
                let id = cri::StartContainerRequest::decode(message).unwrap().container_id;
                let now = self.now();
                let status = self.container(&id)?;
                status.set_state(cri::ContainerState::ContainerRunning);
                status.started_at = now;
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
                self.containers
                    .remove(&id)
                    .ok_or_else(|| Status::not_found("no such container"))?;
                encoded(cri::RemoveContainerResponse {})
            }
            "ContainerStatus" => {
                let id = cri::ContainerStatusRequest::decode(message).unwrap().container_id;
                let status = Some(self.container(&id)?.clone());
                encoded(cri::ContainerStatusResponse { status, ..Default::default() })
            }
            "ContainerStats" => {
                let value = self.used.ok_or_else(|| Status::unimplemented("no statistics"))?;
                let cpu = cri::CpuUsage {
                    timestamp: self.now(),
                    usage_core_nano_seconds: Some(cri::UInt64Value { value }),
                    ..Default::default()
                };
                encoded(cri::ContainerStatsResponse {
                    stats: Some(cri::ContainerStats { cpu: Some(cpu), ..Default::default() }),
                })
            }
            "Status" => {
                let runtime_handlers =
                    self.handlers.clone().ok_or_else(|| Status::unimplemented("no status"))?;
                encoded(cri::StatusResponse { runtime_handlers, ..Default::default() })
            }
            "UpdateContainerResources" => encoded(cri::UpdateContainerResourcesResponse {}),
            "ListContainers" => {
                let of = |status: &cri::ContainerStatus| cri::Container {
                    id: status.id.clone(),
                    metadata: status.metadata.clone(),
                    ..Default::default()
                };
                encoded(cri::ListContainersResponse {
                    containers: self.containers.values().map(of).collect(),
                })
            }
            "ExecSync" => {
                let request = cri::ExecSyncRequest::decode(message).unwrap();
                self.asked.insert("ExecSync", request.container_id.clone());
                if request.cmd == ["fail"] {
                    return Err(Status::deadline_exceeded(format!(
                        "container {} is slow",
                        request.container_id
                    )));
                }
                encoded(cri::ExecSyncResponse { stdout: b"done".to_vec(), ..Default::default() })
            }
            other => Err(Status::unimplemented(format!("the played cell has no {other}"))),
        }
    }
}

fn encoded(message: impl Message) -> Answer {
    Ok(message.encode_to_vec())
}

/// The first message of a body, without its frame's head.
fn first_message(body: &[u8]) -> &[u8] {
    let Some((head, rest)) = body.split_first_chunk::<5>() else { return &[] };
    &rest[..u32::from_be_bytes([head[1], head[2], head[3], head[4]]) as usize]
}

/// The begin of one message, larger than any may be, and then its bytes for ever.
fn endless() -> http::Response<Body> {
    let head = Bytes::from_static(&[0, 0xff, 0xff, 0xff, 0xff]);
    let frames = stream::iter([head]).chain(stream::repeat(Bytes::from_static(&[b'x'; 16 << 10])));
    let body = StreamBody::new(frames.map(|part| Ok::<_, Status>(Frame::data(part))));
    http::Response::builder()
        .header("content-type", "application/grpc")
        .body(Body::new(body))
        .unwrap()
}

/// Messages, and OK behind them.
fn streamed(messages: BoxStream<'static, Vec<u8>>) -> http::Response<Body> {
    let frames = messages.map(|message| {
        let mut frame = BytesMut::with_capacity(5 + message.len());
        frame.put_u8(0);
        frame.put_u32(u32::try_from(message.len()).unwrap());
        frame.put_slice(&message);
        Frame::data(frame.freeze())
    });
    let trailers = http::HeaderMap::from_iter([(
        http::HeaderName::from_static("grpc-status"),
        http::HeaderValue::from_static("0"),
    )]);
    let frames = frames.chain(stream::iter([Frame::trailers(trailers)])).map(Ok::<_, Infallible>);
    http::Response::builder()
        .header("content-type", "application/grpc")
        .body(Body::new(StreamBody::new(frames)))
        .unwrap()
}
