//! The stream of container events, as a kubelet with EventedPLEG reads it.

use std::{convert::Infallible, path::Path, sync::Arc};

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
            self, ContainerCreatedEvent as Created, ContainerDeletedEvent as Deleted, ContainerStartedEvent as Started,
            ContainerStoppedEvent as Stopped,
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
use tonic::{Code, Streaming, body::Body};

use super::{WAIT, leaves_nothing, options, pod};

const EVENTS: &str = "/runtime.v1.RuntimeService/GetContainerEvents";

/// What streams the events of a node whose containerd has none: all other calls go to containerd.
struct Events {
    /// One for each stream that was opened: what is sent is in it, until it is dropped.
    opened: mpsc::UnboundedReceiver<mpsc::UnboundedSender<Frame<Bytes>>>,
    _task: AbortOnDropHandle<()>,
}

impl Events {
    fn before(node: &Node, socket: &Path) -> Self {
        let listener = UnixListener::bind(socket).unwrap();
        let (opens, opened) = mpsc::unbounded_channel();
        let (opens, containerd) = (Arc::new(opens), node.socket());
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (opens, containerd) = (opens.clone(), containerd.clone());
                let service = hyper::service::service_fn(move |request: Request<Incoming>| {
                    let (opens, containerd) = (opens.clone(), containerd.clone());
                    async move {
                        if request.uri().path() != EVENTS {
                            return forward(&containerd, request).await;
                        }
                        let (sender, frames) = mpsc::unbounded_channel();
                        opens.send(sender).unwrap();
                        let body = Body::new(StreamBody::new(UnboundedReceiverStream::new(frames).map(Ok::<_, Infallible>)));
                        Ok(Response::builder().header("content-type", "application/grpc").body(body).unwrap())
                    }
                });
                tokio::spawn(hyper::server::conn::http2::Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(stream), service));
            }
        });
        Self { opened, _task: AbortOnDropHandle::new(task) }
    }
}

async fn forward(containerd: &Path, request: Request<Incoming>) -> hyper::Result<Response<Body>> {
    let stream = TokioIo::new(UnixStream::connect(containerd).await.unwrap());
    let (mut send, connection) = hyper::client::conn::http2::handshake(TokioExecutor::new(), stream).await?;
    tokio::spawn(connection);
    Ok(send.send_request(request).await?.map(|body| Body::new(body.map_err(|error| tonic::Status::unavailable(error.to_string())))))
}

fn frame(event: &cri::ContainerEventResponse) -> Frame<Bytes> {
    let message = event.encode_to_vec();
    Frame::data([&[0], u32::try_from(message.len()).unwrap().to_be_bytes().as_slice(), &message].concat().into())
}

fn of_node(id: &str) -> cri::ContainerEventResponse {
    cri::ContainerEventResponse { container_id: id.to_owned(), created_at: 7, ..Default::default() }
}

async fn open(kubelet: &mut Kubelet) -> Streaming<cri::ContainerEventResponse> {
    kubelet.runtime.get_container_events(cri::GetEventsRequest {}).await.unwrap().into_inner()
}

async fn next(stream: &mut Streaming<cri::ContainerEventResponse>) -> cri::ContainerEventResponse {
    tokio::time::timeout(LIMIT, stream.message()).await.expect("an event comes").unwrap().expect("the stream goes on")
}

#[tokio::test]
async fn events_of_cells_come_with_those_of_the_node() {
    let node = Node::start().await;
    let socket = node.directory().join("events.sock");
    let mut events = Events::before(&node, &socket);
    let kiyot = Kiyot::start(&node, KiyotOptions { containerd: Some(socket), ..options() }).await;
    let mut kubelet = kiyot.kubelet().await;
    let mut stream = open(&mut kubelet).await;
    let sender = events.opened.recv().await.unwrap();

    sender.send(frame(&of_node("before"))).unwrap();
    assert_eq!(next(&mut stream).await, of_node("before"));
    let local = kubelet.run_pod(&Pod::new("local").container(Container::script("main", WAIT))).await.unwrap();
    let running = kubelet.run_pod(&pod("told", "sleep 1; exit 3").label("app", "demo")).await.unwrap();
    let (sandbox, main) = (running.sandbox.clone(), running.container("main").id.clone());
    let expect = async |kubelet: &mut Kubelet, stream: &mut _, kind: ContainerEventType, id: &str| {
        let event = next(stream).await;
        assert_eq!((event.container_event_type(), event.container_id.as_str()), (kind, id));
        let pod = event.pod_sandbox_status.unwrap();
        assert_eq!((&pod.id, &pod.metadata, &pod.labels), (&sandbox, &running.config.metadata, &running.config.labels));
        // What is asked after it is the same, or has gone on.
        for told in &event.containers_statuses {
            let Ok(now) = kubelet.container_status(&told.id).await else { continue };
            assert!(now.state >= told.state, "{now:?} after {told:?}");
            if now.state == told.state {
                assert_eq!(&now, told);
            }
        }
        event.containers_statuses
    };
    expect(&mut kubelet, &mut stream, Created, &sandbox).await;
    expect(&mut kubelet, &mut stream, Started, &sandbox).await;
    assert_eq!(expect(&mut kubelet, &mut stream, Created, &main).await[0].state(), cri::ContainerState::ContainerCreated);
    assert_ne!(expect(&mut kubelet, &mut stream, Started, &main).await[0].started_at, 0);
    let ended = expect(&mut kubelet, &mut stream, Stopped, &main).await;
    assert_eq!((ended[0].state(), ended[0].exit_code), (cri::ContainerState::ContainerExited, 3));
    sender.send(frame(&of_node("between"))).unwrap();
    assert_eq!(next(&mut stream).await, of_node("between"));
    kubelet.stop_pod(&running).await.unwrap();
    expect(&mut kubelet, &mut stream, Stopped, &sandbox).await;
    kubelet.remove_pod(&running).await.unwrap();
    assert_eq!(expect(&mut kubelet, &mut stream, Deleted, &main).await, []);
    assert_eq!(expect(&mut kubelet, &mut stream, Deleted, &sandbox).await, []);

    // The node's stream breaks, and so does ours; then it can be had again.
    let mut trailers = http::HeaderMap::new();
    tonic::Status::aborted("the node says so").add_header(&mut trailers).unwrap();
    sender.send(Frame::trailers(trailers)).unwrap();
    let status = tokio::time::timeout(LIMIT, stream.message()).await.unwrap().unwrap_err();
    assert_eq!((status.code(), status.message()), (Code::Aborted, "the node says so"));
    let mut stream = open(&mut kubelet).await;
    events.opened.recv().await.unwrap().send(frame(&of_node("again"))).unwrap();
    assert_eq!(next(&mut stream).await, of_node("again"));
    kubelet.stop_and_remove(&local).await.unwrap();
    drop((stream, kubelet, kiyot));
    leaves_nothing(node);
}

/// containerd 1.6 streams no events: a kubelet that sees so lists instead.
#[tokio::test]
async fn without_the_node_s_stream_there_is_none() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let own = node.kubelet(&node.socket()).await.unwrap().runtime.get_container_events(cri::GetEventsRequest {}).await.map(drop);
    let ours = kubelet.runtime.get_container_events(cri::GetEventsRequest {}).await.map(drop);
    let words = |answer: Result<(), tonic::Status>| answer.map_err(|status| (status.code(), status.message().to_owned()));
    let (own, ours) = (words(own), words(ours));
    assert_eq!(own, ours);
    assert!(own.is_ok() || own.is_err_and(|(code, _)| code == Code::Unimplemented));
}
