//! Compressed messages. They are forwarded, or refused by methods that have to read the message.

use kiyot::backends::Method;
use tonic::Code;

use crate::{
    fake_runtime::{FakeRuntime, read_all},
    server::Setup,
};

/// Returns a frame with the flag of a compressed message.
fn compressed(message: &[u8]) -> Vec<u8> {
    [&[1], (message.len() as u32).to_be_bytes().as_slice(), message].concat()
}

/// Verifies F15.
#[tokio::test(flavor = "multi_thread")]
async fn compressed_request_is_forwarded_to_the_node_or_refused() {
    let server = Setup::default().start();
    let _runtime = FakeRuntime::listen(&server.containerd(), |mut call| async move {
        assert_eq!(
            read_all(&mut call.body).await.unwrap(),
            compressed(b"squeezed"),
            "the request is unchanged"
        );
        assert_eq!(call.head.headers["grpc-encoding"], "gzip");
        call.answer(b"fine").await;
    });
    let caller = server.caller().await;
    // Calls of the node alone are forwarded.
    for path in [Method::Version.path(), "/runtime.v1.RuntimeService/NotYetKnown"] {
        let answer =
            caller.raw(path, &[("grpc-encoding", "gzip")], compressed(b"squeezed")).await.unwrap();
        assert_eq!(answer.ok(), b"fine", "{path}");
    }
    // The message decides the backend of these calls.
    for method in
        [Method::RunPodSandbox, Method::StopContainer, Method::ListContainers, Method::ImageStatus]
    {
        let answer = caller
            .raw(method.path(), &[("grpc-encoding", "gzip")], compressed(b"squeezed"))
            .await
            .unwrap();
        assert_eq!(answer.code(), Code::Unimplemented as i32, "{method}");
        assert!(
            answer.message().contains("compressed")
                && answer.message().contains(&method.to_string()),
            "{}",
            answer.message()
        );
        assert_eq!(answer.metadata("grpc-accept-encoding"), "identity");
    }
    // The connection is still usable.
    assert_eq!(
        caller
            .raw(Method::Version.path(), &[("grpc-encoding", "gzip")], compressed(b"squeezed"))
            .await
            .unwrap()
            .ok(),
        b"fine"
    );
}

/// Verifies F15.
#[tokio::test(flavor = "multi_thread")]
async fn compressed_request_with_a_single_backend_is_forwarded() {
    let server = Setup { cells: false, ..Setup::default() }.start();
    let _runtime = FakeRuntime::constant(&server.containerd(), b"fine".to_vec());
    let caller = server.caller().await;
    for &method in Method::ALL {
        let answer = caller
            .raw(method.path(), &[("grpc-encoding", "gzip")], compressed(b"squeezed"))
            .await
            .unwrap();
        assert_eq!(answer.ok(), b"fine", "{method}");
    }
}

/// Verifies F15.
#[tokio::test(flavor = "multi_thread")]
async fn compressed_list_of_a_runtime_is_an_error() {
    let server = Setup::default().start();
    let _runtime = FakeRuntime::listen(&server.containerd(), |mut call| async move {
        let _ = read_all(&mut call.body).await;
        let head = http::Response::builder()
            .header("content-type", "application/grpc")
            .header("grpc-encoding", "gzip")
            .body(())
            .unwrap();
        let mut stream = call.respond.send_response(head, false).unwrap();
        stream.send_data(compressed(b"squeezed").into(), false).unwrap();
        stream.send_trailers(crate::fake_runtime::ok_trailers()).unwrap();
    });
    server.cells.snapshots.lock().unwrap().insert(Method::ListContainers, Ok(vec![0x0a, 0]));
    let answer = server.caller().await.call(Method::ListContainers, b"").await;
    assert_eq!(answer.code(), Code::Internal as i32);
    assert!(answer.message().contains("compressed"), "{}", answer.message());
}
