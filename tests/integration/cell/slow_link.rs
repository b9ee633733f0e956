//! Distant cell: a link with little bandwidth and high latency between agent and gateway.

use std::{path::Path, sync::Arc, time::Duration};

use kiyot_testkit::{Container, Kiyot, LIMIT, Node, Pod, Source, wait_until};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{UnixListener, UnixStream},
    sync::{Mutex, mpsc},
    time::{Instant, sleep, sleep_until},
};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::{WAIT, options, remove_and_assert_clean};

/// Latency of each byte.
const LATENCY: Duration = Duration::from_millis(100);
/// Bytes that are sent at once, at [`PART_TIME`] each: 512 KiB a second for both directions and all
/// connections together.
const PART_BYTES: usize = 16 * 1024;
const PART_TIME: Duration = Duration::from_millis(31);
/// Maximum number of parts in flight.
const MAX_PARTS_IN_FLIGHT: usize = 16;

/// Slow proxy in the place of the gateway's socket.
struct SlowLink {
    carried: Arc<std::sync::atomic::AtomicUsize>,
    _end: DropGuard,
}

impl SlowLink {
    fn between(state: &Path) -> Self {
        let (near, far) = (state.join("gateway.sock"), state.join("far.sock"));
        std::fs::rename(&near, &far).unwrap();
        let listener = UnixListener::bind(&near).unwrap();
        let (end, narrow) = (CancellationToken::new(), Arc::new(Mutex::new(())));
        let carried = Arc::new(std::sync::atomic::AtomicUsize::new(0));
        let (all, count) = (end.clone(), carried.clone());
        tokio::spawn(end.clone().run_until_cancelled_owned(async move {
            loop {
                let (one, _) = listener.accept().await.unwrap();
                let other = UnixStream::connect(&far).await.unwrap();
                let ((from_one, to_one), (from_other, to_other)) =
                    (one.into_split(), other.into_split());
                for (from, to) in [(from_one, to_other), (from_other, to_one)] {
                    tokio::spawn(all.clone().run_until_cancelled_owned(copy_slowly(
                        from,
                        to,
                        narrow.clone(),
                        count.clone(),
                    )));
                }
            }
        }));
        Self { carried, _end: end.drop_guard() }
    }
}

async fn copy_slowly(
    mut from: tokio::net::unix::OwnedReadHalf,
    mut to: tokio::net::unix::OwnedWriteHalf,
    narrow: Arc<Mutex<()>>,
    carried: Arc<std::sync::atomic::AtomicUsize>,
) {
    let (sender, mut parts) = mpsc::channel::<(Instant, Vec<u8>)>(MAX_PARTS_IN_FLIGHT);
    let read = async move {
        let mut part = vec![0; PART_BYTES];
        while let Ok(length @ 1..) = from.read(&mut part).await {
            // In the order of arrival, so that no connection starves.
            let _turn = narrow.lock().await;
            sleep(PART_TIME.mul_f64(length as f64 / PART_BYTES as f64)).await;
            carried.fetch_add(length, std::sync::atomic::Ordering::Relaxed);
            if sender.send((Instant::now() + LATENCY, part[..length].to_vec())).await.is_err() {
                return;
            }
        }
    };
    let write = async move {
        while let Some((due, part)) = parts.recv().await {
            sleep_until(due).await;
            if to.write_all(&part).await.is_err() {
                return;
            }
        }
        let _ = to.shutdown().await;
    };
    tokio::join!(read, write);
}

/// Verifies L9.
#[tokio::test]
async fn pod_behind_a_slow_link_works() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let link = SlowLink::between(&kiyot.state());
    let mut kubelet = kiyot.kubelet().await;
    let large = "x".repeat(512 * 1024);
    let spec = Pod::new("far-away")
        .in_cell()
        .volume(
            "settings",
            Source::ConfigMap(Source::files(&[("colour", "blue"), ("large", &large)])),
        )
        .container(
            Container::script(
                "main",
                &format!(
                    "wc -c < /settings/large; i=0; while [ $i -lt 4000 ]; do i=$((i+1)); \
                    echo line $i of many; done; {WAIT}"
                ),
            )
            .mount("settings", "/settings"),
        );
    // Its image is copied over the slow link, too.
    let running = kubelet.run_pod(&spec).await.unwrap();
    let main = running.container("main").clone();
    // While its log is copied, calls are answered, both those that need the cell and those that do
    // not.
    assert_eq!(kubelet.exec_sync(&main.id, &["echo", "here"]).await.unwrap().stdout, "here\n");
    assert!(kubelet.sandboxes().await.unwrap().iter().any(|listed| listed.id == running.sandbox));
    kubelet.logged(&main, "line 4000 of many").await;
    let lines = kubelet.log_lines(&main);
    assert_eq!(
        (lines[0].text.as_str(), lines.len()),
        ("524288", 4001),
        "volume and log are complete"
    );
    assert!(
        lines[1..]
            .iter()
            .enumerate()
            .all(|(at, line)| line.text == format!("line {} of many", at + 1))
    );
    // A volume update arrives, and the usage is reported.
    kubelet.update_volume(
        &spec,
        "settings",
        &Source::files(&[("colour", "red"), ("large", &large)]),
    );
    wait_until("the update has arrived", LIMIT, async || {
        (kubelet.exec_sync(&main.id, &["cat", "/settings/colour"]).await.ok()?.stdout == "red")
            .then_some(())
    })
    .await;
    wait_until("its usage is reported", LIMIT, async || {
        let request = kiyot_testkit::cri::ContainerStatsRequest { container_id: main.id.clone() };
        kubelet.runtime.container_stats(request).await.ok()?.into_inner().stats?.memory
    })
    .await;
    // All bytes took the slow link, and not the gateway's own socket.
    assert!(link.carried.load(std::sync::atomic::Ordering::Relaxed) > 2 * 512 * 1024);
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}
