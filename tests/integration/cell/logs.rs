//! Logs of pods in cells, read where a kubelet reads them.

use kiyot_testkit::{Kiyot, Node, cri};

use super::{ends_without_a_trace, options, pod};

#[tokio::test]
async fn a_log_is_complete_and_in_order() {
    const LINES: usize = 20_000;
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let script = format!("i=0; while [ $i -lt {LINES} ]; do i=$((i+1)); echo line $i; done; echo end >&2; exit 0");
    let running = kubelet.run_pod(&pod("talker", &script)).await.unwrap();
    let main = running.container("main");
    assert_eq!(kubelet.exited(&main.id).await.exit_code, 0);
    let lines = kubelet.log_lines(main);
    let numbered: Vec<_> = lines.iter().filter(|line| line.stream == "stdout").collect();
    assert_eq!(numbered.len(), LINES);
    for (at, line) in numbered.iter().enumerate() {
        assert_eq!(line.text, format!("line {}", at + 1));
    }
    assert_eq!(lines.iter().filter(|line| line.stream == "stderr").map(|line| line.text.as_str()).collect::<Vec<_>>(), ["end"]);
    ends_without_a_trace(&mut kubelet, &kiyot, &running).await;
}

#[tokio::test]
async fn a_rotated_log_goes_on_in_a_new_file() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let running = kubelet.run_pod(&pod("rotated", "i=0; while :; do i=$((i+1)); echo line $i; sleep 0.02; done")).await.unwrap();
    let main = running.container("main").clone();
    kubelet.logged(&main, "line 20").await;
    let old = main.log.with_extension("log.1");
    std::fs::rename(&main.log, &old).unwrap();
    kubelet.runtime.reopen_container_log(cri::ReopenContainerLogRequest { container_id: main.id.clone() }).await.unwrap();
    let first = kiyot_testkit::LogLine::parse_all(&std::fs::read(&old).unwrap());
    kubelet.logged(&main, &format!("line {}", first.len() + 20)).await;
    let all = first.iter().cloned().chain(kubelet.log_lines(&main));
    for (at, line) in all.enumerate() {
        assert_eq!(line.text, format!("line {}", at + 1), "no line is lost or doubled");
    }
    assert_eq!(kiyot_testkit::LogLine::parse_all(&std::fs::read(&old).unwrap()).len(), first.len(), "the old file is left alone");

    kubelet.stop_container(&main.id, 1).await.unwrap();
    let refused = kubelet.runtime.reopen_container_log(cri::ReopenContainerLogRequest { container_id: main.id.clone() }).await;
    assert!(refused.is_err(), "only a running container's log is opened again");
    ends_without_a_trace(&mut kubelet, &kiyot, &running).await;
}
