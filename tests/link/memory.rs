//! Memory of the daemon for the heaviest messages of an agent.

use std::{
    convert::Infallible,
    path::PathBuf,
    process::Stdio,
    sync::{Arc, Mutex},
};

use bytes::{BufMut, Bytes, BytesMut};
use http::uri::PathAndQuery;
use http_body_util::StreamBody;
use hyper::body::Frame;
use kiyot_link::{
    alpn,
    channel::Channel,
    frames::Frames,
    http2::{self, Profile},
    stream::Stream,
    tls::{self, Identity},
};
use kiyot_proto::{
    bounds::{
        Bounded, Field, MAX_CONTROL_FRAME_BYTES, MAX_EXEC_RESPONSE_BYTES, MAX_RESPONSE_BYTES, Shape,
    },
    cell::{self, ConnectionKind, FromCell, HelloReply, ToCell, from_cell, to_cell},
    codec::Codec,
    cri,
};
use prost::Message;
use tokio::io::AsyncReadExt;
use tokio_rustls::client::TlsStream;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::body::Body;

use crate::kit::{Fixture, LIMIT, ManualAgent, dial_as, timed, within};

/// The maximal growth of the process, in KiB: the longest response (sent, received and decoded),
/// and the buffers of the link.
const MAX_GROWTH_KIB: usize = 96 << 10;
/// The environment variable with the directory of the messages that the measured child process
/// reads.
const CHILD_MESSAGES: &str = "KIYOT_TEST_MESSAGES";
/// The kind of control messages. Other kinds are the paths of calls.
const CONTROL: &str = "control";

/// A function that returns a message of at most this many bytes.
type Maker = Box<dyn Fn(usize) -> Vec<u8>>;

/// Encodes a length-delimited field.
fn field(number: u32, content: &[u8]) -> Vec<u8> {
    let mut field = Vec::new();
    prost::encoding::encode_key(number, prost::encoding::WireType::LengthDelimited, &mut field);
    prost::encoding::encode_varint(content.len() as u64, &mut field);
    field.extend_from_slice(content);
    field
}

/// Returns the memory of an empty entry, and a maker of messages, for the field that needs the most
/// memory per byte.
fn heaviest(shape: &'static Shape) -> Option<(usize, Maker)> {
    let of = |(number, kind): &(u32, Field)| -> Option<(usize, Maker)> {
        let number = *number;
        let entries: Maker = Box::new(move |length| {
            let entry = field(number, b"");
            entry.repeat(length / entry.len())
        });
        match kind {
            Field::Text => Some((
                1,
                Box::new(move |length| field(number, &vec![b'x'; length.saturating_sub(7)])),
            )),
            Field::Texts | Field::Map => Some((48, entries)),
            Field::Numbers => None,
            Field::Messages(part) => Some((part.size, entries)),
            Field::Message(part) => heaviest(part).map(|(weight, maker)| -> (usize, Maker) {
                (weight, Box::new(move |length| field(number, &maker(length.saturating_sub(7)))))
            }),
        }
    };
    shape.fields.iter().filter_map(of).max_by_key(|(weight, _)| *weight)
}

/// Returns the heaviest message of a type at the length limit, which is refused, and the heaviest
/// accepted message.
fn worst<M: Bounded>(max_bytes: usize) -> Vec<Bytes> {
    let Some((_, maker)) = heaviest(const { &M::SHAPE }) else { return vec![Bytes::new()] };
    let (mut low, mut high) = (0, max_bytes);
    while high - low > 1024 {
        let middle = low.midpoint(high);
        if M::SHAPE.check(&maker(middle)).is_ok() { low = middle } else { high = middle }
    }
    vec![maker(max_bytes).into(), maker(low).into()]
}

fn peak_kib() -> u64 {
    kiyot_testkit::peak_resident_kib("self").unwrap()
}

