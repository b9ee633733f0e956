//! Kills of the daemon while a cell's containerd executes a call.

use std::{fs, os::unix::fs::PermissionsExt, path::PathBuf};

use kiyot_testkit::{Kiyot, KiyotOptions, LIMIT, Node, cri, wait_until};
use tonic::Code;

use crate::cell::{lifecycle::endings::Ending, options, pod, remove_and_assert_clean};

/// A wrapper of the cells' runc that can be paused before a verb. Holds the directory of the
/// wrapper.
struct PausableRunc(PathBuf);

impl PausableRunc {
    /// Creates the wrapper, and options of a daemon whose cells use it.
    fn new(node: &Node) -> (Self, KiyotOptions) {
        let directory = node.directory().join("held");
        fs::create_dir_all(&directory).unwrap();
        let (program, at) = (directory.join("runc"), directory.display());
        // The verb follows global options. No option equals a verb.
        let script = format!(
            "#!/bin/sh\nfor word in \"$@\"; do \
             case $word in create|start) verb=$word; break;; esac; done\n\
             if [ -n \"$verb\" ] && [ -e {at}/hold-$verb ]; then touch {at}/held; \
             while [ -e {at}/hold-$verb ]; do sleep 0.05; done; fi\n\
             exec runc \"$@\"\n"
        );
        fs::write(&program, script).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let options = KiyotOptions {
            of_provider: format!("runc = {:?}\n", program.display().to_string()),
            ..options()
        };
        (Self(directory), options)
    }

    /// Makes runc wait before `verb`.
    fn pause(&self, verb: &str) {
        let _ = fs::remove_file(self.0.join("held"));
        fs::write(self.0.join(format!("hold-{verb}")), "").unwrap();
    }

    /// Waits until runc is paused.
    async fn wait_until_paused(&self) {
        wait_until("runc is paused", LIMIT, async || self.0.join("held").exists().then_some(()))
            .await;
    }

    fn resume(&self, verb: &str) {
        fs::remove_file(self.0.join(format!("hold-{verb}"))).unwrap();
    }
}

/// Verifies X12.
#[tokio::test]
async fn begun_start_completes_when_the_daemon_is_killed() {
    let node = Node::start().await;
    let (runc, options) = PausableRunc::new(&node);
    let mut kiyot = Kiyot::start(&node, options).await;
    for verb in ["create", "start"] {
        let mut kubelet = kiyot.kubelet().await;
        let spec = pod("cut", "trap 'exit 0' TERM; echo line 1; while :; do sleep 0.1; done");
        let config = kubelet.prepare(&spec);
        let sandbox = kubelet.run_sandbox(&config, "").await.unwrap();
        let mut running = kubelet.running(&spec, config, sandbox);
        let main = kubelet.create_container(&running, &spec.containers[0], 0).await.unwrap();
        running.containers.insert("main".to_owned(), main.clone());
        runc.pause(verb);
        let (mut caller, id) = (kubelet.clone(), main.id.clone());
        let starting = tokio::spawn(async move { caller.start_container(&id).await });
        runc.wait_until_paused().await;
        kiyot.kill9();
        starting.await.unwrap().unwrap_err();
        kiyot.start_again().await;

        // The kubelet creates the next attempt for a container that reads CREATED. The two attempts
        // must not both run.
        let mut kubelet = kiyot.kubelet().await;
        assert_eq!(
            kubelet.container_status(&main.id).await.unwrap().state(),
            cri::ContainerState::ContainerCreated
        );
        let error = wait_until("the cell is connected again", LIMIT, async || {
            let error =
                kubelet.create_container(&running, &spec.containers[0], 1).await.unwrap_err();
            (!error.message().contains("is not connected")).then_some(error)
        })
        .await;
        assert!(error.message().contains(&main.id), "{error:?}");
        runc.resume(verb);
        wait_until("the container runs", LIMIT, async || {
            let status = kubelet.container_status(&main.id).await.unwrap();
            assert_ne!(status.state(), cri::ContainerState::ContainerExited, "{status:?}");
            (status.state() == cri::ContainerState::ContainerRunning).then_some(())
        })
        .await;
        // The kubelet may still request the next attempt.
        let error = kubelet.create_container(&running, &spec.containers[0], 1).await.unwrap_err();
        assert_eq!(error.code(), Code::FailedPrecondition, "{error:?}");
        kubelet.logged(&main, "line 1").await;
        assert_eq!(kubelet.log_lines(&main).len(), 1);
        assert_eq!(kubelet.exec_sync(&main.id, &["echo", "here"]).await.unwrap().stdout, "here\n");
        assert_eq!(kubelet.containers().await.unwrap().len(), 1);
        remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
    }
}

/// Verifies X12, Y4.
#[tokio::test]
async fn unstarted_attempt_yields_to_the_next() {
    let node = Node::start().await;
    let mut kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let spec = pod("next", crate::cell::WAIT);
    let config = kubelet.prepare(&spec);
    let sandbox = kubelet.run_sandbox(&config, "").await.unwrap();
    let mut running = kubelet.running(&spec, config, sandbox);
    let first = kubelet.create_container(&running, &spec.containers[0], 0).await.unwrap();
    kiyot.kill9();
    kiyot.start_again().await;
    let mut kubelet = kiyot.kubelet().await;
    let second = wait_until("the next attempt is created", LIMIT, async || {
        kubelet.create_container(&running, &spec.containers[0], 1).await.ok()
    })
    .await;
    let status = kubelet.exited(&first.id).await;
    assert_eq!((status.exit_code, &*status.reason), (128, "StartError"), "{status:?}");
    kubelet.start_container(&second.id).await.unwrap();
    assert_eq!(kubelet.exec_sync(&second.id, &["echo", "here"]).await.unwrap().stdout, "here\n");
    running.containers.insert("main".to_owned(), second);
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}

/// Verifies X12.
#[tokio::test]
async fn begun_stop_continues_when_the_daemon_is_killed() {
    let node = Node::start().await;
    let mut kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let ending = Ending::new();
    let script = format!(
        "trap 'echo told; {}; exit 7' TERM; echo ready; while :; do sleep 0.1; done",
        ending.script()
    );
    let running = kubelet.run_pod(&pod("slow", &script)).await.unwrap();
    let main = running.container("main").clone();
    kubelet.logged(&main, "ready").await;
    let grace = i64::try_from(LIMIT.as_secs()).unwrap();
    let (mut caller, id) = (kubelet.clone(), main.id.clone());
    let stopping = tokio::spawn(async move { caller.stop_container(&id, grace).await });
    kubelet.logged(&main, "told").await;
    kiyot.kill9();
    stopping.await.unwrap().unwrap_err();
    kiyot.start_again().await;
    let mut kubelet = kiyot.kubelet().await;
    assert_eq!(
        kubelet.container_status(&main.id).await.unwrap().state(),
        cri::ContainerState::ContainerRunning,
        "the stop is within its grace period"
    );
    ending.release().await;
    assert_eq!(kubelet.exited(&main.id).await.exit_code, 7, "the container has ended by itself");
    kubelet.stop_container(&main.id, grace).await.unwrap();
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}
