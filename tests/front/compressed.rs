//! Messages that are compressed: passed on, or refused where they must be read.

use kiyot::backends::Method;
use tonic::Code;

use crate::{
    door::Setup,
    played::{Played, read_all},
};

/// A frame that says that its message is compressed.
fn compressed(message: &[u8]) -> Vec<u8> {
    [&[1], (message.len() as u32).to_be_bytes().as_slice(), message].concat()
}

/// Verifies F15.
#[tokio::test(flavor = "multi_thread")]
async fn a_compressed_request_is_passed_on_or_refused_by_name() {
    let door = Setup::default().open();
    let _runtime = Played::listen(&door.containerd(), |mut call| async move {
        assert_eq!(
            read_all(&mut call.body).await.unwrap(),
            compressed(b"squeezed"),
            "as it was sent"
        );
        assert_eq!(call.head.headers["grpc-encoding"], "gzip");
        call.answer(b"fine").await;
    });
    let caller = door.caller().await;
    // What is nobody's but the node's goes there as it is.
    for path in [Method::Version.path(), "/runtime.v1.RuntimeService/NotYetKnown"] {
        let answer =
            caller.raw(path, &[("grpc-encoding", "gzip")], compressed(b"squeezed")).await.unwrap();
        assert_eq!(answer.ok(), b"fine", "{path}");
    }
    // Whose these are is in the message.
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
    // The connection is as good as before.
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
async fn without_other_backends_every_compressed_request_is_passed_on() {
    let door = Setup { cells: false, ..Setup::default() }.open();
    let _runtime = Played::constant(&door.containerd(), b"fine".to_vec());
    let caller = door.caller().await;
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
async fn a_list_that_comes_compressed_though_nobody_takes_that_is_an_error() {
    let door = Setup::default().open();
    let _runtime = Played::listen(&door.containerd(), |mut call| async move {
        let _ = read_all(&mut call.body).await;
        let head = http::Response::builder()
            .header("content-type", "application/grpc")
            .header("grpc-encoding", "gzip")
            .body(())
            .unwrap();
        let mut stream = call.respond.send_response(head, false).unwrap();
        stream.send_data(compressed(b"squeezed").into(), false).unwrap();
        stream.send_trailers(crate::played::ok_trailers()).unwrap();
    });
    door.cells.snapshots.lock().unwrap().insert(Method::ListContainers, Ok(vec![0x0a, 0]));
    let answer = door.caller().await.call(Method::ListContainers, b"").await;
    assert_eq!(answer.code(), Code::Internal as i32);
    assert!(answer.message().contains("compressed"), "{}", answer.message());
}
