//! Repeated kills of the processes that write, transfer and store logs.

use std::io::{Read, Seek, SeekFrom};

use kiyot_testkit::{Kiyot, Kubelet, LIMIT, LogLine, Node, RunningContainer, cri, wait_until};

use crate::cell::{
    WAIT, assert_nothing_left,
    failures::faults::{kill9, processes},
    lifecycle::endings::{Ending, wait_for_cell_log},
    lifecycle::stops::{freeze, thaw},
    options, pod, remove_and_assert_clean,
    storage::disks::Disk,
};

/// The total number of log lines. The environment variable `LOG_LINES` overrides it.
const LINES: usize = 200_000;
/// The number of blocks in which the lines are written.
const BLOCKS: usize = 8;

/// Returns the length of a container's log, in bytes.
fn log_length_bytes(container: &RunningContainer) -> u64 {
    std::fs::metadata(&container.log).map_or(0, |metadata| metadata.len())
}

/// Returns the text of the last complete line without reading the whole file.
fn last_line(container: &RunningContainer) -> Option<String> {
    let mut file = std::fs::File::open(&container.log).ok()?;
    file.seek(SeekFrom::Start(log_length_bytes(container).saturating_sub(4096))).ok()?;
    let mut tail = Vec::new();
    file.read_to_end(&mut tail).ok()?;
    let lines = tail.strip_suffix(b"\n")?;
    let last = lines.rsplit(|byte| *byte == b'\n').next()?;
    LogLine::parse_all(&[last, b"\n"].concat()).pop().map(|line| line.text)
}

/// Allows the container to write its next block.
async fn release_block(kubelet: &mut Kubelet, container: &RunningContainer, block: usize) {
    let file = format!("/tmp/go{block}");
    wait_until("the next block is released", LIMIT, async || {
        kubelet.exec_sync(&container.id, &["touch", &file]).await.ok()
    })
    .await;
}

/// Verifies X2.
#[tokio::test]
async fn kills_neither_lose_nor_duplicate_log_lines() {
    let lines =
        std::env::var("LOG_LINES").ok().and_then(|lines| lines.parse().ok()).unwrap_or(LINES);
    let block = lines / BLOCKS;
    let limit = LIMIT * u32::try_from(lines.div_ceil(LINES)).unwrap();
    let node = if lines > LINES { Node::start_for_long().await } else { Node::start().await };
    let mut kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let ending = Ending::new();
    let script = format!(
        "i=0; b=0; while [ $b -lt {BLOCKS} ]; do until [ -e /tmp/go$b ]; do sleep 0.05; done; \
        b=$((b+1)); \
         e=$((b*{block})); while [ $i -lt $e ]; do i=$((i+1)); echo line $i; done; done; {}",
        ending.script()
    );
    let running = kubelet.run_pod(&pod("talker", &script)).await.unwrap();
    let main = running.container("main").clone();
    let cell = kiyot.cells().remove(0);
    for part in 0..BLOCKS {
        let before = log_length_bytes(&main);
        release_block(&mut kubelet, &main, part).await;
        // Within a block, the daemon or the agent is killed. In some blocks, the node's containerd
        // is killed too.
        let middle = before + 20 * block as u64;
        wait_until("half of the block has arrived", limit, async || {
            (log_length_bytes(&main) >= middle).then_some(())
        })
        .await;
        if part % 4 == 1 {
            node.kill_containerd();
        }
        if part % 2 == 0 {
            kiyot.kill9();
            kiyot.start_again().await;
            kubelet = kiyot.kubelet().await;
        } else {
            kill9(&processes(&["kiyot-cell agent", &cell]));
        }
        let last = format!("line {}", (part + 1) * block);
        wait_until(format!("{last:?} is on the node"), limit, async || {
            (last_line(&main).as_deref() == Some(&*last)).then_some(())
        })
        .await;
        if part % 4 == 1 {
            node.start_containerd().await;
        }
        // The cell's containerd is killed only between blocks: as on any node, output that
        // containerd has read but not written is lost.
        kill9(&processes(&["containerd", "containerd.toml", &cell]));
    }
    ending.release().await;
    assert_eq!(kubelet.exited(&main.id).await.exit_code, 0);
    let all = kubelet.log_lines(&main);
    assert_eq!(all.len(), block * BLOCKS);
    for (at, line) in all.iter().enumerate() {
        assert_eq!(line.text, format!("line {}", at + 1), "no line is lost or duplicated");
    }
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}

/// A number of lines that does not fit on the disk of [`ended_on_a_full_disk`].
const LINES_BEYOND_DISK: usize = 20_000;

