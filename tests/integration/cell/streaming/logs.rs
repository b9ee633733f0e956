//! Logs of pods in cells, at the paths that a kubelet reads.

use std::{fs, os::unix::fs::MetadataExt};

use kiyot_testkit::{Kiyot, LIMIT, Node, cri, wait_until};

use crate::cell::{
    WAIT,
    failures::faults::processes,
    lifecycle::endings::{Ending, wait_for_cell_log},
    lifecycle::stops::{freeze, thaw},
    options, pod, remove_and_assert_clean,
    storage::disks::Disk,
};

/// Verifies D4.
#[tokio::test]
async fn log_is_complete_and_in_order() {
    const LINES: usize = 20_000;
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let (begin, ending) = (Ending::new(), Ending::new());
    let script = format!(
        "{}; i=0; while [ $i -lt {LINES} ]; do i=$((i+1)); echo line $i; done; echo end >&2; {}; \
        exit 0",
        begin.script(),
        ending.script()
    );
    let running = kubelet.run_pod(&pod("talker", &script)).await.unwrap();
    let main = running.container("main");
    // The container writes and exits while the agent is stopped. The exit and the log then arrive
    // together, and the log must be written before the exit is reported.
    let agent = processes(&["kiyot-cell agent", &kiyot.cells().remove(0)]);
    freeze(&agent);
    begin.release().await;
    wait_for_cell_log(&kiyot, main, &format!("line {LINES}")).await;
    wait_for_cell_log(&kiyot, main, "end").await;
    ending.release().await;
    ending.wait_until_exited().await;
    assert!(kubelet.log_lines(main).len() < LINES, "the log is incomplete");
    thaw(&agent);
    assert_eq!(kubelet.exited(&main.id).await.exit_code, 0);
    let lines = kubelet.log_lines(main);
    let numbered: Vec<_> = lines.iter().filter(|line| line.stream == "stdout").collect();
    assert_eq!(numbered.len(), LINES);
    for (at, line) in numbered.iter().enumerate() {
        assert_eq!(line.text, format!("line {}", at + 1));
    }
    assert_eq!(
        lines
            .iter()
            .filter(|line| line.stream == "stderr")
            .map(|line| line.text.as_str())
            .collect::<Vec<_>>(),
        ["end"]
    );
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}

/// Verifies D4.
#[tokio::test]
async fn rotated_log_continues_in_a_new_file() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let running = kubelet
        .run_pod(&pod("rotated", "i=0; while :; do i=$((i+1)); echo line $i; sleep 0.02; done"))
        .await
        .unwrap();
    let main = running.container("main").clone();
    kubelet.logged(&main, "line 20").await;
    let old = main.log.with_extension("log.1");
    std::fs::rename(&main.log, &old).unwrap();
    kubelet
        .runtime
        .reopen_container_log(cri::ReopenContainerLogRequest { container_id: main.id.clone() })
        .await
        .unwrap();
    let first = kiyot_testkit::LogLine::parse_all(&std::fs::read(&old).unwrap());
    kubelet.logged(&main, &format!("line {}", first.len() + 20)).await;
    let all = first.iter().cloned().chain(kubelet.log_lines(&main));
    for (at, line) in all.enumerate() {
        assert_eq!(line.text, format!("line {}", at + 1), "no line is lost or duplicated");
    }
    assert_eq!(
        kiyot_testkit::LogLine::parse_all(&std::fs::read(&old).unwrap()).len(),
        first.len(),
        "the old file is unchanged"
    );

    kubelet.stop_container(&main.id, 1).await.unwrap();
    let refused = kubelet
        .runtime
        .reopen_container_log(cri::ReopenContainerLogRequest { container_id: main.id.clone() })
        .await;
    assert!(refused.is_err(), "only the log of a running container can be reopened");
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}

/// Returns the peak resident memory of a process, in bytes.
fn peak_memory_bytes(pid: &str) -> u64 {
    kiyot_testkit::peak_resident_kib(pid).unwrap() * 1024
}

/// Verifies D41.
#[tokio::test]
async fn unfetched_log_takes_no_memory() {
    const MIB: u64 = 1 << 20;
    const LOG: u64 = 256 * MIB;
    let node = Node::start().await;
    // The node has no space for the log.
    let disk = Disk::mount(&node.pod_logs(), "size=256k");
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let lines = LOG / 16384;
    let script = format!(
        "until [ -e /tmp/go ]; do sleep 0.1; done; l=$(head -c 16383 /dev/zero | tr '\\0' x); \
        i=0; while [ $i -lt {lines} ]; do i=$((i+1)); echo $l; done; \
         touch /tmp/done; {WAIT}"
    );
    let running = kubelet.run_pod(&pod("torrent", &script)).await.unwrap();
    let main = running.container("main").id.clone();
    let cell = kiyot.cells().remove(0);
    let daemon = kiyot.pid().to_string();
    let agent = processes(&["kiyot-cell agent", &cell]).remove(0);
    let before = [peak_memory_bytes(&daemon), peak_memory_bytes(&agent)];
    kubelet.exec_sync(&main, &["touch", "/tmp/go"]).await.unwrap();
    wait_until("the container has written all lines without blocking", 2 * LIMIT, async || {
        (kubelet.exec_sync(&main, &["test", "-e", "/tmp/done"]).await.ok()?.code == 0).then_some(())
    })
    .await;
    wait_until("the daemon logs the full disk", LIMIT, async || {
        kiyot.log().contains("No space left on device").then_some(())
    })
    .await;
    let log = kiyot.state().join("cells").join(&cell).join("pod/logs").join(&main).join("0.log");
    let kept = fs::metadata(&log).unwrap();
    // A log whose content the cell has freed keeps its length, with holes.
    let on_disk = kept.blocks() * 512;
    assert!(
        kept.len() > LOG && on_disk > LOG - 2 * MIB,
        "the cell has {on_disk} bytes on its disk"
    );
    let after = [peak_memory_bytes(&daemon), peak_memory_bytes(&agent)];
    for (before, after) in before.into_iter().zip(after) {
        // The counters of the kernel are imprecise.
        let more = after.saturating_sub(before);
        assert!(more < LOG / 4, "{} MiB more of memory for {} MiB of log", more / MIB, LOG / MIB);
    }
    kubelet.stop_container(&main, 1).await.unwrap();
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
    drop(kiyot);
    drop(disk);
}
