//! The stream of container events.

use bytes::Bytes;
use h2::{Reason, RecvStream, SendStream};
use http::{HeaderMap, HeaderValue, Response};
use kiyot::backends::Method;
use kiyot_proto::cri;
use prost::Message;
use tokio::sync::mpsc;
use tonic::{Code, Status};

use crate::{
    caller::{Caller, LONG, frame, soon},
    fake_runtime::{Call, FakeRuntime},
    limits::SHORT,
    server::{Setup, TestServer},
};

/// Starts a runtime that hands its calls to the test.
fn runtime(server: &TestServer, name: &str) -> (FakeRuntime, mpsc::UnboundedReceiver<Call>) {
    let (sender, calls) = mpsc::unbounded_channel();
    let fake = FakeRuntime::listen(&server.runtime(name), move |call| {
        let _ = sender.send(call);
        std::future::ready(())
    });
    (fake, calls)
}

/// Opens the event stream like grpc-go.
async fn open(caller: &Caller) -> (h2::client::ResponseFuture, SendStream<Bytes>) {
    let (response, mut stream) =
        caller.begin(Method::GetContainerEvents.path(), &[("grpc-accept-encoding", "gzip")]).await;
    stream.send_data(frame(b"").into(), true).unwrap();
    (response, stream)
}

/// Sends the head of the response of a runtime, without any event.
async fn begun(call: &mut Call) -> SendStream<Bytes> {
    assert_eq!(call.head.uri.path(), Method::GetContainerEvents.path());
    assert!(!call.head.headers.contains_key("grpc-accept-encoding"));
    let response = Response::builder()
        .header("content-type", "application/grpc")
        .header("x-of", "the node")
        .body(())
        .unwrap();
    call.respond.send_response(response, false).unwrap()
}

fn event(id: &str) -> Vec<u8> {
    cri::ContainerEventResponse { container_id: id.into(), ..Default::default() }.encode_to_vec()
}

/// Sends an event of a cell to all readers.
fn tell(server: &TestServer, event: Result<Vec<u8>, Status>) {
    let event = event.map(Bytes::from);
    server.cells.events.lock().unwrap().retain(|reader| reader.send(event.clone()).is_ok());
}

/// Returns the next message.
async fn next(body: &mut RecvStream, buffer: &mut Vec<u8>) -> Vec<u8> {
    loop {
        if let Some((head, rest)) = buffer.split_first_chunk::<5>() {
            let length = u32::from_be_bytes(head[1..].try_into().unwrap()) as usize;
            if rest.len() >= length {
                let message = rest[..length].to_vec();
                buffer.drain(..5 + length);
                return message;
            }
        }
        let part = soon(body.data()).await.expect("the stream goes on").unwrap();
        body.flow_control().release_capacity(part.len()).unwrap();
        buffer.extend_from_slice(&part);
    }
}

/// Returns the trailers at the end of a stream.
async fn end(mut body: RecvStream) -> HeaderMap {
    while let Some(part) = soon(body.data()).await {
        assert!(part.unwrap().is_empty());
    }
    soon(body.trailers()).await.unwrap().unwrap()
}

/// Inserts a status with details.
fn status(headers: &mut HeaderMap, code: Code) {
    Status::with_details(code, "in its own words", Bytes::from_static(b"\x00details"))
        .add_header(headers)
        .unwrap();
}

fn trailers(code: Code) -> HeaderMap {
    let mut trailers = HeaderMap::new();
    status(&mut trailers, code);
    trailers
}

/// Verifies F8.
#[tokio::test(flavor = "multi_thread")]
async fn events_of_all_backends_are_merged_in_whole_messages() {
    let server = Setup { runtimes: &["containerd", "second"], ..Setup::default() }.start();
    let ((_node, mut calls), (_second, mut second)) =
        (runtime(&server, "containerd"), runtime(&server, "second"));
    let caller = server.caller().await;
    let (response, _stream) = open(&caller).await;
    let (mut call, mut other) =
        (soon(calls.recv()).await.unwrap(), soon(second.recv()).await.unwrap());
    // An event of a cell does not wait for the metadata of a runtime: containerd sends its metadata
    // with its first event.
    tell(&server, Ok(event("milpa1")));
    let (head, mut body) = soon(response).await.unwrap().into_parts();
    assert_eq!(
        (head.status.as_u16(), &head.headers["content-type"]),
        (200, &HeaderValue::from_static("application/grpc"))
    );
    let mut buffer = Vec::new();
    assert_eq!(next(&mut body, &mut buffer).await, event("milpa1"));

    // Half of an event of the node, with fields of a later CRI. Events of other backends arrive
    // meanwhile.
    let unknown = [event("node1"), b"\xfa\x3f\x05later\xf8\x7f\x01".to_vec()].concat();
    let framed = Bytes::from([frame(&unknown), frame(&event("node2"))].concat());
    let (mut node, mut of_other) = (begun(&mut call).await, begun(&mut other).await);
    node.send_data(framed.slice(..9), false).unwrap();
    for n in 0..5 {
        tell(&server, Ok(event(&format!("milpa{n}"))));
        assert_eq!(next(&mut body, &mut buffer).await, event(&format!("milpa{n}")));
        of_other.send_data(frame(&event(&format!("other{n}"))).into(), false).unwrap();
        assert_eq!(next(&mut body, &mut buffer).await, event(&format!("other{n}")));
    }
    node.send_data(framed.slice(9..), false).unwrap();
    assert_eq!(next(&mut body, &mut buffer).await, unknown);
    assert_eq!(next(&mut body, &mut buffer).await, event("node2"));
    // A large event, in many parts.
    let large = event(&"x".repeat(3 << 20));
    tell(&server, Ok(large.clone()));
    assert!(next(&mut body, &mut buffer).await == large);
    assert!(buffer.is_empty());
}