/// Runs a container that exits after writing more than the node's disk holds.
async fn ended_on_a_full_disk<'a>(node: &'a Node) -> (Disk, Kiyot<'a>, kiyot_testkit::RunningPod) {
    let disk = Disk::mount(&node.pod_logs(), "size=256k");
    let kiyot = Kiyot::start(node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let ending = Ending::new();
    let running = kubelet
        .run_pod(&pod("talker", &format!("{}; exit 3", oversized_log_script(&ending))))
        .await
        .unwrap();
    wait_for_cell_log(&kiyot, running.container("main"), &format!("line {LINES_BEYOND_DISK}"))
        .await;
    ending.release().await;
    (disk, kiyot, running)
}

fn oversized_log_script(ending: &Ending) -> String {
    format!(
        "i=0; while [ $i -lt {LINES_BEYOND_DISK} ]; do i=$((i+1)); echo line $i; done; {}",
        ending.script()
    )
}

fn assert_log_complete(kubelet: &Kubelet, container: &RunningContainer) {
    let lines = kubelet.log_lines(container);
    assert_eq!(lines.len(), LINES_BEYOND_DISK);
    for (at, line) in lines.iter().enumerate() {
        assert_eq!(line.text, format!("line {}", at + 1), "no line is lost or duplicated");
    }
}

/// Verifies D21.
#[tokio::test]
async fn rest_of_an_ended_containers_log_arrives_after_a_kill() {
    let node = Node::start().await;
    let (disk, mut kiyot, running) = ended_on_a_full_disk(&node).await;
    let mut kubelet = kiyot.kubelet().await;
    let main = running.container("main").clone();
    // The container reads EXITED while its log is incomplete: a full disk must not delay the exit.
    assert_eq!(kubelet.exited(&main.id).await.exit_code, 3);
    assert!(kubelet.log_lines(&main).len() < LINES_BEYOND_DISK);
    kiyot.kill9();
    kiyot.start_again().await;
    disk.again("size=64m");
    let kubelet_now = kiyot.kubelet().await;
    kubelet_now.logged(&main, &format!("line {LINES_BEYOND_DISK}")).await;
    assert_log_complete(&kubelet_now, &main);
    // The log is complete now. After that is recorded, a log file that the kubelet removes must not
    // be written again.
    wait_until("the complete log is recorded", LIMIT, async || {
        kiyot.log().contains("log of an exited container complete").then_some(())
    })
    .await;
    std::fs::remove_file(&main.log).unwrap();
    kiyot.kill9();
    kiyot.start_again().await;
    let mut kubelet = kiyot.kubelet().await;
    wait_until("the cell is connected again", LIMIT, async || {
        cell_answers(&mut kubelet, &running).await
    })
    .await;
    assert!(!main.log.exists());
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
    drop(kiyot);
    drop(disk);
    assert_nothing_left(node);
}

/// Returns `Some` if the pod's cell takes calls, tested by creating another container.
async fn cell_answers(kubelet: &mut Kubelet, running: &kiyot_testkit::RunningPod) -> Option<()> {
    let mut second = running.spec.containers[0].clone();
    second.name = "second".to_owned();
    kubelet.create_container(running, &second, 0).await.ok().map(drop)
}

/// Verifies D21.
#[tokio::test]
async fn rest_of_an_ended_containers_log_arrives_before_its_pod_reads_stopped() {
    let node = Node::start().await;
    let (disk, mut kiyot, running) = ended_on_a_full_disk(&node).await;
    let mut kubelet = kiyot.kubelet().await;
    let main = running.container("main").clone();
    assert_eq!(kubelet.exited(&main.id).await.exit_code, 3);
    kiyot.kill9();
    disk.again("size=64m");
    kiyot.start_again().await;
    let mut kubelet = kiyot.kubelet().await;
    wait_until("the cell is connected again", LIMIT, async || {
        cell_answers(&mut kubelet, &running).await
    })
    .await;
    kubelet
        .runtime
        .stop_pod_sandbox(cri::StopPodSandboxRequest { pod_sandbox_id: running.sandbox.clone() })
        .await
        .unwrap();
    assert_log_complete(&kubelet, &main);
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
    drop(kiyot);
    drop(disk);
    assert_nothing_left(node);
}

/// Verifies D21, Y9.
#[tokio::test]
async fn exit_missed_by_a_killed_daemon_is_reported_with_the_whole_log() {
    let node = Node::start().await;
    let mut kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let ending = Ending::new();
    let script = format!(
        "until [ -e /tmp/go ]; do sleep 0.05; done; {}; exit 3",
        oversized_log_script(&ending)
    );
    let spec = pod("talker", &script).container(kiyot_testkit::Container::script("other", WAIT));
    let running = kubelet.run_pod(&spec).await.unwrap();
    let main = running.container("main").clone();
    let cell = kiyot.cells().remove(0);
    kubelet.exec_sync(&main.id, &["touch", "/tmp/go"]).await.unwrap();
    wait_until("a part of the log has arrived", LIMIT, async || {
        (log_length_bytes(&main) > 0).then_some(())
    })
    .await;
    let agent = processes(&["kiyot-cell agent", &cell]);
    freeze(&agent);
    kiyot.kill9();
    wait_for_cell_log(&kiyot, &main, &format!("line {LINES_BEYOND_DISK}")).await;
    ending.release().await;
    // The cell's shim sees the exit, but the frozen agent can't report it.
    ending.wait_until_exited().await;
    kiyot.start_again().await;
    let mut kubelet = kiyot.kubelet().await;
    assert_eq!(
        kubelet.container_status(&main.id).await.unwrap().state(),
        cri::ContainerState::ContainerRunning,
        "the exit is not reported yet"
    );
    thaw(&agent);
    assert_eq!(kubelet.exited(&main.id).await.exit_code, 3);
    assert_log_complete(&kubelet, &main);
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}
