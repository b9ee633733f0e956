//! A cell that only remembers: everything of the daemon's before it is real.

use std::{
    convert::Infallible,
    sync::{Arc, Mutex},
    time::Duration,
};

use bytes::{BufMut, Bytes, BytesMut};
use futures::{
    StreamExt,
    stream::{self, BoxStream},
};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;
use kiyot_cell::home::{ConnectionInfo, HomeHandle};
use kiyot_proto::{cell, cri};
use prost::Message;
use tokio::{sync::mpsc, time::interval};
use tonic::{Status, body::Body};

/// The image that every cell has.
const IMAGE: &str = "sha256:1111111111111111111111111111111111111111111111111111111111111111";
/// As often as an agent's.
const HEARTBEAT: Duration = Duration::from_secs(5);

/// A cell that remembers its containers.
#[derive(Debug, Clone)]
pub(crate) struct PlayedCell(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    id: String,
    home: HomeHandle,
    watcher: Option<mpsc::UnboundedSender<cell::Event>>,
    has_sandbox: bool,
    containers: Vec<cri::ContainerStatus>,
}

type Answer = Result<Vec<u8>, Status>;

impl PlayedCell {
    pub(crate) fn new(id: &str, home: HomeHandle) -> Self {
        Self(Arc::new(Mutex::new(State { id: id.to_owned(), home, watcher: None, has_sandbox: false, containers: Vec::new() })))
    }

    pub(crate) fn service(
        &self,
        info: ConnectionInfo,
    ) -> impl tower::Service<http::Request<Body>, Response = http::Response<Body>, Error = Infallible, Future: Send> + Clone + Send + 'static {
        let own = self.clone();
        tower::service_fn(move |request: http::Request<Body>| {
            let (own, info) = (own.clone(), info.clone());
            async move {
                let path = request.uri().path().to_owned();
                let body = request.into_body().collect().await.map(|body| body.to_bytes()).unwrap_or_default();
                // What follows the first message is nothing that is remembered.
                Ok(own.answer(&info, path.rsplit('/').next().unwrap_or_default(), body.get(5..).unwrap_or_default()))
            }
        })
    }

    fn answer(&self, info: &ConnectionInfo, method: &str, message: &[u8]) -> http::Response<Body> {
        match method {
            "Watch" => streamed(self.watch()),
            "ReadLog" => streamed(stream::empty().boxed()),
            _ => match self.0.lock().unwrap().act(info, method, message) {
                Ok(answer) => streamed(stream::iter([answer]).boxed()),
                Err(status) => status.into_http(),
            },
        }
    }

    /// What is, what changes, and a heartbeat from time to time.
    fn watch(&self) -> BoxStream<'static, Vec<u8>> {
        let (sender, changes) = mpsc::unbounded_channel();
        let mut state = self.0.lock().unwrap();
        let _ = sender.send(event(cell::event::Event::Snapshot(state.snapshot())));
        state.watcher = Some(sender);
        let own = self.clone();
        let beats = stream::unfold(interval(HEARTBEAT), move |mut interval| {
            let own = own.clone();
            async move {
                interval.tick().await;
                let beat = own.0.lock().unwrap().heartbeat();
                Some((event(cell::event::Event::Heartbeat(beat)), interval))
            }
        });
        let changes = stream::unfold(changes, |mut changes| async move { changes.recv().await.map(|change| (change, changes)) });
        stream::select(changes, beats).map(|event| event.encode_to_vec()).boxed()
    }
}

impl State {
    fn snapshot(&self) -> cell::Snapshot {
        let sandbox = cri::PodSandboxStatus { id: self.sandbox(), ..Default::default() };
        let sandboxes = if self.has_sandbox { vec![sandbox] } else { Vec::new() };
        cell::Snapshot { sandboxes, containers: self.containers.clone(), logs: Vec::new() }
    }

    /// As long as containerd's ids, and no other cell's.
    fn sandbox(&self) -> String {
        hash(&self.id)
    }

