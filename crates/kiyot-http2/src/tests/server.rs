//! This server with the client of the crate h2, over pieces of bytes.

use std::task::Poll;

use futures::{StreamExt, stream::FuturesUnordered};
use h2::client;
use http::{HeaderMap, Response};

use super::*;
use crate::{
    RecvStream,
    server::{self, Connection, SendResponse},
};

/// Echoes metadata and body, and sends the metadata as trailers too.
async fn echo(request: Request<RecvStream>, responding: SendResponse) {
    let (head, mut body) = request.into_parts();
    let mut answer = Response::new(()).into_parts().0;
    answer.headers = head.headers.clone();
    let Ok(mut sending) = responding.send_response(&answer, false) else { return };
    while let Some(part) = body.data().await {
        sending.send_data(part.unwrap());
        if poll_fn(|cx| sending.poll_ready(cx)).await.is_err() {
            return;
        }
    }
    assert!(body.trailers().await.unwrap().is_none());
    sending.finish(Some(head.headers));
}

/// Drives a connection until it ends.
async fn serve(mut serving: Connection) {
    let mut calls = FuturesUnordered::new();
    poll_fn(|cx| {
        loop {
            let read = serving.poll_read(cx);
            if !matches!(read, Poll::Ready(Ok(true)) | Poll::Pending) {
                return Poll::Ready(());
            }
            while let Some((request, responding)) = serving.accept() {
                calls.push(echo(request, responding));
            }
            while let Poll::Ready(Some(())) = calls.poll_next_unpin(cx) {}
            let could_read = serving.may_read();
            if matches!(serving.poll_write(cx), Poll::Ready(Err(_))) {
                return Poll::Ready(());
            }
            if read.is_pending() && (could_read || !serving.may_read()) {
                return Poll::Pending;
            }
        }
    })
    .await;
}

async fn call(
    sender: client::SendRequest<Bytes>,
    metadata: Metadata,
    parts: Vec<Bytes>,
) -> (HeaderMap, Vec<u8>, Option<HeaderMap>) {
    let (response, mut stream) =
        sender.ready().await.unwrap().send_request(request(&metadata), false).unwrap();
    let send = async {
        for part in parts {
            send_part(&mut stream, part).await;
        }
        stream.send_data(Bytes::new(), true).unwrap();
    };
    let receive = async {
        let (head, mut receiving) = response.await.unwrap().into_parts();
        let mut body = Vec::new();
        while let Some(part) = receiving.data().await {
            let part = part.unwrap();
            receiving.flow_control().release_capacity(part.len()).unwrap();
            body.extend_from_slice(&part);
        }
        (head.headers, body, receiving.trailers().await.unwrap())
    };
    tokio::join!(send, receive).1
}

proptest! {
    #![proptest_config(few_cases())]

    /// Verifies F19.
    #[test]
    fn echoed_requests_are_returned_unchanged(
        calls in calls(),
        cuts in cuts(),
        window in prop_oneof![100_u32..2000, 60_000_u32..1 << 20],
        most in 1_u32..8,
    ) {
        within(async {
            let (ours, theirs, mut tasks) = joined(cuts);
            tasks.spawn(serve(server::handshake(ours, most).unwrap()));
            let mut builder = client::Builder::new();
            builder
                .initial_window_size(window)
                .max_header_list_size(1 << 20)
                .initial_max_send_streams(0);
            let (sender, connection) = builder.handshake(theirs).await.unwrap();
            tasks.spawn(async move { drop(connection.await) });
            let mut running = JoinSet::new();
            for (number, (metadata, lengths)) in calls.into_iter().enumerate() {
                let parts: Vec<Bytes> =
                    lengths.iter().map(|&length| vec![number as u8; length].into()).collect();
                let sender = sender.clone();
                running.spawn(async move {
                    let expected = parts.concat();
                    let sent = request(&metadata).into_parts().0.headers;
                    let (head, body, trailers) = call(sender, metadata, parts).await;
                    assert!(body == expected);
                    assert_eq!((&head, trailers.as_ref()), (&sent, Some(&sent)));
                });
            }
            while let Some(ended) = running.join_next().await {
                ended.unwrap();
            }
        });
    }
}
