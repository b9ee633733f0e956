//! What writes, carries and keeps logs is killed again and again.

use kiyot_testkit::{Kiyot, Kubelet, LIMIT, Node, RunningContainer, wait_until};

use super::{
    ends_without_a_trace,
    faults::{kill9, processes},
    options, pod,
};

/// Lines in all; `LOG_LINES` in the environment says another number.
const LINES: usize = 200_000;
/// Parts in which they are written.
const BLOCKS: usize = 8;

/// How long the log is, in bytes.
fn length(container: &RunningContainer) -> u64 {
    std::fs::metadata(&container.log).map_or(0, |metadata| metadata.len())
}

/// Lets the container write its next part.
async fn release(kubelet: &mut Kubelet, container: &RunningContainer, block: usize) {
    let file = format!("/tmp/go{block}");
    wait_until("the next part is let go", LIMIT, async || kubelet.exec_sync(&container.id, &["touch", &file]).await.ok()).await;
}

#[tokio::test]
async fn no_line_is_lost_or_doubled_by_kills() {
    let lines = std::env::var("LOG_LINES").ok().and_then(|lines| lines.parse().ok()).unwrap_or(LINES);
    let block = lines / BLOCKS;
    let node = if lines > LINES { Node::start_for_long().await } else { Node::start().await };
    let mut kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let script = format!(
        "i=0; b=0; while [ $b -lt {BLOCKS} ]; do until [ -e /tmp/go$b ]; do sleep 0.05; done; b=$((b+1)); \
         e=$((b*{block})); while [ $i -lt $e ]; do i=$((i+1)); echo line $i; done; done; until [ -e /tmp/go{BLOCKS} ]; do sleep 0.05; done"
    );
    let running = kubelet.run_pod(&pod("talker", &script)).await.unwrap();
    let main = running.container("main").clone();
    let cell = kiyot.cells().remove(0);
    for part in 0..BLOCKS {
        let before = length(&main);
        release(&mut kubelet, &main, part).await;
        // In the middle of a part, the daemon or the agent is killed.
        let middle = before + 20 * block as u64;
        wait_until("the part is half here", LIMIT, async || (length(&main) >= middle).then_some(())).await;
        if part % 2 == 0 {
            kiyot.kill9();
            kiyot.start_again().await;
            kubelet = kiyot.kubelet().await;
        } else {
            kill9(&processes(&["kiyot-cell", "agent", &cell]));
        }
        let last = format!("line {}", (part + 1) * block);
        kubelet.logged(&main, &last).await;
        // Between two parts, containerd: what it has read of a container's output and has not written is lost with it, as on any node.
        kill9(&processes(&["containerd", "containerd.toml", &cell]));
    }
    release(&mut kubelet, &main, BLOCKS).await;
    assert_eq!(kubelet.exited(&main.id).await.exit_code, 0);
    let all = kubelet.log_lines(&main);
    assert_eq!(all.len(), block * BLOCKS);
    for (at, line) in all.iter().enumerate() {
        assert_eq!(line.text, format!("line {}", at + 1), "no line is lost or doubled");
    }
    ends_without_a_trace(&mut kubelet, &kiyot, &running).await;
}