/// Returns the heaviest messages that an agent may send on the control connection.
fn control_messages() -> Vec<Bytes> {
    let event = |number: u32, content: &[u8]| field(2, &field(2, &field(number, content)));
    let entries = |entry: &[u8]| entry.repeat((MAX_CONTROL_FRAME_BYTES - 64) / entry.len());
    let mut all = worst::<FromCell>(MAX_CONTROL_FRAME_BYTES);
    // A snapshot has lists of sandboxes, containers and logs.
    all.extend([1, 2, 3].map(|list| event(1, &entries(&field(list, b""))).into()));
    // A container has lists of annotations and mounts; a sandbox has a list of annotations.
    all.extend([13, 14].map(|list| event(2, &entries(&field(list, b""))[..400 << 10]).into()));
    all.push(event(4, &entries(&field(8, b""))[..400 << 10]).into());
    // A heartbeat has lists of containers, interfaces of the pod, metrics and their labels.
    all.push(event(7, &entries(&field(1, b""))).into());
    all.push(event(7, &field(2, &field(2, &field(3, &entries(&field(3, b"")))))).into());
    all.push(event(7, &field(3, &entries(&field(1, b"")))).into());
    all.push(event(7, &field(3, &field(1, &entries(&field(3, b""))))).into());
    // Ids and error messages may be long.
    all.push(event(3, &vec![b'x'; MAX_CONTROL_FRAME_BYTES - 64]).into());
    all.push(field(3, &field(3, &vec![b'x'; 15 << 10])).into());
    all
}

fn hello(cell: &str, kind: ConnectionKind, generation: u64) -> HelloReply {
    HelloReply { cell: cell.to_owned(), kind: kind.into(), generation, ..HelloReply::default() }
}

/// Connects as a cell and sends a message as its first event. Returns when the gateway has closed
/// the connection or has requested another event.
async fn send_on_control(fixture: &Fixture, identity: &Identity, generation: u64, event: Bytes) {
    let bootstrap = fixture.bootstrap();
    let tls = tls::cell_client(&bootstrap.ca_sha256, identity.clone()).unwrap();
    let stream = dial_as(&bootstrap, tls, alpn::GATEWAY_NAME).await.unwrap();
    let mut frames: Frames<TlsStream<Stream>> = Frames::new(stream, MAX_EXEC_RESPONSE_BYTES);
    let mut event = Some(event);
    while let Ok(Some(message)) = frames.next().await {
        let answer = match ToCell::decode(message).unwrap().message.unwrap() {
            to_cell::Message::Hello(_) => FromCell {
                message: Some(from_cell::Message::Hello(hello(
                    fixture.cell.as_str(),
                    ConnectionKind::Control,
                    generation,
                ))),
            }
            .encode_to_vec()
            .into(),
            to_cell::Message::Next(_) => match event.take() {
                Some(event) => event,
                None => return,
            },
            _ => continue,
        };
        if frames.send(&answer).await.is_err() {
            return;
        }
    }
}

/// Returns a gRPC response with a single message.
fn response(message: Bytes) -> http::Response<Body> {
    let mut head = BytesMut::with_capacity(5);
    head.put_u8(0);
    head.put_u32(u32::try_from(message.len()).unwrap());
    let mut trailers = http::HeaderMap::new();
    trailers.insert("grpc-status", http::HeaderValue::from_static("0"));
    let frames = [Frame::data(head.freeze()), Frame::data(message), Frame::trailers(trailers)]
        .map(Ok::<_, Infallible>);
    http::Response::builder()
        .header("content-type", "application/grpc")
        .body(Body::new(StreamBody::new(futures::stream::iter(frames))))
        .unwrap()
}

fn max_response_bytes(method: &str) -> usize {
    if method == "ExecSync" { MAX_EXEC_RESPONSE_BYTES } else { MAX_RESPONSE_BYTES }
}

