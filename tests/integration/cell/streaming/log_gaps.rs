//! Log files of pods in cells that are removed or truncated on the node.

use std::fs;

use kiyot_testkit::{Kiyot, LIMIT, LogLine, Node, wait_until};

use crate::cell::{WAIT, options, pod, remove_and_assert_clean, wait_until_connected};

/// Verifies D33.
#[tokio::test]
async fn removed_log_continues_with_a_note_of_the_missing_bytes() {
    const LINES: u64 = 2048;
    let node = Node::start().await;
    let mut kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    // The log has 32 MiB. The cell frees most of it when the node has it.
    let script = format!(
        "l=$(head -c 16300 /dev/zero | tr '\\0' x); i=0; while [ $i -lt {LINES} ]; do i=$((i+1)); \
        echo $i $l; done; \
         until [ -e /tmp/go ]; do sleep 0.1; done; echo after; {WAIT}"
    );
    let running = kubelet.run_pod(&pod("forgotten", &script)).await.unwrap();
    let main = running.container("main").clone();
    kubelet.logged(&main, &format!("{LINES} xxx")).await;
    let log = kiyot
        .state()
        .join("cells")
        .join(kiyot.cells().remove(0))
        .join("pod/logs")
        .join(&main.id)
        .join("0.log");
    wait_until("the cell has freed the disk", LIMIT, async || {
        use std::os::unix::fs::MetadataExt;
        fs::metadata(&log).ok().filter(|metadata| metadata.blocks() * 512 < 16 << 20)
    })
    .await;
    kiyot.kill9();
    fs::remove_file(&main.log).unwrap();
    kiyot.start_again().await;
    let mut kubelet = kiyot.kubelet().await;
    wait_until("the log file is closed", LIMIT, async || {
        kubelet.exec_sync(&main.id, &["touch", "/tmp/go"]).await.ok()
    })
    .await;
    kubelet.logged(&main, "after").await;
    let numbers = |lines: &[LogLine]| {
        lines
            .iter()
            .filter_map(|line| line.text.split(' ').next()?.parse::<u64>().ok())
            .collect::<Vec<_>>()
    };
    // Each line is intact: no line begins within another line, and no null bytes fill gaps.
    let content = fs::read(&main.log).unwrap();
    assert!(!content.contains(&0));
    let lines = LogLine::parse_all(&content);
    assert!(
        lines[0].stream == "stderr"
            && lines[0].text.starts_with("kiyot: ")
            && lines[0].text.contains("bytes of this log are missing"),
        "{:?}",
        lines[0]
    );
    let kept = numbers(&lines);
    assert_eq!(kept, (LINES + 1 - kept.len() as u64..=LINES).collect::<Vec<_>>());
    assert!(!kept.is_empty() && kept.len() < usize::try_from(LINES).unwrap());
    assert_eq!((lines.len(), lines.last().unwrap().text.as_str()), (kept.len() + 2, "after"));
    // The restarted daemon continues at the same place, and repeats neither the warning nor a line.
    kiyot.kill9();
    kiyot.start_again().await;
    let mut kubelet = kiyot.kubelet().await;
    wait_until_connected(&mut kubelet, &main).await;
    kubelet.stop_container(&main.id, 1).await.unwrap();
    assert!(fs::read(&main.log).unwrap() == content);
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}

/// Verifies D33.
#[tokio::test]
async fn truncated_log_continues_with_the_next_bytes() {
    let node = Node::start().await;
    let mut kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let script = format!(
        "for n in 1 2 3; do until [ -e /tmp/go$n ]; do sleep 0.1; done; echo line $n; done; {WAIT}"
    );
    let running = kubelet.run_pod(&pod("shortened", &script)).await.unwrap();
    let main = running.container("main").clone();
    let texts = || {
        LogLine::parse_all(&fs::read(&main.log).unwrap())
            .into_iter()
            .map(|line| line.text)
            .collect::<Vec<_>>()
    };
    kubelet.exec_sync(&main.id, &["touch", "/tmp/go1"]).await.unwrap();
    kubelet.logged(&main, "line 1").await;
    // As with containerd, lines before the truncation are not written again.
    fs::File::options().write(true).open(&main.log).unwrap().set_len(0).unwrap();
    kubelet.exec_sync(&main.id, &["touch", "/tmp/go2"]).await.unwrap();
    kubelet.logged(&main, "line 2").await;
    assert_eq!(texts(), ["line 2"]);
    kiyot.kill9();
    kiyot.start_again().await;
    let mut kubelet = kiyot.kubelet().await;
    wait_until("the log file is closed", LIMIT, async || {
        kubelet.exec_sync(&main.id, &["touch", "/tmp/go3"]).await.ok()
    })
    .await;
    kubelet.logged(&main, "line 3").await;
    assert_eq!(texts(), ["line 2", "line 3"]);
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}
