//! Jumps of the node's clock, which do not affect pods.

use std::{fs, path::Path, process::Command};

use kiyot_testkit::{Kiyot, LIMIT, Node, RunningPod, cri, wait_until};

use crate::cell::{WAIT, assert_nothing_left, options, pod, remove_and_assert_clean};

const YEAR_SECONDS: i64 = 365 * 24 * 3600;
const NANOS_PER_SECOND: i64 = 1_000_000_000;

/// A preloaded library that shifts CLOCK_REALTIME by the seconds in a file. It leaves other clocks
/// unchanged.
const CLOCK_LIBRARY_SOURCE: &str = r#"
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t clock, struct timespec *now) {
    long result = syscall(SYS_clock_gettime, clock, now);
    char text[32] = {0};
    int file = clock == CLOCK_REALTIME && getenv("SET_CLOCK") ? open(getenv("SET_CLOCK"), O_RDONLY | O_CLOEXEC) : -1;
    if (file >= 0) {
        if (read(file, text, sizeof text - 1) > 0) now->tv_sec += atol(text);
        close(file);
    }
    return (int)result;
}
"#;

/// Builds the library. Returns the environment that sets a program's clock by `file`.
fn clock_environment(directory: &Path, file: &Path) -> Vec<(String, String)> {
    let (source, library) = (directory.join("clock.c"), directory.join("clock.so"));
    fs::write(&source, CLOCK_LIBRARY_SOURCE).unwrap();
    let made = Command::new("cc")
        .args(["-shared", "-fPIC", "-O1", "-o"])
        .arg(&library)
        .arg(&source)
        .status()
        .unwrap();
    assert!(made.success());
    set_clock(file, 0);
    [("LD_PRELOAD", &library), ("SET_CLOCK", &file.to_owned())]
        .map(|(name, path)| (name.to_owned(), path.display().to_string()))
        .to_vec()
}

/// Sets the daemon's clock, atomically, to an offset from the true time in seconds.
fn set_clock(file: &Path, seconds: i64) {
    let new = file.with_extension("new");
    fs::write(&new, seconds.to_string()).unwrap();
    fs::rename(new, file).unwrap();
}

/// Asserts that the pod is listed and reachable, and that its log has no gap.
async fn assert_unharmed(kiyot: &Kiyot<'_>, running: &RunningPod, when: &str) {
    let mut kubelet = kiyot.kubelet().await;
    let main = running.container("main");
    let output = wait_until(format!("exec succeeds {when}"), LIMIT, async || {
        kubelet.exec_sync(&main.id, &["echo", "here"]).await.ok()
    })
    .await;
    assert_eq!(output.stdout, "here\n");
    assert_eq!(
        kubelet.container_status(&main.id).await.unwrap().state(),
        cri::ContainerState::ContainerRunning,
        "{when}"
    );
    let now = kubelet.log_lines(main).len();
    kubelet.logged(main, &format!("line {}", now + 10)).await;
    for (at, line) in kubelet.log_lines(main).iter().enumerate() {
        assert_eq!(line.text, format!("line {}", at + 1), "no line is lost or duplicated {when}");
    }
    wait_until(format!("usage is reported {when}"), LIMIT, async || {
        let request = cri::ListContainerStatsRequest::default();
        let stats = kubelet.runtime.list_container_stats(request).await.ok()?.into_inner().stats;
        stats.into_iter().find(|stats| {
            stats.attributes.as_ref().is_some_and(|attributes| attributes.id == main.id)
                && stats.cpu.is_some()
        })
    })
    .await;
    assert_eq!(kiyot.cells().len(), 1, "no cell was ended or launched {when}");
}

