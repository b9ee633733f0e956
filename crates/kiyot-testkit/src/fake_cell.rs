//! A fake cell: a real link to an agent and a containerd that only record requests and return
//! configured answers. Everything on the daemon's side of the link is real.

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
use tokio::{
    sync::{Notify, mpsc},
    time::interval,
};
use tokio_stream::wrappers::{IntervalStream, UnboundedReceiverStream};
use tonic::{Status, body::Body};

/// Id of the image in each fake cell.
pub const IMAGE: &str = "sha256:1111111111111111111111111111111111111111111111111111111111111111";
/// Reference of [`IMAGE`] in a container's status.
pub const REFERENCE: &str =
    "busybox@sha256:2222222222222222222222222222222222222222222222222222222222222222";
/// An encoded response, or an error.
pub type Answer = Result<Vec<u8>, Status>;

/// Options of a fake cell.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Prefix of ids; the sandbox's id ends with `5a`, the containers' ids with `c0`, `c1`...
    pub ids: String,
    /// Period of its heartbeats; `None` disables them.
    pub heartbeat: Option<Duration>,
}

/// A cell that records its requests. Clones refer to the same cell.
#[derive(Debug, Clone)]
pub struct FakeCell(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    state: Mutex<State>,
    /// Wakes calls that wait for an answer to their method.
    changed: Notify,
}

/// Recorded requests and configured behaviour of a fake cell. Names of calls are their methods.
#[derive(Debug)]
pub struct State {
    id: String,
    home: UplinkHandle,
    options: Options,
    watcher: Option<mpsc::UnboundedSender<cell::Event>>,
    /// The snapshot of the next watch, as if from an old list; `None` for the current state.
    pub old_snapshot: Option<cell::Snapshot>,
    /// Set after a crash of the cell.
    pub crashed: bool,
    /// The request that bound the cell to its pod.
    pub bound: Option<cell::BindRequest>,
    /// The request that created the cell's sandbox.
    pub sandbox: Option<cri::RunPodSandboxRequest>,
    /// Requests of all containers that were created.
    pub created: Vec<cri::CreateContainerRequest>,
    /// The last update of a container's resources.
    pub updated: Option<cri::UpdateContainerResourcesRequest>,
    /// Existing containers by id.
    pub containers: BTreeMap<String, cri::ContainerStatus>,
    /// Contents of logs by their path beneath the pod's directory.
    logs: HashMap<String, Vec<u8>>,
    /// The container id in the last request of a call.
    pub container_ids: HashMap<&'static str, String>,
    /// Calls whose next response is lost, although the call takes effect.
    pub lost_responses: Vec<&'static str>,
    /// Calls whose response does not end.
    pub endless_responses: Vec<&'static str>,
    /// Calls that got an endless response.
    pub endless_calls: BTreeSet<String>,
    /// Fixed responses of unary calls, by method.
    pub fixed_responses: HashMap<&'static str, Answer>,
    /// Fixed messages of responses, any number for each method.
    pub fixed_messages: HashMap<&'static str, Vec<Vec<u8>>>,
    /// Calls that wait while they are listed here.
    pub unanswered: Vec<&'static str>,
    /// Calls that have waited.
    pub waiting_calls: BTreeSet<String>,
    /// Processor time of each container, in nanoseconds; `None`: no statistics.
    pub cpu_nanos: Option<u64>,
    /// The last metrics subscription, in seconds. The fake cell never lets it expire.
    pub subscription_secs: Option<u32>,
    /// Metrics to report; `None`: generated samples.
    pub metrics: Option<cell::Metrics>,
    /// Handlers in Status; `None`: no Status.
    pub handlers: Option<Vec<cri::RuntimeHandler>>,
    /// Fixed time of the cell's clock, in nanoseconds since 1970; `None` for the machine's clock.
    pub clock: Option<i64>,
    /// The user in its images.
    pub user: String,
}

impl FakeCell {
    /// Creates the cell with this id. `home` connects its agent.
    pub fn new(id: &str, home: UplinkHandle, options: Options) -> Self {
        let state = State {
            id: id.to_owned(),
            home,
            options,
            watcher: None,
            old_snapshot: None,
            crashed: false,
            bound: None,
            sandbox: None,
            created: Vec::new(),
            updated: None,
            containers: BTreeMap::new(),
            logs: HashMap::new(),
            container_ids: HashMap::new(),
            lost_responses: Vec::new(),
            endless_responses: Vec::new(),
            endless_calls: BTreeSet::new(),
            fixed_responses: HashMap::new(),
            fixed_messages: HashMap::new(),
            unanswered: Vec::new(),
            waiting_calls: BTreeSet::new(),
            cpu_nanos: None,
            subscription_secs: None,
            metrics: None,
            handlers: None,
            clock: None,
            user: String::new(),
        };
        Self(Arc::new(Inner { state: Mutex::new(state), changed: Notify::new() }))
    }