/// A kubelet never ends its event stream.
///
/// Verifies F14.
#[tokio::test(flavor = "multi_thread")]
async fn drain_does_not_wait_for_event_streams() {
    let server = Setup::default().start();
    let (_node, mut calls) = runtime(&server, "containerd");
    let caller = server.caller().await;
    let (response, _stream) = open(&caller).await;
    let _node = begun(&mut soon(calls.recv()).await.unwrap()).await;
    let body = soon(response).await.unwrap().into_body();
    let (not_begun, _stream) = open(&caller).await;
    let _second = soon(calls.recv()).await.unwrap();
    assert!(server.running.drain.drain(LONG).await, "all calls ended in time");
    for trailers in [end(body).await, soon(not_begun).await.unwrap().into_parts().0.headers] {
        let status = Status::from_header_map(&trailers).unwrap();
        assert_eq!(
            (status.code(), status.message().contains("kiyot stops")),
            (Code::Unavailable, true)
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn head_of_a_runtime_begins_the_event_stream() {
    let server = Setup::default().start();
    let (_node, mut calls) = runtime(&server, "containerd");
    let caller = server.caller().await;
    let (response, _stream) = open(&caller).await;
    let _node = begun(&mut soon(calls.recv()).await.unwrap()).await;
    let (head, mut body) = soon(response).await.unwrap().into_parts();
    assert_eq!(head.headers["x-of"], "the node");
    tell(&server, Ok(event("milpa1")));
    assert_eq!(next(&mut body, &mut Vec::new()).await, event("milpa1"));
}

/// Containerd 1.6 has no event stream.
///
/// Verifies F8.
#[tokio::test(flavor = "multi_thread")]
async fn event_stream_fails_if_a_runtime_does_not_support_events() {
    for without in ["containerd", "second"] {
        let server = Setup { runtimes: &["containerd", "second"], ..Setup::default() }.start();
        let caller = server.caller().await;
        let with = if without == "second" { "containerd" } else { "second" };
        let ((_with, mut having), (_without, mut lacking)) =
            (runtime(&server, with), runtime(&server, without));
        for begins in [false, true] {
            let (response, _stream) = open(&caller).await;
            let _open = begun(&mut soon(having.recv()).await.unwrap()).await;
            let mut call = soon(lacking.recv()).await.unwrap();
            let mut refuse = || {
                let mut response = Response::builder()
                    .header("content-type", "application/grpc")
                    .body(())
                    .unwrap();
                status(response.headers_mut(), Code::Unimplemented);
                call.respond.send_response(response, true).unwrap();
            };
            let (head, body) = if begins {
                let (head, mut body) = soon(response).await.unwrap().into_parts();
                tell(&server, Ok(event("milpa1")));
                assert_eq!(next(&mut body, &mut Vec::new()).await, event("milpa1"));
                refuse();
                (head, body)
            } else {
                refuse();
                soon(response).await.unwrap().into_parts()
            };
            let received = if head.headers.contains_key("grpc-status") {
                head.headers
            } else {
                end(body).await
            };
            let received = Status::from_header_map(&received).unwrap();
            assert_eq!(
                (received.code(), received.message(), received.details()),
                (Code::Unimplemented, "in its own words", b"\x00details".as_slice())
            );
        }
    }
}

/// Verifies F8.
#[tokio::test(flavor = "multi_thread")]
async fn event_stream_ends_with_the_first_part_that_ends() {
    let server = Setup::default().start();
    let caller = server.caller().await;
    {
        let (fake, mut calls) = runtime(&server, "containerd");
        let begin = async |calls: &mut mpsc::UnboundedReceiver<Call>| {
            let (response, stream) = open(&caller).await;
            let node = begun(&mut soon(calls.recv()).await.unwrap()).await;
            (node, soon(response).await.unwrap().into_body(), stream)
        };
        for code in [Code::Unavailable, Code::Ok] {
            let (mut node, body, _stream) = begin(&mut calls).await;
            node.send_trailers(trailers(code)).unwrap();
            assert_eq!(end(body).await, trailers(code));
        }
        let (mut node, mut body, _stream) = begin(&mut calls).await;
        node.send_reset(Reason::ENHANCE_YOUR_CALM);
        assert_eq!(
            soon(body.data()).await.unwrap().unwrap_err().reason(),
            Some(Reason::ENHANCE_YOUR_CALM)
        );

        // Compressed events are not accepted.
        let (mut node, body, _stream) = begin(&mut calls).await;
        node.send_data(Bytes::from_static(&[1, 0, 0, 0, 0]), false).unwrap();
        assert_eq!(Status::from_header_map(&end(body).await).unwrap().code(), Code::Internal);
        // A message above the limit.
        let (mut node, body, _stream) = begin(&mut calls).await;
        node.send_data(Bytes::from_static(&[0, 0xff, 0, 0, 0]), false).unwrap();
        assert_eq!(
            Status::from_header_map(&end(body).await).unwrap().code(),
            Code::ResourceExhausted
        );

        // A backend that lost events: the previous events are delivered first.
        let (mut node, mut body, _stream) = begin(&mut calls).await;
        tell(&server, Ok(event("milpa1")));
        tell(&server, Err(Status::resource_exhausted("lost")));
        assert_eq!(next(&mut body, &mut Vec::new()).await, event("milpa1"));
        let received = Status::from_header_map(&end(body).await).unwrap();
        assert_eq!((received.code(), received.message()), (Code::ResourceExhausted, "lost"));
        assert_eq!(
            soon(std::future::poll_fn(|cx| node.poll_reset(cx))).await.unwrap(),
            Reason::CANCEL,
            "the runtime's stream has ended"
        );

        let (_node, mut body, _stream) = begin(&mut calls).await;
        tell(&server, Ok(event("milpa1")));
        assert_eq!(next(&mut body, &mut Vec::new()).await, event("milpa1"));
        fake.stop().await;
    }
    // The runtime is down: the stream fails.
    let (response, _stream) = open(&caller).await;
    let head = soon(response).await.unwrap();
    assert_eq!(Status::from_header_map(head.headers()).unwrap().code(), Code::Unavailable);
}

#[tokio::test(flavor = "multi_thread")]
async fn connection_loss_ends_the_event_stream() {
    let server = Setup::default().start();
    let caller = server.caller().await;
    let (node, mut calls) = runtime(&server, "containerd");
    let (response, _stream) = open(&caller).await;
    let _call = soon(calls.recv()).await.unwrap();
    tell(&server, Ok(event("milpa1")));
    let mut body = soon(response).await.unwrap().into_body();
    assert_eq!(next(&mut body, &mut Vec::new()).await, event("milpa1"));
    // The calls are kept, because a dropped call is reset before the connection ends.
    drop(node);
    let received = Status::from_header_map(&end(body).await).unwrap();
    assert!(
        received.code() == Code::Unavailable && received.message().contains("containerd.sock"),
        "{received:?}"
    );
}

/// Verifies F9.
#[tokio::test(flavor = "multi_thread")]
async fn reader_that_leaves_events_unread_is_reset() {
    let server = Setup { client_timeout: SHORT, ..Setup::default() }.start();
    let caller = server.caller().await;
    let (_node, mut calls) = runtime(&server, "containerd");
    let (response, _stream) = open(&caller).await;
    let mut node = begun(&mut soon(calls.recv()).await.unwrap()).await;
    let mut body = soon(response).await.unwrap().into_body();
    // More than the flow-control windows.
    tell(&server, Ok(event(&"x".repeat(3 << 20))));
    let error = soon(async {
        loop {
            // No WINDOW_UPDATE is sent for received data.
            if let Err(error) = body.data().await.expect("the stream ends with an error") {
                return error;
            }
        }
    })
    .await;
    assert_eq!(error.reason(), Some(Reason::CANCEL));
    assert_eq!(soon(std::future::poll_fn(|cx| node.poll_reset(cx))).await.unwrap(), Reason::CANCEL);
    // A reader that reads in time stays, even if it reads little.
    let (response, _stream) = open(&caller).await;
    let _node = begun(&mut soon(calls.recv()).await.unwrap()).await;
    let mut body = soon(response).await.unwrap().into_body();
    tokio::time::sleep(2 * SHORT).await;
    tell(&server, Ok(event("milpa1")));
    assert_eq!(next(&mut body, &mut Vec::new()).await, event("milpa1"));
}

#[tokio::test(flavor = "multi_thread")]
async fn cancelled_event_stream_ends_at_all_backends() {
    let server = Setup::default().start();
    let caller = server.caller().await;
    let (_node, mut calls) = runtime(&server, "containerd");
    for begins in [false, true] {
        let (response, mut stream) = open(&caller).await;
        let mut call = soon(calls.recv()).await.unwrap();
        let readers = server.cells.events.lock().unwrap().clone();
        let reader = readers.last().unwrap();
        let mut node = if begins { Some(begun(&mut call).await) } else { None };
        let _body = if begins { Some(soon(response).await.unwrap()) } else { None };
        stream.send_reset(Reason::CANCEL);
        let reset = std::future::poll_fn(|cx| match &mut node {
            Some(node) => node.poll_reset(cx),
            None => call.respond.poll_reset(cx),
        });
        assert_eq!(soon(reset).await.unwrap(), Reason::CANCEL);
        soon(reader.closed()).await;
    }
}
