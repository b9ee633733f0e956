//! Full and read-only disks, and unreadable records.

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::Command,
};

use kiyot_testkit::{Container, Kiyot, LIMIT, Leftovers, Node, Pod, Source, cri, wait_until};
use redb::TableDefinition;

use crate::cell::{WAIT, assert_nothing_left, is_ready, options, pod, remove_and_assert_clean};

/// A tmpfs that is unmounted when dropped.
pub(crate) struct Disk(PathBuf);

impl Disk {
    pub(crate) fn mount(path: &Path, options: &str) -> Self {
        fs::create_dir_all(path).unwrap();
        mount(&["-t", "tmpfs", "-o", options, "tmpfs"], path);
        Self(path.to_owned())
    }

    pub(crate) fn again(&self, options: &str) {
        mount(&["-o", &format!("remount,{options}")], &self.0);
    }

    /// Fills the disk. Returns the file that takes the space.
    fn fill(&self) -> PathBuf {
        let path = self.0.join("filler");
        let mut file = fs::File::create(&path).unwrap();
        for size in [1 << 20, 4096, 1] {
            while file.write_all(&vec![0; size]).is_ok() {}
        }
        path
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

fn mount(arguments: &[&str], path: &Path) {
    assert!(
        Command::new("mount").args(arguments).arg(path).status().unwrap().success(),
        "mount {arguments:?}"
    );
}

/// Verifies X5.
#[tokio::test]
async fn full_state_dir_harms_no_pod_and_the_daemon_recovers() {
    let node = Node::start().await;
    let disk = Disk::mount(&node.directory().join("kiyot/state"), "size=256m");
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let running = kubelet.run_pod(&pod("first", WAIT)).await.unwrap();
    let main = running.container("main").id.clone();
    let filler = disk.fill();

    let second = pod("second", WAIT);
    let config = kubelet.prepare(&second);
    let refused = kubelet.run_sandbox(&config, "").await.unwrap_err();
    // The text is from the daemon or from the first failure in containerd, which begins in lower
    // case.
    let words = refused.message().to_lowercase();
    assert!(
        words.contains("no space left on device") || words.contains("no space is left"),
        "{refused:?}"
    );
    assert_eq!(kubelet.sandboxes().await.unwrap().len(), 1, "no incomplete pod is listed");
    assert!(is_ready(&mut kubelet, &running.sandbox).await);
    assert_eq!(
        kubelet.container_status(&main).await.unwrap().state(),
        cri::ContainerState::ContainerRunning
    );

    fs::remove_file(filler).unwrap();
    let other =
        wait_until("another pod starts", LIMIT, async || kubelet.run_pod(&second).await.ok()).await;
    assert_eq!(kubelet.exec_sync(&main, &["echo", "here"]).await.unwrap().stdout, "here\n");
    kubelet.stop_and_remove(&other).await.unwrap();
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
    drop(kiyot);
    drop(disk);
    assert_nothing_left(node);
}

/// While the disk has no space for records, no stop returns success before the end of the stopped
/// object, and no record is lost. Stopping a pod frees space. With space, all stops complete.
///
/// Verifies X5, Y31.
#[tokio::test]
async fn pod_stopped_while_the_state_dir_is_full_ends_once_space_is_free() {
    let node = Node::start().await;
    let disk = Disk::mount(&node.directory().join("kiyot/state"), "size=256m");
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let script = format!("echo ready; {WAIT}");
    let (first, second) = (
        kubelet.run_pod(&pod("first", &script)).await.unwrap(),
        kubelet.run_pod(&pod("second", &script)).await.unwrap(),
    );
    let main = first.container("main").clone();
    // The shell ignores SIGTERM until its trap is set.
    kubelet.logged(&main, "ready").await;
    let filler = disk.fill();

    // The cell's containerd does not complete a stop that it can't write down. The longer the disk
    // is full, the later containerd retries.
    let mut other = kubelet.clone();
    let stop_of_container = async {
        let refused = other.stop_container(&main.id, 10).await;
        let state = other.container_status(&main.id).await.unwrap().state();
        assert!(
            refused.is_err() || state == cri::ContainerState::ContainerExited,
            "the stop returned {refused:?}, but the container is {state:?}"
        );
    };
    // A pod can be stopped, because removing the files of its cell frees space for its record.
    let stop_of_pod = wait_until("the sandbox is stopped on a full disk", LIMIT, async || {
        let stopped = kubelet
            .runtime
            .stop_pod_sandbox(cri::StopPodSandboxRequest { pod_sandbox_id: second.sandbox.clone() })
            .await;
        // After an error, the daemon's own retry may have recorded the end.
        assert!(stopped.is_err() || !is_ready(&mut kubelet, &second.sandbox).await, "{stopped:?}");
        stopped.ok()
    });
    tokio::join!(stop_of_container, stop_of_pod);
    assert_eq!(kiyot.cells().len(), 1);
    assert_eq!(
        (kubelet.sandboxes().await.unwrap().len(), kubelet.containers().await.unwrap().len()),
        (2, 2),
        "every pod is listed"
    );

    fs::remove_file(filler).unwrap();
    assert_eq!(kubelet.exited(&main.id).await.exit_code, 0, "the container had its grace period");
    wait_until("the container is stopped", LIMIT, async || {
        kubelet.stop_container(&main.id, 1).await.ok()
    })
    .await;
    let third = wait_until("another pod starts", LIMIT, async || {
        kubelet.run_pod(&pod("third", WAIT)).await.ok()
    })
    .await;
    for pod in [&third, &second] {
        kubelet.stop_and_remove(pod).await.unwrap();
    }
    remove_and_assert_clean(&mut kubelet, &kiyot, &first).await;
    drop(kiyot);
    drop(disk);
    assert_nothing_left(node);
}

/// A pod fills the disk of the records and takes all freed space. The end of another pod is
/// recorded all the same.
///
/// Verifies X43.
#[tokio::test]
async fn pod_that_fills_the_state_dir_prevents_no_end_of_another_pod() {
    let node = Node::start().await;
    let disk = Disk::mount(&node.directory().join("kiyot/state"), "size=256m");
    let mut kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let others = [
        kubelet.run_pod(&pod("first", WAIT)).await.unwrap(),
        kubelet.run_pod(&pod("second", WAIT)).await.unwrap(),
    ];
    let greedy = "trap 'exit 0' TERM; exec 3>/scratch/file; while :; do cat /dev/zero >&3; \
        sleep 0.01; done 2>/dev/null";
    let greedy = Pod::new("hungry")
        .in_cell()
        .volume("scratch", Source::EmptyDir { memory: false })
        .container(Container::script("main", greedy).mount("scratch", "/scratch"));
    let greedy = kubelet.run_pod(&greedy).await.unwrap();
    let is_full = || rustix::fs::statvfs(&disk.0).is_ok_and(|disk| disk.f_bavail == 0);
    wait_until("the disk is full", LIMIT, async || is_full().then_some(())).await;
    // The pods are stopped concurrently, because each stop takes long: their containerds can't
    // write either.
    let stops = others.iter().map(|other| {
        let stop = cri::StopPodSandboxRequest { pod_sandbox_id: other.sandbox.clone() };
        let mut runtime = kubelet.runtime.clone();
        async move { runtime.stop_pod_sandbox(stop).await }
    });
    futures::future::try_join_all(stops).await.unwrap();
    for other in &others {
        assert!(!is_ready(&mut kubelet, &other.sandbox).await);
    }
    wait_until("the freed space is taken", LIMIT, async || is_full().then_some(())).await;
    kiyot.kill9();
    kiyot.start_again().await;
    let mut kubelet = kiyot.kubelet().await;
    for other in &others {
        assert!(!is_ready(&mut kubelet, &other.sandbox).await, "the end is recorded");
        let main = kubelet.container_status(&other.container("main").id).await.unwrap();
        assert_eq!(main.state(), cri::ContainerState::ContainerExited);
        kubelet.stop_and_remove(other).await.unwrap();
    }
    assert!(is_ready(&mut kubelet, &greedy.sandbox).await);
    // The greedy pod's containerd can't write either. Only the end of the cell frees space.
    let stop = cri::StopPodSandboxRequest { pod_sandbox_id: greedy.sandbox.clone() };
    kubelet.runtime.stop_pod_sandbox(stop).await.unwrap();
    remove_and_assert_clean(&mut kubelet, &kiyot, &greedy).await;
    drop(kiyot);
    drop(disk);
    assert_nothing_left(node);
}

/// Verifies X5.
#[tokio::test]
async fn full_log_disk_harms_no_pod_and_loses_no_line() {
    const LINES: usize = 20_000;
    let node = Node::start().await;
    let disk = Disk::mount(&node.pod_logs(), "size=256k");
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let script = format!(
        "i=0; while [ $i -lt {LINES} ]; do i=$((i+1)); echo line $i; done; touch /tmp/done; {WAIT}"
    );
    let running = kubelet.run_pod(&pod("talker", &script)).await.unwrap();
    let main = running.container("main").clone();
    wait_until("the container has written all lines", LIMIT, async || {
        let output = kubelet.exec_sync(&main.id, &["test", "-e", "/tmp/done"]).await.ok()?;
        (output.code == 0).then_some(())
    })
    .await;
    wait_until("the daemon logs the full disk", LIMIT, async || {
        kiyot.log().contains("No space left on device").then_some(())
    })
    .await;
    assert_eq!(
        kubelet.container_status(&main.id).await.unwrap().state(),
        cri::ContainerState::ContainerRunning
    );
    disk.again("size=64m");
    kubelet.logged(&main, &format!("line {LINES}")).await;
    let lines = kubelet.log_lines(&main);
    assert_eq!(lines.len(), LINES);
    for (at, line) in lines.iter().enumerate() {
        assert_eq!(line.text, format!("line {}", at + 1), "no line is lost or duplicated");
    }
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
    drop(kiyot);
    drop(disk);
    assert_nothing_left(node);
}

/// Overwrites a record while the daemon does not run.
fn overwrite_record(store: &Path, table: &str, key: &str, content: &[u8]) {
    let database = redb::Database::open(store).unwrap();
    let transaction = database.begin_write().unwrap();
    transaction
        .open_table(TableDefinition::<&str, &[u8]>::new(table))
        .unwrap()
        .insert(key, content)
        .unwrap();
    transaction.commit().unwrap();
}

/// An `Envelope` of version 2.
const FUTURE_ENVELOPE: &[u8] = &[0x08, 0x02, 0x12, 0x00];

/// Verifies X6.
#[tokio::test]
async fn broken_and_future_records_end_only_their_own_pod() {
    let node = Node::start().await;
    let mut kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let broken = kubelet.run_pod(&pod("broken", WAIT)).await.unwrap();
    let cell = kiyot.cells().remove(0);
    let future = kubelet.run_pod(&pod("future", WAIT)).await.unwrap();
    let intact = kubelet
        .run_pod(&Pod::new("whole").in_cell().container(Container::script("main", WAIT)))
        .await
        .unwrap();
    kiyot.kill9();
    let store = kiyot.state().join("store.redb");
    overwrite_record(&store, "cells", &cell, b"\xff not a record");
    overwrite_record(&store, "sandboxes", &future.sandbox, FUTURE_ENVELOPE);
    overwrite_record(&store, "container_statuses", "milpa-of-nothing", FUTURE_ENVELOPE);

    kiyot.start_again().await;
    let mut kubelet = kiyot.kubelet().await;
    assert!(is_ready(&mut kubelet, &intact.sandbox).await);
    let output = wait_until("the intact pod's cell is connected", LIMIT, async || {
        kubelet.exec_sync(&intact.container("main").id, &["echo", "here"]).await.ok()
    })
    .await;
    assert_eq!(output.stdout, "here\n");
    // A pod whose cell has no readable record is reported as ended, with a reason, after its cell
    // has ended.
    let status = kubelet.exited(&broken.container("main").id).await;
    assert_eq!(status.reason, "CellLost");
    assert!(status.message.contains("its record could not be read"), "{}", status.message);
    let left = Leftovers::of_host().about(&[cell]);
    assert!(left.is_empty(), "left:\n{left}");
    // A record of a later version is unreadable. Its pod is unknown, and its next sandbox starts
    // only after the old cell has ended.
    assert!(kubelet.sandboxes().await.unwrap().iter().all(|listed| listed.id != future.sandbox));
    let anew = kubelet.run_pod(&future.spec).await.unwrap();
    assert_eq!(kiyot.cells().len(), 2, "the cells of the intact pod and of the new sandbox");
    for words in ["invalid record quarantined", "version 2: "] {
        assert!(kiyot.log().contains(words), "the log has no {words:?}");
    }
    kubelet.stop_and_remove(&anew).await.unwrap();
    kubelet.stop_and_remove(&broken).await.unwrap();
    remove_and_assert_clean(&mut kubelet, &kiyot, &intact).await;
}

/// Verifies X6.
#[tokio::test]
async fn broken_network_record_releases_its_address() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let running = kubelet.run_pod(&pod("networked", WAIT)).await.unwrap();
    let cell = kiyot.cells().remove(0);
    assert_eq!(crate::cell::failures::reboot::allocated_addresses(&node).len(), 1);
    fs::write(kiyot.state().join("cells").join(&cell).join("network.json"), "{ \"way\": ").unwrap();
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
    assert_eq!(crate::cell::failures::reboot::allocated_addresses(&node), Vec::<String>::new());
}