    /// Reads or changes the state, and wakes waiting calls.
    pub fn with<T>(&self, access: impl FnOnce(&mut State) -> T) -> T {
        let result = access(&mut self.0.state.lock().unwrap());
        self.0.changed.notify_waiters();
        result
    }

    /// Waits while a call is listed in [`State::unanswered`].
    async fn until_answered(&self, method: &str) {
        loop {
            let changed = self.0.changed.notified();
            {
                // `with` would wake the other waiting calls.
                let mut state = self.0.state.lock().unwrap();
                if !state.unanswered.contains(&method) {
                    return;
                }
                state.waiting_calls.insert(method.to_owned());
            }
            changed.await;
        }
    }

    /// Appends text to a container's log.
    pub fn write(&self, container: &str, text: &str) {
        self.with(|state| {
            let log = state.log_of(container);
            let content = state.logs.entry(log.clone()).or_default();
            content.extend_from_slice(text.as_bytes());
            let size = content.len() as u64;
            state.tell(cell::event::Event::Log(cell::LogGrown { path: log, size }));
        });
    }

    /// Ends a container.
    pub fn exit(&self, container: &str, code: i32) {
        self.with(|state| state.exit(container, code));
    }

    /// Returns the service that answers the calls on a connection.
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
                own.until_answered(method).await;
                // Only the first message is recorded.
                Ok(own.answer(&info, method, first_message(&body)))
            }
        })
    }

    fn answer(&self, info: &ConnectionInfo, method: &str, message: &[u8]) -> http::Response<Body> {
        let mut state = self.0.state.lock().unwrap();
        match method {
            method if state.endless_responses.contains(&method) => {
                state.endless_calls.insert(method.to_owned());
                endless()
            }
            method if state.fixed_messages.contains_key(method) => {
                streamed(stream::iter(state.fixed_messages[method].clone()).boxed())
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
                let part = (!rest.is_empty())
                    .then(|| cell::LogPart { content: rest.into(), gap: 0 }.encode_to_vec());
                streamed(stream::iter(part).boxed())
            }
            method => match state.unary(info, method, message) {
                Ok(answer) => streamed(stream::iter([answer]).boxed()),
                Err(status) => status.into_http(),
            },
        }
    }

    /// Merges periodic heartbeats into the events.
    fn with_heartbeat(
        &self,
        changes: UnboundedReceiverStream<cell::Event>,
    ) -> BoxStream<'static, cell::Event> {
        let Some(period) = self.with(|state| state.options.heartbeat) else {
            return changes.boxed();
        };
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
    /// Sends an event to the daemon if it watches.
    pub fn tell(&mut self, event: cell::event::Event) {
        if let Some(watcher) = &self.watcher {
            let _ = watcher.send(cell::Event { event: Some(event) });
        }
    }

    /// Ends the event stream, so that the daemon opens a new stream.
    pub fn end_watch(&mut self) {
        self.watcher = None;
    }

    /// Begins an event stream: a snapshot, then changes.
    fn watch(&mut self) -> UnboundedReceiverStream<cell::Event> {
        let (sender, receiver) = mpsc::unbounded_channel();
        self.watcher = Some(sender);
        let snapshot = self.old_snapshot.take().unwrap_or_else(|| self.snapshot());
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

    /// Returns metrics while they are subscribed: [`Self::metrics`], or as many samples for each
    /// container as containerd 2 has.
    fn metrics(&self) -> Option<cell::Metrics> {
        self.subscription_secs?;
        if self.metrics.is_some() {
            return self.metrics.clone();
        }
        let of = |id: &String| {
            let samples = (0..50).map(|n| cell::Sample {
                name: format!("container_fake_{n:02}_bytes"),
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

    /// Returns the time of the cell's clock, in nanoseconds.
    fn now(&self) -> i64 {
        self.clock.unwrap_or_else(|| {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
            i64::try_from(now.as_nanos()).unwrap()
        })
    }

    fn sandbox_id(&self) -> String {
        format!("{}5a", self.options.ids)
    }

    fn log_of(&self, container: &str) -> String {
        let n: usize =
            container.strip_prefix(&format!("{}c", self.options.ids)).unwrap().parse().unwrap();
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

    /// Handles a unary call: returns a fixed response, or applies the call and may lose its
    /// response.
    fn unary(&mut self, info: &ConnectionInfo, method: &str, message: &[u8]) -> Answer {
        if let Some(fixed) = self.fixed_responses.get(method) {
            return fixed.clone();
        }
        let answer = self.apply(info, method, message);
        if let Some(n) = self.lost_responses.iter().position(|lost| *lost == method) {
            self.lost_responses.remove(n);
            return Err(Status::unavailable("the response was lost"));
        }
        answer
    }

    /// Applies a call to the state.
    fn apply(&mut self, info: &ConnectionInfo, method: &str, message: &[u8]) -> Answer {
        match method {
            "Hello" => encoded(cell::HelloReply {
                cell: self.id.clone(),
                build_id: "fake".to_owned(),
                kind: info.kind.into(),
                generation: info.generation,
                incarnation: info.incarnation.to_string(),
                pod_dir: "/cell/pod".to_owned(),
                memory_dir: "/cell/memory".to_owned(),
                own_host_name: true,
                own_network: true,
                running_millis: 1,
                ..cell::HelloReply::default()
            }),
            "OpenBulk" => {
                self.home.open_bulk();
                encoded(cell::OpenBulkReply {})
            }
            "Measure" => {
                self.subscription_secs =
                    Some(cell::MeasureRequest::decode(message).unwrap().seconds);
                let usage = self.options.heartbeat.map(|_| self.heartbeat()).unwrap_or_default();
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
            "ListPodSandbox" => {
                let of = |request: &cri::RunPodSandboxRequest| cri::PodSandbox {
                    id: self.sandbox_id(),
                    metadata: request.config.as_ref().and_then(|config| config.metadata.clone()),
                    ..Default::default()
                };
                let items = self.sandbox.iter().map(of).collect();
                encoded(cri::ListPodSandboxResponse { items })
            }
            "StopPodSandbox" => encoded(cri::StopPodSandboxResponse {}),
            "RemovePodSandbox" => {
                self.sandbox = None;
                self.containers.clear();
                encoded(cri::RemovePodSandboxResponse {})
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
                if self.containers.values().any(|container| container.metadata == metadata) {
                    return Err(Status::unknown(
                        "failed to reserve container name: name is reserved",
                    ));
                }
                let id = format!("{}c{}", self.options.ids, self.created.len());
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
                // As in containerd, a container that has exited stays unchanged.
                let exited = cri::ContainerState::ContainerExited;
                if self.container(&id)?.state() != exited {
                    self.exit(&id, 143);
                }
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
            "PodSandboxStatus" => {
                let id = cri::PodSandboxStatusRequest::decode(message).unwrap().pod_sandbox_id;
                let status = cri::PodSandboxStatus { id, ..Default::default() };
                if self.sandbox.is_none() || status.id != self.sandbox_id() {
                    return Err(Status::not_found("no such sandbox"));
                }
                encoded(cri::PodSandboxStatusResponse {
                    status: Some(status),
                    ..Default::default()
                })
            }
            "ContainerStats" => {
                let value = self.cpu_nanos.ok_or_else(|| Status::unimplemented("no statistics"))?;
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
            "UpdateContainerResources" => {
                self.updated = Some(cri::UpdateContainerResourcesRequest::decode(message).unwrap());
                encoded(cri::UpdateContainerResourcesResponse {})
            }
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
                self.container_ids.insert("ExecSync", request.container_id.clone());
                if request.cmd == ["fail"] {
                    return Err(Status::deadline_exceeded(format!(
                        "container {} is slow",
                        request.container_id
                    )));
                }
                encoded(cri::ExecSyncResponse { stdout: b"done".to_vec(), ..Default::default() })
            }
            other => {
                Err(Status::unimplemented(format!("the fake cell does not implement {other}")))
            }
        }
    }
}

fn encoded(message: impl Message) -> Answer {
    Ok(message.encode_to_vec())
}

/// Returns the first gRPC message of a body.
fn first_message(body: &[u8]) -> &[u8] {
    let Some((head, rest)) = body.split_first_chunk::<5>() else { return &[] };
    &rest[..u32::from_be_bytes([head[1], head[2], head[3], head[4]]) as usize]
}

/// Returns the head of a message of almost 4 GiB, then bytes without an end.
fn endless() -> http::Response<Body> {
    let head = Bytes::from_static(&[0, 0xff, 0xff, 0xff, 0xff]);
    let frames = stream::iter([head]).chain(stream::repeat(Bytes::from_static(&[b'x'; 16 << 10])));
    let body = StreamBody::new(frames.map(|part| Ok::<_, Status>(Frame::data(part))));
    http::Response::builder()
        .header("content-type", "application/grpc")
        .body(Body::new(body))
        .unwrap()
}

/// Returns a gRPC response with these messages and the status OK.
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
