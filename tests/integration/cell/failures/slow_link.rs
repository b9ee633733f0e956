//! Distant cells: a link with low bandwidth and high latency between agent and gateway.

use std::time::Duration;

use kiyot_testkit::{
    Container, Kiyot, LIMIT, Node, Pod, Source,
    relay::{Direction, Rate, Relay},
    wait_for, wait_until,
};

use crate::cell::{WAIT, options, remove_and_assert_clean};

/// The rate and the latency of each direction.
const RATE: Rate = Rate::new(512 * 1024, Duration::from_millis(100));

/// Verifies L9.
#[tokio::test]
async fn pod_behind_a_slow_link_works() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let link = Relay::before_gateway(&kiyot.state(), RATE);
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
    // The image is copied over the slow link too.
    let running = kubelet.run_pod(&spec).await.unwrap();
    let main = running.container("main").clone();
    // Calls are answered while the log is copied, whether the cell answers them or the daemon does.
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
    // All bytes have used the slow link, not the gateway's own socket.
    assert!(link.carried(Direction::Down) > 2 * 512 * 1024);
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}

/// Verifies L23.
#[tokio::test]
async fn link_that_stalls_beyond_the_silence_limit_neither_loses_nor_duplicates_log_lines() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let link = Relay::before_gateway(&kiyot.state(), Rate::UNLIMITED);
    let mut kubelet = kiyot.kubelet().await;
    let spec = Pod::new("cut-off").in_cell().container(Container::script(
        "main",
        &format!(
            "i=0; while [ $i -lt 1500 ]; do i=$((i+1)); echo line $i of many; \
             [ $((i % 50)) -eq 0 ] && sleep 1; done; {WAIT}"
        ),
    ));
    let running = kubelet.run_pod(&spec).await.unwrap();
    let main = running.container("main").clone();
    kubelet.logged(&main, "line 50 of many").await;
    // Lines are in flight when the stall begins, and the container writes more during the stall.
    link.stall();
    let connections = link.connections();
    wait_for("the agent dials again", || link.connections() > connections).await;
    link.resume();
    kubelet.logged(&main, "line 1500 of many").await;
    let lines = kubelet.log_lines(&main);
    assert_eq!(lines.len(), 1500);
    for (at, line) in lines.iter().enumerate() {
        assert_eq!(line.text, format!("line {} of many", at + 1));
    }
    assert_eq!(kubelet.exec_sync(&main.id, &["echo", "here"]).await.unwrap().stdout, "here\n");
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}
