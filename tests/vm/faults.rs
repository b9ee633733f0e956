//! Faults of virtual machines and of the daemon.

use std::{
    fs,
    os::unix::{fs::PermissionsExt, net::UnixStream},
    time::{SystemTime, UNIX_EPOCH},
};

use kiyot_testkit::{
    Kiyot, KiyotOptions, Kubelet, LIMIT, Node, cri, kill_all, output, processes, wait_until,
};

use super::{WAIT, console, options, pod, run, strong, strong_options};

/// Tolerated difference of two clocks on a busy machine.
const TOLERATED_SECONDS: u64 = 60;

/// Returns the seconds by which the clock of a container's machine differs from the node's.
async fn clock_difference(kubelet: &mut Kubelet, container: &str) -> u64 {
    let seconds: u64 = run(kubelet, container, "date +%s").await.trim().parse().unwrap();
    let of_node = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    seconds.abs_diff(of_node)
}

/// Verifies V3, V4.
#[tokio::test]
async fn vm_outlives_its_daemon_and_ends_its_pod_when_killed() {
    let node = Node::start().await;
    let mut kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let running = kubelet.run_pod(&pod("kept", &format!("echo up; {WAIT}"))).await.unwrap();
    let main = running.container("main").clone();
    kubelet.logged(&main, "up").await;

    kiyot.kill9();
    kiyot.start_again().await;
    let mut kubelet = kiyot.kubelet().await;
    let container = kubelet.container_status(&main.id).await.unwrap();
    assert_eq!(container.state(), cri::ContainerState::ContainerRunning);
    wait_until("the cell answers again", LIMIT, async || {
        let output = kubelet.exec_sync(&main.id, &["echo", "there"]).await.ok()?;
        (output.stdout == "there\n").then_some(())
    })
    .await;

    let cell = kiyot.cells().remove(0);
    let machines = processes(&["qemu-system", &cell]);
    assert!(!machines.is_empty(), "QEMU runs for {cell}");
    kill_all(&machines);
    wait_until("the pod has ended", LIMIT, async || {
        let container = kubelet.container_status(&main.id).await.ok()?;
        (container.state() == cri::ContainerState::ContainerExited).then_some(())
    })
    .await;
    kubelet.stop_and_remove(&running).await.unwrap();
    assert_eq!(kiyot.cells(), Vec::<String>::new());
}

/// Verifies V17.
#[tokio::test]
#[ignore = "takes long without KVM; make test-vm"]
async fn services_killed_in_the_machine_are_restarted_and_its_monitor_is_not_needed() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, strong_options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let spec = strong(pod("kept", &format!("echo up; {WAIT}")));
    let running = kubelet.run_pod(&spec).await.unwrap();
    let main = running.container("main").clone();
    kubelet.logged(&main, "up").await;
    let cell = kiyot.cells().remove(0);
    // The restarted agent finds a clock that is wrong by decades.
    run(&mut kubelet, &main.id, "date -s @1000000000").await;
    assert!(clock_difference(&mut kubelet, &main.id).await > TOLERATED_SECONDS);
    for (times, service) in ["kiyot-cell agent", "containerd --config"].iter().enumerate() {
        let (first, rest) = service.split_at(1);
        let kill = format!("kill -9 $(ps | grep '[{first}]{rest}' | awk '{{print $1}}')");
        // The answer may be lost with the agent.
        let _ = kubelet.exec_sync(&main.id, &["sh", "-c", &kill]).await;
        wait_until(format!("init has seen the end of {service}"), LIMIT, async || {
            let exits = console(&kiyot, &cell).matches("service exited").count();
            (exits > times).then_some(())
        })
        .await;
        wait_until(format!("the cell answers without its first {service}"), LIMIT, async || {
            let output = kubelet.exec_sync(&main.id, &["echo", "there"]).await.ok()?;
            (output.stdout == "there\n").then_some(())
        })
        .await;
        let container = kubelet.container_status(&main.id).await.unwrap();
        assert_eq!(container.state(), cri::ContainerState::ContainerRunning, "{service}");
    }
    assert!(run(&mut kubelet, &main.id, "ps").await.contains("sleep"));
    wait_until("the machine has the daemon's time", LIMIT, async || {
        let difference = clock_difference(&mut kubelet, &main.id).await;
        (difference < TOLERATED_SECONDS).then_some(())
    })
    .await;

    // QEMU serves a single client of its monitor, and this client is silent.
    let monitor = kiyot.state().join("cells").join(&cell).join("qmp/qmp.sock");
    let _held = UnixStream::connect(&monitor).unwrap();
    kubelet.stop_and_remove(&running).await.unwrap();
    assert_eq!(kiyot.cells(), Vec::<String>::new());
}

/// Program that starts QEMU with a clock in the year 2001.
const LATE_QEMU: &str =
    "#!/bin/sh\nexec /usr/bin/qemu-system-x86_64 -rtc base=2001-09-09T01:46:40 \"$@\"\n";

/// A program among the node's programs, which the jail of QEMU shows.
struct AddedProgram {
    path: String,
    _files: tempfile::TempDir,
}

impl AddedProgram {
    /// Mounts the program over the node's programs, in the namespace of this test.
    fn new(name: &str, content: &str) -> Self {
        let files = tempfile::tempdir().unwrap();
        fs::set_permissions(files.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let directory = files.path().join("libexec");
        fs::create_dir(&directory).unwrap();
        fs::write(directory.join(name), content).unwrap();
        fs::set_permissions(directory.join(name), fs::Permissions::from_mode(0o755)).unwrap();
        let layers = format!("lowerdir={}:/usr", files.path().display());
        output("mount", &["-t", "overlay", "-o", &layers, "added", "/usr"]).unwrap();
        Self { path: format!("/usr/libexec/{name}"), _files: files }
    }
}

impl Drop for AddedProgram {
    fn drop(&mut self) {
        let _ = output("umount", &["--lazy", "/usr"]);
    }
}

/// Verifies V55.
#[tokio::test]
async fn machine_with_a_wrong_clock_has_the_daemons_time_before_its_pod_starts() {
    let program = AddedProgram::new("qemu-system-late", LATE_QEMU);
    let node = Node::start().await;
    let of_provider = format!("program = \"{}\"\n", program.path);
    let kiyot = Kiyot::start(&node, KiyotOptions { of_provider, ..options() }).await;
    let mut kubelet = kiyot.kubelet().await;
    let begun = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let script = format!("echo at $(date +%s); {WAIT}");
    let running = kubelet.run_pod(&pod("late", &script)).await.unwrap();
    let main = running.container("main").clone();
    let line = kubelet.logged(&main, "at ").await;
    let at: u64 = line.text.trim().trim_start_matches("at ").parse().unwrap();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let expected = begun - TOLERATED_SECONDS..=now + TOLERATED_SECONDS;
    assert!(expected.contains(&at), "{at}, expected: {expected:?}");
    // The machine booted with the other time, and the agent set the clock.
    let cell = kiyot.cells().remove(0);
    let console = console(&kiyot, &cell);
    assert!(console.contains("2001-09-09T") && console.contains("clock set"), "{console}");
    kubelet.stop_and_remove(&running).await.unwrap();
    assert_eq!(kiyot.cells(), Vec::<String>::new());
}
