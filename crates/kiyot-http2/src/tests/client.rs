//! This client with the server of the crate h2, over pieces of bytes.

use h2::{Reason, server};
use http::{HeaderMap, HeaderValue, Response, request::Parts};

use super::*;
use crate::{
    Error,
    client::{SendRequest, handshake},
};

/// Connects to a server that handles each request with `serve`.
async fn with<F: Future<Output = ()> + Send + 'static>(
    builder: server::Builder,
    cuts: Vec<usize>,
    serve: impl Fn(Request<h2::RecvStream>, server::SendResponse<Bytes>) -> F + Send + 'static,
) -> (SendRequest, JoinSet<()>) {
    let (ours, theirs, mut tasks) = joined(cuts);
    tasks.spawn(async move {
        let mut connection = builder.handshake(theirs).await.unwrap();
        let mut calls = JoinSet::new();
        while let Some(Ok((request, send_response))) = connection.accept().await {
            calls.spawn(serve(request, send_response));
        }
    });
    let (client, connection) = handshake(ours).await.unwrap();
    tasks.spawn(async move { drop(connection.await) });
    (client, tasks)
}

fn head(metadata: &[(String, String)]) -> Parts {
    request(metadata).into_parts().0
}

/// Echoes metadata and body, and sends the metadata as trailers too.
async fn echo(
    mut request: Request<h2::RecvStream>,
    mut send_response: server::SendResponse<Bytes>,
) {
    let mut head = Response::new(());
    *head.headers_mut() = request.headers().clone();
    let trailers = request.headers().clone();
    let Ok(mut stream) = send_response.send_response(head, false) else { return };
    let body = request.body_mut();
    while let Some(Ok(part)) = body.data().await {
        let _ = body.flow_control().release_capacity(part.len());
        send_part(&mut stream, part).await;
    }
    let _ = stream.send_trailers(trailers);
}

async fn call(
    client: SendRequest,
    metadata: Metadata,
    parts: Vec<Bytes>,
) -> (HeaderMap, Vec<u8>, Option<HeaderMap>) {
    let mut parts = parts.into_iter();
    let first = parts.next().unwrap_or_default();
    let ended = parts.len() == 0;
    let (answering, mut sending) = client.send_request(&head(&metadata), &first, ended).unwrap();
    let send = async {
        for part in parts {
            poll_fn(|cx| sending.poll_ready(cx)).await.unwrap();
            sending.send_data(part);
        }
        if !ended {
            poll_fn(|cx| sending.poll_ready(cx)).await.unwrap();
            sending.finish(None);
        }
    };
    let receive = async {
        let (head, mut receiving) = answering.await.unwrap().into_parts();
        let mut body = Vec::new();
        while let Some(part) = receiving.data().await {
            body.extend_from_slice(&part.unwrap());
        }
        let trailers = receiving.trailers().await.unwrap();
        assert!(receiving.is_end_stream());
        (head.headers, body, trailers)
    };
    tokio::join!(send, receive).1
}

proptest! {
    #![proptest_config(few_cases())]

    /// Verifies F18.
    #[test]
    fn echoed_requests_are_returned_unchanged(
        calls in calls(),
        cuts in cuts(),
        window in prop_oneof![100_u32..2000, 60_000_u32..1 << 20],
        most in 1_u32..8,
    ) {
        within(async {
            let mut builder = server::Builder::new();
            builder
                .initial_window_size(window)
                .max_concurrent_streams(most)
                .max_header_list_size(1 << 20);
            let (client, _tasks) = with(builder, cuts, echo).await;
            let mut running = JoinSet::new();
            for (number, (metadata, lengths)) in calls.into_iter().enumerate() {
                let part = |length| (0..length).map(|at| (at ^ number) as u8).collect();
                let parts: Vec<Bytes> = lengths.into_iter().map(part).collect();
                let client = client.clone();
                running.spawn(async move {
                    let expected = head(&metadata).headers;
                    let (headers, body, trailers) = call(client, metadata, parts.clone()).await;
                    assert_eq!(headers, expected);
                    assert!(body == parts.concat());
                    assert_eq!(trailers, Some(expected));
                });
            }
            while let Some(ended) = running.join_next().await {
                ended.unwrap();
            }
        });
    }
}

#[test]
fn dropped_request_is_cancelled_and_waiting_request_opens() {
    within(async {
        let (sender, mut resets) = tokio::sync::mpsc::unbounded_channel();
        let mut builder = server::Builder::new();
        builder.max_concurrent_streams(1);
        let (client, _tasks) = with(builder, vec![1 << 16], move |_request, mut send_response| {
            let sender = sender.clone();
            async move {
                sender.send(None).unwrap();
                sender
                    .send(Some(poll_fn(|cx| send_response.poll_reset(cx)).await.unwrap()))
                    .unwrap();
            }
        })
        .await;
        let first = client.send_request(&head(&[]), &Bytes::new(), true).unwrap();
        assert_eq!(resets.recv().await, Some(None));
        let second = client.send_request(&head(&[]), &Bytes::new(), true).unwrap();
        // Never sent, so never received.
        drop(client.send_request(&head(&[]), &Bytes::new(), true).unwrap());
        drop(first);
        assert_eq!(resets.recv().await, Some(Some(Reason::CANCEL)));
        assert_eq!(resets.recv().await, Some(None));
        drop(second);
        assert_eq!(resets.recv().await, Some(Some(Reason::CANCEL)));
    });
}

#[test]
fn connection_end_fails_all_waiting_streams() {
    within(async {
        let mut builder = server::Builder::new();
        builder.max_concurrent_streams(2);
        let (client, mut tasks) =
            with(builder, vec![1 << 16], |_request, mut send_response| async move {
                let mut head = Response::new(());
                head.headers_mut().insert("x", HeaderValue::from_static("y"));
                let mut stream = send_response.send_response(head, false).unwrap();
                stream.send_data(Bytes::from_static(b"some"), false).unwrap();
                std::future::pending::<()>().await;
            })
            .await;
        let begin = || client.send_request(&head(&[]), &Bytes::new(), true).unwrap();
        let ((first, _a), (second, _b), (third, _c)) = (begin(), begin(), begin());
        let mut first = first.await.unwrap().into_body();
        let second = second.await.unwrap().into_body();
        assert_eq!(first.data().await.unwrap().unwrap(), "some");
        tasks.abort_all();
        let lost = first.data().await.unwrap().unwrap_err();
        assert!(matches!(lost, Error::Closed | Error::Aborted | Error::Io(_)), "{lost:?}");
        assert!(!lost.is_retryable() && lost.reset_reason().is_none());
        assert!(third.await.unwrap_err().is_retryable(), "the request was never sent");
        drop(second);
        assert!(client.send_request(&head(&[]), &Bytes::new(), true).is_err());
    });
}

/// A restarting runtime: requests that could not be written go to the next connection.
/// Verifies F18.
#[test]
fn request_during_close_by_peer_is_retryable() {
    within(async {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.write_all(&[0, 0, 0, 4, 0, 0, 0, 0, 0]).await.unwrap();
        let (client, connection) = handshake(ours).await.unwrap();
        let (answering, _sending) = client.send_request(&head(&[]), &Bytes::new(), true).unwrap();
        drop(theirs);
        assert!(connection.await.is_err());
        assert!(answering.await.unwrap_err().is_retryable());
    });
}
