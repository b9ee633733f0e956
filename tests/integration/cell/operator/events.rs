//! The stream of container events, read as by a kubelet with EventedPLEG.

use std::{
    collections::HashMap,
    convert::Infallible,
    path::{Path, PathBuf},
    sync::Arc,
};

use futures::StreamExt;
use http_body_util::{BodyExt, StreamBody};
use hyper::{
    Request, Response,
    body::{Bytes, Frame, Incoming},
};
use hyper_util::rt::{TokioExecutor, TokioIo};
use kiyot_testkit::{
    Container, Kiyot, KiyotOptions, Kubelet, LIMIT, Node, Pod,
    cri::{
        self,
        ContainerEventType::{
            self, ContainerCreatedEvent as Created, ContainerDeletedEvent as Deleted,
            ContainerStartedEvent as Started, ContainerStoppedEvent as Stopped,
        },
    },
};
use prost::Message;
use tokio::{
    net::{UnixListener, UnixStream},
    sync::mpsc,
};
use tokio_stream::wrappers::UnboundedReceiverStream;
use tokio_util::task::AbortOnDropHandle;
use tonic::{Code, Status, Streaming, body::Body};

use crate::cell::{
    WAIT, assert_nothing_left, lifecycle::endings::Ending, options, pod, remove_and_assert_clean,
};

const EVENTS: &str = "/runtime.v1.RuntimeService/GetContainerEvents";

/// A fake node runtime in front of containerd 1.6. It streams events and answers some calls as the
/// test specifies, and forwards all other calls to containerd.
pub(crate) struct FakeNode {
    pub(crate) socket: PathBuf,
    /// Receives the sender of each event stream that is opened. A stream ends when its sender is
    /// dropped.
    opened: mpsc::UnboundedReceiver<mpsc::UnboundedSender<Frame<Bytes>>>,
    _task: AbortOnDropHandle<()>,
}

impl FakeNode {
    /// Starts the fake in front of a node's containerd. `answers` has responses by the path of the
    /// call.
    pub(crate) fn before(node: &Node, answers: HashMap<&'static str, Vec<u8>>) -> Self {
        let socket = node.directory().join("played.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let (opens, opened) = mpsc::unbounded_channel();
        let shared = Arc::new((opens, node.socket(), answers));
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let shared = shared.clone();
                let service = hyper::service::service_fn(move |request: Request<Incoming>| {
                    let shared = shared.clone();
                    async move {
                        let (opens, containerd, answers) = &*shared;
                        let (sender, frames) = mpsc::unbounded_channel();
                        match answers.get(request.uri().path()) {
                            Some(answer) => {
                                sender.send(frame(answer)).unwrap();
                                sender.send(Frame::trailers(trailers(&Status::ok("")))).unwrap();
                            }
                            None if request.uri().path() == EVENTS => opens.send(sender).unwrap(),
                            None => return forward(containerd, request).await,
                        }
                        let body = Body::new(StreamBody::new(
                            UnboundedReceiverStream::new(frames).map(Ok::<_, Infallible>),
                        ));
                        Ok(Response::builder()
                            .header("content-type", "application/grpc")
                            .body(body)
                            .unwrap())
                    }
                });
                tokio::spawn(
                    hyper::server::conn::http2::Builder::new(TokioExecutor::new())
                        .serve_connection(TokioIo::new(stream), service),
                );
            }
        });
        Self { socket, opened, _task: AbortOnDropHandle::new(task) }
    }
}

async fn forward(containerd: &Path, request: Request<Incoming>) -> hyper::Result<Response<Body>> {
    let stream = TokioIo::new(UnixStream::connect(containerd).await.unwrap());
    let (mut send, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), stream).await?;
    tokio::spawn(connection);
    Ok(send
        .send_request(request)
        .await?
        .map(|body| Body::new(body.map_err(|error| Status::unavailable(error.to_string())))))
}

fn frame(message: &[u8]) -> Frame<Bytes> {
    Frame::data(
        [&[0], u32::try_from(message.len()).unwrap().to_be_bytes().as_slice(), message]
            .concat()
            .into(),
    )
}

fn trailers(status: &Status) -> http::HeaderMap {
    let mut trailers = http::HeaderMap::new();
    status.add_header(&mut trailers).unwrap();
    trailers
}

fn node_event(id: &str) -> cri::ContainerEventResponse {
    cri::ContainerEventResponse { container_id: id.to_owned(), created_at: 7, ..Default::default() }
}

async fn open(kubelet: &mut Kubelet) -> Streaming<cri::ContainerEventResponse> {
    kubelet.runtime.get_container_events(cri::GetEventsRequest {}).await.unwrap().into_inner()
}

async fn next(stream: &mut Streaming<cri::ContainerEventResponse>) -> cri::ContainerEventResponse {
    tokio::time::timeout(LIMIT, stream.message())
        .await
        .expect("an event arrives")
        .unwrap()
        .expect("the stream goes on")
}