    fn heartbeat(&self) -> cell::Heartbeat {
        let of = |status: &cri::ContainerStatus| cri::ContainerStats {
            attributes: Some(cri::ContainerAttributes { id: status.id.clone(), metadata: status.metadata.clone(), ..Default::default() }),
            cpu: Some(cri::CpuUsage { timestamp: 1, usage_core_nano_seconds: Some(cri::UInt64Value { value: 1 << 40 }), ..Default::default() }),
            memory: Some(cri::MemoryUsage { timestamp: 1, working_set_bytes: Some(cri::UInt64Value { value: 1 << 30 }), ..Default::default() }),
            ..Default::default()
        };
        let attributes = cri::PodSandboxAttributes { id: self.sandbox(), ..Default::default() };
        let sandbox = self.has_sandbox.then(|| cri::PodSandboxStats { attributes: Some(attributes), ..Default::default() });
        cell::Heartbeat { containers: self.containers.iter().map(of).collect(), sandbox }
    }

    fn container(&mut self, id: &str) -> Result<&mut cri::ContainerStatus, Status> {
        self.containers.iter_mut().find(|one| one.id == id).ok_or_else(|| Status::not_found(format!("no container {id}")))
    }

    fn act(&mut self, info: &ConnectionInfo, method: &str, message: &[u8]) -> Answer {
        match method {
            "Hello" => encoded(&cell::HelloReply {
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
                encoded(&cell::OpenBulkReply {})
            }
            "Bind" => encoded(&cell::BindReply {}),
            "ChangeFiles" => encoded(&cell::ChangeFilesReply {}),
            "GetFile" => encoded(&cell::GetFileReply::default()),
            "TrimLog" => encoded(&cell::TrimLogReply {}),
            "RunPodSandbox" => {
                self.has_sandbox = true;
                encoded(&cri::RunPodSandboxResponse { pod_sandbox_id: self.sandbox() })
            }
            "ImageStatus" => {
                let image = cri::Image { id: IMAGE.to_owned(), repo_tags: vec!["busybox:latest".to_owned()], size: 1, ..Default::default() };
                encoded(&cri::ImageStatusResponse { image: Some(image), ..Default::default() })
            }
            "CreateContainer" => {
                let config = cri::CreateContainerRequest::decode(message).unwrap().config.unwrap_or_default();
                let id = hash(&format!("{}/{}", self.id, self.containers.len()));
                let status = cri::ContainerStatus { id: id.clone(), metadata: config.metadata, image_ref: IMAGE.to_owned(), ..Default::default() };
                self.containers.push(status);
                encoded(&cri::CreateContainerResponse { container_id: id })
            }
            "StartContainer" => {
                let id = cri::StartContainerRequest::decode(message).unwrap().container_id;
                let status = self.container(&id)?;
                status.set_state(cri::ContainerState::ContainerRunning);
                status.started_at = 100;
                let status = status.clone();
                if let Some(watcher) = &self.watcher {
                    let _ = watcher.send(event(cell::event::Event::Container(status)));
                }
                encoded(&cri::StartContainerResponse {})
            }
            "ContainerStatus" => {
                let id = cri::ContainerStatusRequest::decode(message).unwrap().container_id;
                let status = Some(self.container(&id)?.clone());
                encoded(&cri::ContainerStatusResponse { status, ..Default::default() })
            }
            other => Err(Status::unimplemented(format!("the played cell has no {other}"))),
        }
    }
}

fn event(event: cell::event::Event) -> cell::Event {
    cell::Event { event: Some(event) }
}

fn hash(text: &str) -> String {
    hex::encode(ring::digest::digest(&ring::digest::SHA256, text.as_bytes()))
}

fn encoded(message: &impl Message) -> Answer {
    Ok(message.encode_to_vec())
}

fn streamed(messages: BoxStream<'static, Vec<u8>>) -> http::Response<Body> {
    let frames = messages.map(|message| {
        let mut frame = BytesMut::with_capacity(5 + message.len());
        frame.put_u8(0);
        frame.put_u32(u32::try_from(message.len()).unwrap());
        frame.put_slice(&message);
        Frame::data(Bytes::from(frame))
    });
    let trailers = http::HeaderMap::from_iter([(http::HeaderName::from_static("grpc-status"), http::HeaderValue::from_static("0"))]);
    let frames = frames.chain(stream::iter([Frame::trailers(trailers)])).map(Ok::<_, Infallible>);
    http::Response::builder().header("content-type", "application/grpc").body(Body::new(StreamBody::new(frames))).unwrap()
}
