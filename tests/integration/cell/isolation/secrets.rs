//! Secrets of pods and of the daemon, which are neither on a disk nor in a core dump.

use std::{
    fs,
    io::Read,
    os::unix::process::ExitStatusExt,
    path::{Path, PathBuf},
};

use kiyot_testkit::{Container, Kiyot, LIMIT, Node, Pod, command, wait_until};

use crate::cell::{
    WAIT, failures::faults::processes, options, pod, remove_and_assert_clean, wait_until_connected,
};

/// Returns the files beneath a directory that contain these bytes.
pub(crate) fn files_with(dir: &Path, bytes: &[u8]) -> Vec<PathBuf> {
    let (mut open, mut found) = (vec![dir.to_owned()], Vec::new());
    while let Some(dir) = open.pop() {
        for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
            let kind = entry.file_type().unwrap();
            if kind.is_dir() {
                open.push(entry.path());
            } else if kind.is_file() {
                let mut content = Vec::new();
                let Ok(mut file) = fs::File::open(entry.path()) else { continue };
                file.read_to_end(&mut content).unwrap();
                if content.windows(bytes.len()).any(|part| part == bytes) {
                    found.push(entry.path());
                }
            }
        }
    }
    found
}

/// Verifies D10.
#[tokio::test]
async fn environment_of_a_pod_is_in_no_file_on_disk() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let (name, value) = ("KIYOT_TEST_KEY", "correct-horse-battery-staple");
    let main = Container::script("main", WAIT).env(name, value);
    let spec = Pod::new("secretive").in_cell().container(main);
    let running = kubelet.run_pod(&spec).await.unwrap();
    let main = running.container("main").id.clone();
    let shown = kubelet.exec_sync(&main, &["sh", "-c", "echo $KIYOT_TEST_KEY"]).await.unwrap();
    assert_eq!(shown.stdout.trim(), value);
    assert_eq!(files_with(&kiyot.state(), value.as_bytes()), Vec::<PathBuf>::new());
    // This control shows that the search includes containerd's content store.
    assert!(!files_with(&kiyot.state(), b"schemaVersion").is_empty());

    // The restarted containerd of the cell still knows its containers.
    let cell = kiyot.cells().remove(0);
    let containerd = || processes(&["containerd", "containerd.toml", &cell]);
    crate::cell::failures::faults::kill9(&containerd());
    wait_until("exec succeeds again", LIMIT, async || {
        kubelet.exec_sync(&main, &["true"]).await.ok().filter(|output| output.code == 0)
    })
    .await;
    assert_eq!(files_with(&kiyot.state(), value.as_bytes()), Vec::<PathBuf>::new());
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}

/// Returns the soft limit and the hard limit of a process for core dumps.
fn core_limits(pid: &str) -> (String, String) {
    let limits = fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
    let line = limits.lines().find(|line| line.starts_with("Max core file size")).unwrap();
    let mut words = line.split_whitespace().skip(4).map(str::to_owned);
    (words.next().unwrap(), words.next().unwrap())
}

/// Verifies D10.
#[tokio::test]
async fn processes_with_secrets_are_not_dumped_and_containers_may_be() {
    let node = Node::start().await;
    let mut kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let running = kubelet.run_pod(&pod("dumped", WAIT)).await.unwrap();
    let cell = kiyot.cells().remove(0);
    let (soft, hard) = core_limits(&kiyot.pid().to_string());
    assert_eq!(soft, "0");
    for role in ["launch", "agent"] {
        for pid in processes(&[&format!("kiyot-cell {role}"), &cell]) {
            assert_eq!(core_limits(&pid).0, "0", "{role}");
        }
    }
    // The kernel ignores the limit if core dumps are piped to a program.
    let pid = kiyot.pid().to_string();
    command::run("prlimit", &["--pid", &pid, "--core=unlimited"]);
    // SIGABRT is used because background jobs of a shell ignore SIGQUIT.
    command::run("kill", &["-ABRT", &pid]);
    // No SIGTERM is sent: the daemon could exit by SIGTERM before the thread with SIGABRT runs.
    let status = kiyot.wait().await;
    assert_eq!((status.signal(), status.core_dumped()), (Some(6), false));
    kiyot.start_again().await;
    let mut kubelet = kiyot.kubelet().await;
    let main = running.container("main");
    wait_until_connected(&mut kubelet, main).await;
    let output =
        kubelet.exec_sync(&main.id, &["sh", "-c", "ulimit -Sc; ulimit -Hc"]).await.unwrap();
    assert_eq!(output.stdout, format!("{hard}\n{hard}\n"));
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}