/// Makes a call with the daemon's limit for the response.
async fn call<R: Bounded + Default + Send + 'static>(channel: Channel, path: &'static str) {
    let max_bytes = max_response_bytes(path.rsplit('/').next().unwrap_or_default());
    let mut client = tonic::client::Grpc::new(channel).max_decoding_message_size(max_bytes);
    let codec = Codec::<(), R>::default();
    let _ = client.unary(timed((), LIMIT), PathAndQuery::from_static(path), codec).await;
}

macro_rules! calls {
    ($($service:literal { $($method:literal -> $response:ty;)* })*) => {
        /// Returns the heaviest responses to each call that the daemon makes to a cell.
        fn worst_responses() -> Vec<(&'static str, Bytes)> {
            let mut all = Vec::new();
            $($({
                for message in worst::<$response>(max_response_bytes($method)) {
                    all.push((concat!("/", $service, "/", $method), message));
                }
            })*)*
            all
        }

        async fn call_by_path(channel: Channel, path: &str) {
            $($(if path == concat!("/", $service, "/", $method) {
                call::<$response>(channel.clone(), concat!("/", $service, "/", $method)).await;
            })*)*
        }
    };
}

calls! {
    "kiyot.cell.v1.Agent" {
        "Bind" -> cell::BindReply;
        "Resolve" -> cell::NameQuery;
        "OpenBulk" -> cell::OpenBulkReply;
        "Measure" -> cell::MeasureReply;
        "Watch" -> cell::Event;
        "ChangeFiles" -> cell::ChangeFilesReply;
        "GetFile" -> cell::GetFileReply;
        "ReadLog" -> cell::LogPart;
        "TrimLog" -> cell::TrimLogReply;
        "Tunnel" -> cell::TunnelPart;
        "MissingBlobs" -> cell::MissingBlobsReply;
        "PutBlob" -> cell::PutBlobReply;
        "MountLayers" -> cell::MountLayersReply;
        "PutImage" -> cell::PutImageReply;
        "WatchPulls" -> cell::PullNews;
        "Shutdown" -> cell::ShutdownReply;
    }
    "runtime.v1.RuntimeService" {
        "Version" -> cri::VersionResponse;
        "Status" -> cri::StatusResponse;
        "RunPodSandbox" -> cri::RunPodSandboxResponse;
        "ListPodSandbox" -> cri::ListPodSandboxResponse;
        "PodSandboxStatus" -> cri::PodSandboxStatusResponse;
        "StopPodSandbox" -> cri::StopPodSandboxResponse;
        "RemovePodSandbox" -> cri::RemovePodSandboxResponse;
        "PodSandboxStats" -> cri::PodSandboxStatsResponse;
        "CreateContainer" -> cri::CreateContainerResponse;
        "StartContainer" -> cri::StartContainerResponse;
        "StopContainer" -> cri::StopContainerResponse;
        "RemoveContainer" -> cri::RemoveContainerResponse;
        "ListContainers" -> cri::ListContainersResponse;
        "ContainerStatus" -> cri::ContainerStatusResponse;
        "ContainerStats" -> cri::ContainerStatsResponse;
        "UpdateContainerResources" -> cri::UpdateContainerResourcesResponse;
        "ExecSync" -> cri::ExecSyncResponse;
        "Exec" -> cri::ExecResponse;
        "Attach" -> cri::AttachResponse;
        "PortForward" -> cri::PortForwardResponse;
    }
    "runtime.v1.ImageService" {
        "ImageStatus" -> cri::ImageStatusResponse;
        "PullImage" -> cri::PullImageResponse;
    }
}

/// Files with the messages: the measured process holds only one message at a time.
struct Messages(PathBuf);

impl Messages {
    fn write(&self, n: usize, kind: &str, message: &[u8]) {
        let name = format!("{n:04} {}", kind.replace('/', "+"));
        std::fs::write(self.0.join(name), message).unwrap();
    }

    /// Returns the names of the files, sorted.
    fn names(&self) -> Vec<String> {
        let of =
            |entry: std::io::Result<std::fs::DirEntry>| entry.unwrap().file_name().into_string();
        let mut names: Vec<_> =
            std::fs::read_dir(&self.0).unwrap().map(|entry| of(entry).unwrap()).collect();
        names.sort();
        names
    }