/// Verifies X16, L7.
#[tokio::test]
async fn clock_jump_harms_no_pod() {
    let node = Node::start().await;
    let file = node.directory().join("clock");
    let mut options = options();
    options.environment = clock_environment(node.directory(), &file);
    let mut kiyot = Kiyot::start(&node, options).await;
    let mut kubelet = kiyot.kubelet().await;
    let count = "i=0; while :; do i=$((i+1)); echo line $i; sleep 0.05; done";
    let running = kubelet.run_pod(&pod("steady", count)).await.unwrap();
    let main = running.container("main").clone();
    kubelet.logged(&main, "line 5").await;
    let before = kubelet.container_status(&main.id).await.unwrap();

    // While the daemon runs, connections stay and new pods start.
    for jump in [YEAR_SECONDS, -YEAR_SECONDS] {
        set_clock(&file, jump);
        assert_unharmed(&kiyot, &running, &format!("after a jump of {jump} s")).await;
        let other = kubelet.run_pod(&pod("other", WAIT)).await.unwrap();
        let status = kubelet.sandbox_status(&other.sandbox).await.unwrap();
        assert!(
            (status.created_at - before.created_at).abs() / NANOS_PER_SECOND > YEAR_SECONDS / 2,
            "the daemon's clock is set"
        );
        // The clock of the cell stays: it is a year apart from the daemon's.
        let main = kubelet.container_status(&other.container("main").id).await.unwrap();
        assert!(
            (0..YEAR_SECONDS * NANOS_PER_SECOND / 2).contains(&(main.started_at - main.created_at)),
            "the start is in the node's time: {main:?}"
        );
        kubelet.stop_container(&main.id, 30).await.unwrap();
        let main = kubelet.container_status(&main.id).await.unwrap();
        assert!(
            (0..YEAR_SECONDS * NANOS_PER_SECOND / 2)
                .contains(&(main.finished_at - main.started_at)),
            "the exit is in the node's time: {main:?}"
        );
        kubelet.stop_and_remove(&other).await.unwrap();
        let log_text = if jump > 0 { "jumped ahead" } else { "jumped back" };
        wait_until("the log reports the clock change", LIMIT, async || {
            kiyot.log().contains(log_text).then_some(())
        })
        .await;
    }
    // After a restart, the cell's certificate has expired, or is not valid yet, by the daemon's
    // clock.
    for jump in [YEAR_SECONDS, -YEAR_SECONDS, 0] {
        set_clock(&file, jump);
        kiyot.kill9();
        kiyot.start_again().await;
        assert_unharmed(&kiyot, &running, &format!("after a restart with a jump of {jump} s"))
            .await;
    }
    let log = kiyot.log();
    assert!(
        log.contains("has expired by this node's clock"),
        "the log reports the expired certificate"
    );
    let mut kubelet = kiyot.kubelet().await;
    let after = kubelet.container_status(&main.id).await.unwrap();
    assert_eq!((after.created_at, after.started_at), (before.created_at, before.started_at));
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
    drop(kiyot);
    assert_nothing_left(node);
}

/// Verifies X16.
#[tokio::test]
async fn latest_container_and_sandbox_stay_the_latest_after_the_clock_was_set_back() {
    let node = Node::start().await;
    let file = node.directory().join("clock");
    let mut options = options();
    options.environment = clock_environment(node.directory(), &file);
    let kiyot = Kiyot::start(&node, options).await;
    let mut kubelet = kiyot.kubelet().await;
    let mut spec = pod("again", "exit 1");
    let first = kubelet.run_pod(&spec).await.unwrap();
    kubelet.exited(&first.container("main").id).await;
    set_clock(&file, -YEAR_SECONDS);
    // The kubelet uses the latest container and the latest sandbox.
    let second = kubelet.create_container(&first, &spec.containers[0], 1).await.unwrap();
    let containers = kubelet.containers().await.unwrap();
    let created =
        |id: &str| containers.iter().find(|container| container.id == id).unwrap().created_at;
    assert!(created(&second.id) > created(&first.container("main").id));
    kubelet.stop_pod(&first).await.unwrap();
    spec.attempt = 1;
    let config = kubelet.prepare(&spec);
    let sandbox = kubelet.run_sandbox(&config, "").await.unwrap();
    let sandboxes = kubelet.sandboxes().await.unwrap();
    let created_at =
        |id: &str| sandboxes.iter().find(|sandbox| sandbox.id == id).unwrap().created_at;
    assert!(
        created_at(&sandbox) > created_at(&first.sandbox)
            && created_at(&sandbox) > created(&second.id)
    );
    let again = kubelet.running(&spec, config, sandbox);
    kubelet.stop_pod(&again).await.unwrap();
    for container in [&second.id, &first.container("main").id] {
        kubelet
            .runtime
            .remove_container(cri::RemoveContainerRequest { container_id: container.clone() })
            .await
            .unwrap();
    }
    for pod in [&first, &again] {
        kubelet
            .runtime
            .remove_pod_sandbox(cri::RemovePodSandboxRequest {
                pod_sandbox_id: pod.sandbox.clone(),
            })
            .await
            .unwrap();
    }
    kubelet.forget(&spec);
    assert_eq!(kiyot.cells(), Vec::<String>::new());
}
