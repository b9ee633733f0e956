//! Draining and stopping of the server.

use std::{sync::atomic::Ordering, time::Duration};

use bytes::Bytes;
use kiyot::backends::Method;
use tokio::{net::UnixStream, sync::mpsc};

use crate::{
    caller::{LONG, frame, soon},
    fake_runtime::FakeRuntime,
    server::Setup,
};

/// Verifies F14.
#[tokio::test(flavor = "multi_thread")]
async fn drain_waits_for_open_calls() {
    let server = Setup::default().start();
    let (began, mut begins) = mpsc::unbounded_channel();
    let (go_on, wait) = tokio::sync::watch::channel(false);
    let _runtime = FakeRuntime::listen(&server.containerd(), move |call| {
        let (began, mut wait) = (began.clone(), wait.clone());
        async move {
            began.send(()).unwrap();
            wait.wait_for(|go_on| *go_on).await.unwrap();
            call.answer(b"done").await;
        }
    });
    let caller = server.caller().await;
    let idle = server.caller().await;
    let call = tokio::spawn({
        let caller = caller.clone();
        async move { caller.call(Method::Version, b"").await }
    });
    soon(begins.recv()).await.unwrap();
    let address = server.running.address.clone();
    let drained = tokio::spawn(async move { server.running.drain.drain(LONG).await });
    // New connections are refused.
    soon(async {
        while UnixStream::connect(&address).await.is_ok() {
            tokio::task::yield_now().await;
        }
    })
    .await;
    assert!(!drained.is_finished());
    go_on.send(true).unwrap();
    assert_eq!(soon(call).await.unwrap().ok(), b"done");
    assert!(soon(drained).await.unwrap());
    assert!(!address.exists());
    drop((caller, idle));
}

/// Verifies F17.
#[tokio::test(flavor = "multi_thread")]
async fn stuck_thread_does_not_answer_the_watchdog() {
    let server = Setup::default().start();
    let caller = server.caller().await;
    let watchdog = server.running.watchdog.clone();
    soon(watchdog.ping()).await;
    // The thread itself answers from memory, and waits for the lock that this thread holds.
    let (cells, (held, is_held), (release, released)) =
        (server.cells.clone(), std::sync::mpsc::channel(), std::sync::mpsc::channel::<()>());
    let holder = std::thread::spawn(move || {
        let _snapshots = cells.snapshots.lock().unwrap();
        held.send(()).unwrap();
        released.recv().unwrap();
    });
    is_held.recv().unwrap();
    let call = tokio::spawn(async move { caller.call(Method::ExecSync, b"\n\x06milpa1").await });
    soon(async {
        while server.cells.in_snapshot.load(Ordering::SeqCst) == 0 {
            tokio::task::yield_now().await;
        }
    })
    .await;
    assert!(tokio::time::timeout(Duration::from_millis(200), watchdog.ping()).await.is_err());
    release.send(()).unwrap();
    soon(watchdog.ping()).await;
    assert_eq!(soon(call).await.unwrap().ok(), b"cells: ExecSync");
    holder.join().unwrap();
    // The ended thread does not answer either.
    assert!(server.running.drain.drain(LONG).await);
    assert!(tokio::time::timeout(Duration::from_millis(200), watchdog.ping()).await.is_err());
}

/// Sends a message when dropped.
struct Said(mpsc::UnboundedSender<()>);

impl Drop for Said {
    fn drop(&mut self) {
        let _ = self.0.send(());
    }
}

/// Verifies F14.
#[tokio::test(flavor = "multi_thread")]
async fn drain_cuts_open_calls_after_its_timeout() {
    let server = Setup::default().start();
    let (began, mut begins) = mpsc::unbounded_channel();
    let (ended, mut ends) = mpsc::unbounded_channel();
    let _runtime = FakeRuntime::listen(&server.containerd(), move |mut call| {
        let (began, ended) = (began.clone(), ended.clone());
        async move {
            let _ended = Said(ended);
            began.send(()).unwrap();
            let _ = std::future::poll_fn(|cx| call.respond.poll_reset(cx)).await;
        }
    });
    let caller = server.caller().await;
    let (response, mut stream) = caller.begin(Method::Version.path(), &[]).await;
    stream.send_data(Bytes::from(frame(b"")), true).unwrap();
    soon(begins.recv()).await.unwrap();
    assert!(!soon(server.running.drain.drain(Duration::from_millis(50))).await);
    assert!(soon(response).await.is_err());
    soon(ends.recv()).await.unwrap();
    soon(server.running.drain.ended()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn dropped_handle_closes_the_socket() {
    let server = Setup::default().start();
    let caller = server.caller().await;
    let (response, _stream) = caller.begin(Method::ExecSync.path(), &[]).await;
    let address = server.running.address.clone();
    let dir = server.dir;
    drop(server.running);
    assert!(soon(response).await.is_err());
    soon(async {
        while address.exists() {
            tokio::task::yield_now().await;
        }
    })
    .await;
    drop(dir);
}
