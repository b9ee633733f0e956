//! Calls to a slow fake containerd, by callers that cancel.

use std::{
    convert::Infallible,
    path::Path,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
};

use http_body_util::BodyExt as _;
use kiyot_proto::cri;
use kiyot_testkit::wait_for;
use prost::Message;
use tokio::{net::UnixListener, sync::Notify, task::JoinHandle};
use tonic::{server::NamedService, transport::Server};

use super::*;

/// Progress of the calls to the fake.
#[derive(Default)]
struct CallCounts {
    begun: AtomicUsize,
    cancelled: AtomicUsize,
    done: AtomicUsize,
    release: Notify,
}

/// Counts a cancellation on drop.
struct CancelProbe(Arc<CallCounts>);

impl Drop for CancelProbe {
    fn drop(&mut self) {
        self.0.cancelled.fetch_add(1, Ordering::SeqCst);
    }
}

#[derive(Clone)]
struct FakeContainerd(Arc<CallCounts>);

impl NamedService for FakeContainerd {
    const NAME: &'static str = "runtime.v1.RuntimeService";
}

impl Service<Request<Body>> for FakeContainerd {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let calls = Arc::clone(&self.0);
        Box::pin(async move {
            // `Status` is the probe that `Runtime` sends on a new connection.
            if !request.uri().path().ends_with("/Status") {
                let whole = request.into_body().collect().await;
                calls.begun.fetch_add(1, Ordering::SeqCst);
                assert!(whole.is_ok());
                let call = CancelProbe(Arc::clone(&calls));
                calls.release.notified().await;
                std::mem::forget(call);
                calls.done.fetch_add(1, Ordering::SeqCst);
            }
            Ok(Status::aborted("fake").into_http())
        })
    }
}

fn serve(
    socket: &Path,
    calls: &Arc<CallCounts>,
) -> JoinHandle<Result<(), tonic::transport::Error>> {
    let listener = UnixListener::bind(socket).unwrap();
    let incoming = futures::stream::unfold(listener, |listener| async {
        Some((listener.accept().await.map(|(stream, _)| stream), listener))
    });
    tokio::spawn(
        Server::builder()
            .add_service(FakeContainerd(Arc::clone(calls)))
            .serve_with_incoming(incoming),
    )
}

fn request(method: &str) -> Request<Body> {
    let message = cri::StartContainerRequest { container_id: "one".to_owned() }.encode_to_vec();
    let mut frame = vec![0];
    frame.extend((message.len() as u32).to_be_bytes());
    frame.extend(message);
    Request::post(format!("http://cell/runtime.v1.RuntimeService/{method}"))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .header(GRPC_TIMEOUT_HEADER, "100S")
        .body(Body::new(http_body_util::Full::new(Bytes::from(frame))))
        .unwrap()
}

/// Verifies X12.
#[tokio::test]
async fn mutating_call_whose_connection_is_lost_completes() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("containerd.sock");
    let calls = Arc::new(CallCounts::default());
    let server = serve(&socket, &calls);
    let (runtime, changing) = (Runtime::new(socket), Arc::new(ChangingCalls::new(1)));
    let cut = async |method: &str| {
        let before = calls.begun.load(Ordering::SeqCst);
        let (runtime, changing, request) =
            (runtime.clone(), Arc::clone(&changing), request(method));
        let call = tokio::spawn(async move { forward(&runtime, &changing, request).await });
        wait_for("the call has begun", || calls.begun.load(Ordering::SeqCst) > before).await;
        // Drops the call, as the loss of its connection does.
        call.abort();
        assert!(call.await.unwrap_err().is_cancelled());
    };
    cut("StartContainer").await;
    assert!(changing.is_any_running(), "the call is detached");
    // The only permit is taken, and ExecSync is not detached.
    cut("StartContainer").await;
    wait_for("a call is cancelled", || calls.cancelled.load(Ordering::SeqCst) == 1).await;
    cut("ExecSync").await;
    wait_for("a call is cancelled", || calls.cancelled.load(Ordering::SeqCst) == 2).await;
    calls.release.notify_one();
    wait_for("the detached call is done", || {
        calls.done.load(Ordering::SeqCst) == 1 && !changing.is_any_running()
    })
    .await;
    // A caller that waits gets the response.
    calls.release.notify_one();
    let answer = forward(&runtime, &changing, request("StartContainer")).await;
    assert_eq!(answer.headers().get("grpc-message").unwrap(), "fake");
    assert_eq!(calls.cancelled.load(Ordering::SeqCst), 2);
    server.abort();
}
