//! Mounts of the node. A cell keeps only the mounts that it needs.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

use kiyot_linux::mountinfo;
use kiyot_testkit::{Kiyot, KiyotOptions, LIMIT, Node, command, command_line, wait_until};

use crate::cell::{
    WAIT, assert_nothing_left, lifecycle::stops::processes_of, options, pod,
    remove_and_assert_clean,
};

/// Returns the command lines of a cell's processes that see a mount whose path ends with
/// `path_end`. Launches of other tests are left out, because they see all mounts of the node until
/// they leave its root.
fn processes_with_mount(cell: &str, path_end: &str) -> Vec<String> {
    let processes = processes_of(cell).into_iter();
    let with_mount = processes.filter(|pid| {
        let table = fs::read(format!("/proc/{pid}/mountinfo")).unwrap_or_default();
        let mut mounts = mountinfo::parse(&table).into_iter();
        mounts.any(|mount| mount.point.to_string_lossy().ends_with(path_end))
    });
    with_mount.map(|pid| format!("{pid} {}", command_line(&pid))).collect()
}

/// Makes the `state_dir` of a node's daemon a link. Returns the target of the link.
pub(crate) fn link_state_dir(node: &Node) -> PathBuf {
    let (real, daemon) = (node.directory().join("disk"), node.directory().join("kiyot"));
    fs::create_dir(&real).unwrap();
    fs::create_dir(&daemon).unwrap();
    symlink("../disk", daemon.join("state")).unwrap();
    real.canonicalize().unwrap()
}

/// Returns the mount points of the node beneath a directory.
pub(crate) fn mounts_beneath(dir: &Path) -> Vec<PathBuf> {
    let mounts = mountinfo::read().unwrap().into_iter().map(|mount| mount.point);
    mounts.filter(|point| point.starts_with(dir)).collect()
}

fn mount(arguments: &[&str], at: &Path) {
    fs::create_dir_all(at).unwrap();
    command::run("mount", &[arguments, &[at.to_str().unwrap()]].concat());
}

/// Verifies N17.
#[tokio::test]
async fn volume_unmounted_on_the_node_is_released_under_a_running_cell() {
    let node = Node::start().await;
    let disk = node.directory().join("disk");
    fs::File::create(&disk).unwrap().set_len(16 << 20).unwrap();
    let disk = disk.to_str().unwrap();
    command::run("mkfs.ext4", &["-q", "-F", disk]);
    let plugins = node.kubelet_directory().join("plugins/kubernetes.io/csi");
    let global = plugins.join("driver/1/globalmount");
    mount(&["-o", "loop", disk], &global);
    fs::write(global.join("file"), "data").unwrap();
    let of_disk = || command::run("losetup", &["--noheadings", "--list", "--associated", disk]);
    assert!(!of_disk().is_empty());

    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let running = kubelet.run_pod(&pod("long-lived", WAIT)).await.unwrap();
    let cell = kiyot.cells().remove(0);
    assert_eq!(processes_with_mount(&cell, "/globalmount"), Vec::<String>::new());
    // Later mounts do not propagate into the cell.
    let later = plugins.join("driver/2/globalmount");
    mount(&["-t", "tmpfs", "none"], &later);
    assert_eq!(processes_with_mount(&cell, "/globalmount"), Vec::<String>::new());

    command::run("umount", &[global.to_str().unwrap()]);
    wait_until("the file system and its device are released", LIMIT, async || {
        of_disk().is_empty().then_some(())
    })
    .await;
    // Another machine could mount the disk now.
    command::run("e2fsck", &["-f", "-n", disk]);
    let main = &running.container("main").id;
    assert_eq!(kubelet.exec_sync(main, &["echo", "here"]).await.unwrap().stdout, "here\n");
    command::run("umount", &[later.to_str().unwrap()]);
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
    drop(kiyot);
    assert_nothing_left(node);
}

/// Verifies X10.
#[tokio::test]
async fn cell_ends_with_its_mounts_also_if_the_state_directory_is_a_link() {
    let node = Node::start().await;
    let real = link_state_dir(&node);
    let mut kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let running = kubelet.run_pod(&pod("linked", WAIT)).await.unwrap();
    let cell = kiyot.cells().remove(0);
    // A cell may leave such a mount on the node.
    let left = kiyot.state().join("cells").join(&cell).join("pod/left");
    mount(&["-t", "tmpfs", "none"], &left);
    assert!(mounts_beneath(&real).iter().any(|point| point.ends_with("pod/left")));
    kiyot.kill9();
    kiyot.start_again().await;
    let mut kubelet = kiyot.kubelet().await;
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
    assert_eq!(mounts_beneath(&real), Vec::<PathBuf>::new());
    drop(kiyot);
    assert_nothing_left(node);
}

/// Verifies N17.
#[tokio::test]
async fn programs_on_a_file_system_of_their_own_run_in_a_cell() {
    let node = Node::start().await;
    let (programs, unneeded) = (node.directory().join("programs"), node.directory().join("other"));
    for at in [&programs, &unneeded] {
        mount(&["-t", "tmpfs", "none"], at);
    }
    fs::create_dir(programs.join("bin")).unwrap();
    let found = std::env::split_paths(command::PATH).map(|dir| dir.join("containerd"));
    let containerd: PathBuf = found.into_iter().find(|path| path.is_file()).unwrap();
    fs::copy(containerd, programs.join("bin/containerd")).unwrap();
    // The configured path is a symbolic link outside the file system of the programs.
    let link = node.directory().join("the-containerd");
    symlink("programs/bin/containerd", &link).unwrap();
    let options =
        KiyotOptions { of_provider: format!("containerd = \"{}\"", link.display()), ..options() };
    let kiyot = Kiyot::start(&node, options).await;
    let mut kubelet = kiyot.kubelet().await;
    let running = kubelet.run_pod(&pod("elsewhere", WAIT)).await.unwrap();
    let cell = kiyot.cells().remove(0);
    let of_cell = processes_with_mount(&cell, "/programs");
    assert!(!of_cell.is_empty(), "the cell has the mounts that it needs");
    assert_eq!(processes_with_mount(&cell, "/other"), Vec::<String>::new());
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
    drop(kiyot);
    assert_nothing_left(node);
}
