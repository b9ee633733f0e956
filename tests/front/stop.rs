//! How the front door closes.

use std::time::Duration;

use bytes::Bytes;
use kiyot::backends::Method;
use tokio::{net::UnixStream, sync::mpsc};

use crate::{
    caller::{LONG, frame, soon},
    door::Setup,
    played::Played,
};

/// Verifies F14.
#[tokio::test(flavor = "multi_thread")]
async fn calls_that_are_open_may_end() {
    let door = Setup::default().open();
    let (began, mut begins) = mpsc::unbounded_channel();
    let (go_on, wait) = tokio::sync::watch::channel(false);
    let _runtime = Played::listen(&door.containerd(), move |call| {
        let (began, mut wait) = (began.clone(), wait.clone());
        async move {
            began.send(()).unwrap();
            wait.wait_for(|go_on| *go_on).await.unwrap();
            call.answer(b"done").await;
        }
    });
    let caller = door.caller().await;
    let idle = door.caller().await;
    let call = tokio::spawn({
        let caller = caller.clone();
        async move { caller.call(Method::Version, b"").await }
    });
    soon(begins.recv()).await.unwrap();
    let address = door.bound.address.clone();
    let drained = tokio::spawn(async move { door.bound.drain.drain(LONG).await });
    // No new connections.
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
async fn a_thread_that_is_stuck_has_no_pulse() {
    let door = Setup::default().open();
    let caller = door.caller().await;
    let watchdog = door.bound.watchdog.clone();
    soon(watchdog.ping()).await;
    // An answer from memory is given on the thread itself, which waits for what this one holds.
    let (cells, (held, is_held), (release, released)) =
        (door.cells.clone(), std::sync::mpsc::channel(), std::sync::mpsc::channel::<()>());
    let holder = std::thread::spawn(move || {
        let _snapshots = cells.snapshots.lock().unwrap();
        held.send(()).unwrap();
        released.recv().unwrap();
    });
    is_held.recv().unwrap();
    let call = tokio::spawn(async move { caller.call(Method::ExecSync, b"\n\x06milpa1").await });
    soon(async {
        while tokio::time::timeout(Duration::from_millis(200), watchdog.ping()).await.is_ok() {}
    })
    .await;
    release.send(()).unwrap();
    soon(watchdog.ping()).await;
    assert_eq!(soon(call).await.unwrap().ok(), b"cells: ExecSync");
    holder.join().unwrap();
    // After its end there is none either.
    assert!(door.bound.drain.drain(LONG).await);
    assert!(tokio::time::timeout(Duration::from_millis(200), watchdog.ping()).await.is_err());
}

/// Says that it was dropped.
struct Said(mpsc::UnboundedSender<()>);

impl Drop for Said {
    fn drop(&mut self) {
        let _ = self.0.send(());
    }
}

/// Verifies F14.
#[tokio::test(flavor = "multi_thread")]
async fn calls_that_do_not_end_are_cut() {
    let door = Setup::default().open();
    let (began, mut begins) = mpsc::unbounded_channel();
    let (ended, mut ends) = mpsc::unbounded_channel();
    let _runtime = Played::listen(&door.containerd(), move |mut call| {
        let (began, ended) = (began.clone(), ended.clone());
        async move {
            let _ended = Said(ended);
            began.send(()).unwrap();
            let _ = std::future::poll_fn(|cx| call.respond.poll_reset(cx)).await;
        }
    });
    let caller = door.caller().await;
    let (response, mut stream) = caller.begin(Method::Version.path(), &[]).await;
    stream.send_data(Bytes::from(frame(b"")), true).unwrap();
    soon(begins.recv()).await.unwrap();
    assert!(!soon(door.bound.drain.drain(Duration::from_millis(50))).await);
    assert!(soon(response).await.is_err());
    soon(ends.recv()).await.unwrap();
    soon(door.bound.drain.ended()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn dropping_the_handle_closes_the_door() {
    let door = Setup::default().open();
    let caller = door.caller().await;
    let (response, _stream) = caller.begin(Method::ExecSync.path(), &[]).await;
    let address = door.bound.address.clone();
    let dir = door.dir;
    drop(door.bound);
    assert!(soon(response).await.is_err());
    soon(async {
        while address.exists() {
            tokio::task::yield_now().await;
        }
    })
    .await;
    drop(dir);
}