    fn read(&self, name: &str) -> Bytes {
        std::fs::read(self.0.join(name)).unwrap().into()
    }
}

/// Runs the child process: a gateway that receives all messages in turn.
async fn receive_all(messages: Messages) {
    let fixture = Fixture::start().await;
    let identity = ManualAgent::new().enrol(&fixture.bootstrap()).await.unwrap();
    let before = peak_kib();
    let (control, calls): (Vec<_>, Vec<_>) =
        messages.names().into_iter().partition(|name| name.ends_with(CONTROL));
    for (n, name) in control.iter().enumerate() {
        let generation = u64::try_from(n).unwrap() + 1;
        let agent = send_on_control(&fixture, &identity, generation, messages.read(name));
        let daemon = async {
            let mut events = fixture.link.control.watch().await.unwrap();
            // The gateway requests a second event only if it has accepted the first.
            while let Ok(Some(_)) = events.next().await {}
        };
        within("the end of a control connection", async { tokio::join!(agent, daemon) }).await;
        fixture.wait_unlinked().await;
    }
    let for_control = peak_kib() - before;
    let tls = tls::cell_client(&fixture.bootstrap().ca_sha256, identity.clone()).unwrap();
    let stream = dial_as(&fixture.bootstrap(), tls, alpn::BULK_NAME).await.unwrap();
    let cell = fixture.cell.to_string();
    let next = Arc::new(Mutex::new(Bytes::new()));
    let own = next.clone();
    let service = tower::service_fn(move |request: http::Request<Body>| {
        let message = if request.uri().path().ends_with("/Hello") {
            hello(&cell, ConnectionKind::Bulk, 1).encode_to_vec().into()
        } else {
            own.lock().unwrap().clone()
        };
        async move { Ok::<_, Infallible>(response(message)) }
    });
    let (end, tasks) = (CancellationToken::new(), TaskTracker::new());
    let served = http2::serve(stream, Profile::BULK, service, end.clone(), tasks.clone());
    let calls = async {
        for name in &calls {
            *next.lock().unwrap() = messages.read(name);
            let path = name.split_once(' ').unwrap().1.replace('+', "/");
            within(&path, call_by_path(fixture.link.bulk.clone(), &path)).await;
        }
    };
    tokio::select! {
        ended = served => panic!("the bulk connection has ended: {ended:?}"),
        () = calls => end.cancel(),
    }
    println!("grown by KiB {for_control} {}", peak_kib() - before);
}

/// Verifies L16.
#[tokio::test]
async fn worst_messages_of_an_agent_need_bounded_memory() {
    if let Some(messages) = std::env::var_os(CHILD_MESSAGES) {
        return receive_all(Messages(messages.into())).await;
    }
    let dir = tempfile::tempdir().unwrap();
    let messages = Messages(dir.path().to_owned());
    let control = control_messages().into_iter().map(|message| (CONTROL, message));
    for (n, (kind, message)) in control.chain(worst_responses()).enumerate() {
        messages.write(n, kind, &message);
    }
    let mut child = tokio::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "memory::worst_messages_of_an_agent_need_bounded_memory", "--nocapture"])
        .env(CHILD_MESSAGES, dir.path())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut output = String::new();
    child.stdout.take().unwrap().read_to_string(&mut output).await.unwrap();
    let grown = output.lines().find_map(|line| line.split_once("grown by KiB "));
    let (_, grown) = grown.unwrap_or_else(|| panic!("{output}"));
    println!("by control messages, by all: {grown} KiB");
    let grown: Vec<usize> = grown.split(' ').map(|kib| kib.parse().unwrap()).collect();
    assert!(grown[1] <= MAX_GROWTH_KIB, "{grown:?} KiB: at most {MAX_GROWTH_KIB} are allowed");
}