/// Verifies F10, F8.
#[tokio::test]
async fn events_of_cells_and_of_the_node_are_in_one_stream() {
    let node = Node::start().await;
    let mut fake_node = FakeNode::before(&node, HashMap::new());
    let kiyot = Kiyot::start(
        &node,
        KiyotOptions { containerd: Some(fake_node.socket.clone()), ..options() },
    )
    .await;
    let mut kubelet = kiyot.kubelet().await;
    let mut stream = open(&mut kubelet).await;
    let sender = fake_node.opened.recv().await.unwrap();

    sender.send(frame(&node_event("before").encode_to_vec())).unwrap();
    assert_eq!(next(&mut stream).await, node_event("before"));
    let local = kubelet
        .run_pod(&Pod::new("local").container(Container::script("main", WAIT)))
        .await
        .unwrap();
    let ending = Ending::new();
    let running = kubelet
        .run_pod(&pod("told", &format!("{}; exit 3", ending.script())).label("app", "demo"))
        .await
        .unwrap();
    let (sandbox, main) = (running.sandbox.clone(), running.container("main").id.clone());
    let expect =
        async |kubelet: &mut Kubelet, stream: &mut _, kind: ContainerEventType, id: &str| {
            let event = next(stream).await;
            assert_eq!((event.container_event_type(), event.container_id.as_str()), (kind, id));
            let pod = event.pod_sandbox_status.unwrap();
            assert_eq!(
                (&pod.id, &pod.metadata, &pod.labels),
                (&sandbox, &running.config.metadata, &running.config.labels)
            );
            // Events may arrive late: a status that is read afterwards is equal or newer.
            for status in &event.containers_statuses {
                let Ok(now) = kubelet.container_status(&status.id).await else { continue };
                assert!(now.state >= status.state, "{now:?} after {status:?}");
                if now.state == status.state {
                    assert_eq!(&now, status);
                }
            }
            event.containers_statuses
        };
    expect(&mut kubelet, &mut stream, Created, &sandbox).await;
    expect(&mut kubelet, &mut stream, Started, &sandbox).await;
    assert_eq!(
        expect(&mut kubelet, &mut stream, Created, &main).await[0].state(),
        cri::ContainerState::ContainerCreated
    );
    assert_ne!(expect(&mut kubelet, &mut stream, Started, &main).await[0].started_at, 0);
    ending.release().await;
    let ended = expect(&mut kubelet, &mut stream, Stopped, &main).await;
    assert_eq!((ended[0].state(), ended[0].exit_code), (cri::ContainerState::ContainerExited, 3));
    sender.send(frame(&node_event("between").encode_to_vec())).unwrap();
    assert_eq!(next(&mut stream).await, node_event("between"));
    kubelet.stop_pod(&running).await.unwrap();
    expect(&mut kubelet, &mut stream, Stopped, &sandbox).await;
    kubelet.remove_pod(&running).await.unwrap();
    assert_eq!(expect(&mut kubelet, &mut stream, Deleted, &main).await, []);
    assert_eq!(expect(&mut kubelet, &mut stream, Deleted, &sandbox).await, []);

    // When the node's stream breaks, the merged stream breaks too. It can be opened again.
    sender.send(Frame::trailers(trailers(&Status::aborted("broken by the node")))).unwrap();
    let status = tokio::time::timeout(LIMIT, stream.message()).await.unwrap().unwrap_err();
    assert_eq!((status.code(), status.message()), (Code::Aborted, "broken by the node"));
    let mut stream = open(&mut kubelet).await;
    fake_node
        .opened
        .recv()
        .await
        .unwrap()
        .send(frame(&node_event("again").encode_to_vec()))
        .unwrap();
    assert_eq!(next(&mut stream).await, node_event("again"));
    kubelet.stop_and_remove(&local).await.unwrap();
    drop((stream, kubelet, kiyot));
    assert_nothing_left(node);
}

/// containerd 1.6 does not stream events, so that a kubelet reads lists instead. Later versions
/// stream events, and respond with their first event.
///
/// Verifies F8.
#[tokio::test]
async fn event_stream_exists_if_the_node_has_an_event_stream() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let opening = |mut kubelet: Kubelet| {
        tokio::spawn(
            async move { kubelet.runtime.get_container_events(cri::GetEventsRequest {}).await },
        )
    };
    let (direct, through_kiyot) =
        (opening(node.kubelet(&node.socket()).await.unwrap()), opening(kubelet.clone()));
    let local = kubelet
        .run_pod(&Pod::new("local").container(Container::script("main", WAIT)))
        .await
        .unwrap();
    let running = kubelet.run_pod(&pod("told", WAIT)).await.unwrap();
    match (direct.await.unwrap(), through_kiyot.await.unwrap()) {
        (Err(direct), Err(through_kiyot)) => {
            assert_eq!(
                (through_kiyot.code(), through_kiyot.message()),
                (Code::Unimplemented, direct.message())
            );
            kubelet.stop_pod(&local).await.unwrap();
            kubelet.stop_pod(&running).await.unwrap();
        }
        (Ok(_), Ok(through_kiyot)) => {
            let mut stream = through_kiyot.into_inner();
            for pod in [&local, &running] {
                kubelet.stop_pod(pod).await.unwrap();
                let main = &pod.container("main").id;
                loop {
                    let event = next(&mut stream).await;
                    if event.container_id == *main && event.container_event_type() == Stopped {
                        break;
                    }
                }
            }
        }
        (direct, through_kiyot) => panic!("containerd: {direct:?}, kiyot: {through_kiyot:?}"),
    }
    kubelet.remove_pod(&local).await.unwrap();
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}
