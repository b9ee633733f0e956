//! States of machines, by the monitor of a real QEMU.

use std::{
    io::{BufRead, BufReader, Write},
    os::unix::net::UnixStream,
};

use kiyot_engine::provider::{Instance, InstanceState, Provider};

use super::{
    super::bench::{LIMIT, wait_for},
    Vms,
};

/// Has a machine's QEMU execute a command of its monitor.
fn execute(vms: &Vms, instance: &Instance, command: &str) {
    let socket = vms.bench.instance_dir(&instance.id).join("qmp/qmp.sock");
    let mut monitor = UnixStream::connect(socket).unwrap();
    monitor.set_read_timeout(Some(LIMIT)).unwrap();
    let mut lines = BufReader::new(monitor.try_clone().unwrap()).lines();
    assert!(lines.next().unwrap().unwrap().contains("QMP"));
    for command in [r#"{"execute": "qmp_capabilities"}"#, command] {
        monitor.write_all(command.as_bytes()).unwrap();
        let is_answer = |line: &String| line.contains("\"return\"") || line.contains("\"error\"");
        let answer = lines.by_ref().map(Result::unwrap).find(is_answer).unwrap();
        assert!(answer.contains("\"return\""), "{command}: {answer}");
    }
}

/// Returns the state of an instance in the list and by its description.
async fn states(vms: &Vms, instance: &Instance) -> [InstanceState; 2] {
    let listed = vms.provider.list_owned().await.unwrap();
    assert_eq!(listed.len(), 1);
    [listed[0].state, vms.state(instance).await]
}

/// Verifies V4, V12.
#[tokio::test]
async fn paused_and_ended_machines_are_reported_with_their_state() {
    let vms = Vms::new();
    let (_, instance, mut guest) = vms.launch().await;
    wait_for("the monitor answers", async || {
        states(&vms, &instance).await == [InstanceState::Running; 2]
    })
    .await;
    execute(&vms, &instance, r#"{"execute": "stop"}"#);
    wait_for("the machine reads paused", async || {
        states(&vms, &instance).await == [InstanceState::Paused; 2]
    })
    .await;
    let console = vms.provider.console(&instance.id).await.unwrap();
    assert!(console.ends_with("QEMU reports the machine as paused\n"), "{console}");

    // A monitor that another client holds does not answer.
    let socket = vms.bench.instance_dir(&instance.id).join("qmp/qmp.sock");
    let held = UnixStream::connect(socket).unwrap();
    held.set_read_timeout(Some(LIMIT)).unwrap();
    BufReader::new(held.try_clone().unwrap()).lines().next().unwrap().unwrap();
    assert_eq!(states(&vms, &instance).await, [InstanceState::Running; 2]);
    drop(held);

    execute(&vms, &instance, r#"{"execute": "cont"}"#);
    wait_for("the machine reads running", async || {
        states(&vms, &instance).await == [InstanceState::Running; 2]
    })
    .await;
    guest.succeeds("true").await;

    // Its kernel ends, and QEMU goes on.
    let keep = r#"{"execute": "set-action", "arguments": {"shutdown": "pause"}}"#;
    execute(&vms, &instance, keep);
    guest.succeeds("(sleep 1; poweroff -f) > /dev/null 2>&1 &").await;
    wait_for("the machine reads stopped", async || {
        states(&vms, &instance).await == [InstanceState::Stopped; 2]
    })
    .await;
    let described = vms.provider.describe(&instance.id).await.unwrap();
    assert_eq!(described.end_reason.as_deref(), Some("the machine has shut down"));
    assert!(vms.qemu(&instance) > 0, "the process of QEMU runs");
    vms.end(&instance).await;
}
