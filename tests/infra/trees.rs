//! Removal of instances whose pods have left directory trees that are hard to remove.

use std::{
    ffi::{CStr, CString},
    fs,
    os::{fd::OwnedFd, unix::ffi::OsStrExt},
    path::Path,
};

use kiyot_engine::provider::Provider;
use rustix::{
    fs::{
        AtFlags, CWD, FileType, Mode, OFlags, ftruncate, linkat, makedev, mkdirat, mknodat, openat,
        symlinkat, unlinkat,
    },
    mount::{MountFlags, UnmountFlags, mount, unmount},
};

use super::bench::{Bench, wait_for};

/// More levels than a recursive walk can have with any stack of its thread.
const LEVELS: usize = 100_000;
/// A size that no disk has, in bytes.
const PEBIBYTE: u64 = 1 << 50;

/// A tmpfs for the instances: some disks remove only a few hundred directories a second.
struct Tmpfs(CString);

impl Tmpfs {
    fn mount(dir: &Path) -> Self {
        fs::create_dir_all(dir).unwrap();
        let path = CString::new(dir.as_os_str().as_bytes()).unwrap();
        mount("tmpfs", &path, "tmpfs", MountFlags::empty(), c"size=256m").unwrap();
        Self(path)
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        let _ = unmount(&self.0, UnmountFlags::DETACH);
    }
}

/// Creates nested directories.
fn nest(dir: &Path, levels: usize, name: &CStr) {
    let opened = |dir: &OwnedFd, name: &CStr| {
        openat(dir, name, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()).unwrap()
    };
    let mut dir = openat(CWD, dir, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()).unwrap();
    for _ in 0..levels {
        mkdirat(&dir, name, Mode::RWXU).unwrap();
        dir = opened(&dir, name);
    }
}

/// Verifies X42.
#[tokio::test]
async fn deeply_nested_directories_neither_prevent_nor_delay_the_end() {
    let mut bench = Bench::new();
    let disk = Tmpfs::mount(&bench.config.state_dir);
    let cell = bench.launch().await;
    let id = cell.instance.id.clone();
    let pod = bench.instance_dir(&id).join("pod/volumes");
    fs::create_dir_all(&pod).unwrap();
    nest(&pod, LEVELS, c"d");
    let other = bench.launch().await.instance.id;
    bench.end(&id).await.unwrap();
    assert!(!bench.instance_dir(&id).exists(), "left files belong to no instance");
    assert_eq!(bench.resources_of(&id), Vec::<String>::new());
    // The next daemon removes the files that are left.
    bench.restart();
    let listed = bench.provider.list_owned().await.unwrap();
    assert_eq!(listed.iter().map(|listed| &listed.id).collect::<Vec<_>>(), [&other]);
    bench.end(&other).await.unwrap();
    let removed = bench.config.state_dir.join("removed");
    wait_for("all files are removed", async || {
        fs::read_dir(&removed).is_ok_and(|mut left| left.next().is_none())
    })
    .await;
    drop(disk);
    bench.assert_clean(&id);
}

/// Verifies X42.
#[tokio::test]
async fn million_entries_of_every_kind_neither_prevent_nor_delay_the_end() {
    let bench = Bench::new();
    let disk = Tmpfs::mount(&bench.config.state_dir);
    let cell = bench.launch().await;
    let id = cell.instance.id.clone();
    let pod = bench.instance_dir(&id).join("pod/volumes");
    fs::create_dir_all(&pod).unwrap();
    let dir = openat(CWD, &pod, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()).unwrap();
    let sparse = openat(&dir, c"sparse", OFlags::CREATE | OFlags::RDWR, Mode::RWXU).unwrap();
    ftruncate(&sparse, PEBIBYTE).unwrap();
    drop(sparse);
    for (name, kind) in [
        (c"fifo", FileType::Fifo),
        (c"socket", FileType::Socket),
        (c"character device", FileType::CharacterDevice),
        (c"block device", FileType::BlockDevice),
        (c"not UTF-8: \xff\xfe\n", FileType::RegularFile),
    ] {
        mknodat(&dir, name, kind, Mode::RWXU, makedev(1, 3)).unwrap();
    }
    symlinkat("/etc/passwd", &dir, c"link").unwrap();
    let longest = CString::new([b'x'; 255]).unwrap();
    mkdirat(&dir, &longest, Mode::RWXU).unwrap();
    let many = openat(&dir, &longest, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()).unwrap();
    for number in 0..1_000_000 {
        linkat(&dir, c"sparse", &many, number.to_string(), AtFlags::empty()).unwrap();
    }
    bench.end(&id).await.unwrap();
    assert!(!bench.instance_dir(&id).exists());
    let removed = bench.config.state_dir.join("removed");
    wait_for("all files are removed", async || {
        fs::read_dir(&removed).is_ok_and(|mut left| left.next().is_none())
    })
    .await;
    assert!(fs::exists("/etc/passwd").unwrap());
    drop((dir, many));
    drop(disk);
    bench.assert_clean(&id);
}

/// Verifies X42.
#[tokio::test]
async fn nested_cgroups_of_a_pod_are_removed() {
    let bench = Bench::new();
    let cell = bench.launch().await;
    let id = cell.instance.id.clone();
    // Their path is longer than PATH_MAX.
    let deep = c"a-control-group-with-a-name-that-is-as-long-as-any-name-of-a-pod's-is";
    for mount in super::bench::cgroup_mounts() {
        let own = mount.join("kiyot").join(&id.0);
        nest(&own, 100, deep);
        nest(&own, 2, c"second");
    }
    bench.end(&id).await.unwrap();
    bench.assert_clean(&id);
}

/// Verifies X42.
#[tokio::test]
async fn files_that_can_not_be_removed_do_not_prevent_the_end() {
    let mut bench = Bench::new();
    let cell = bench.launch().await;
    let id = cell.instance.id.clone();
    let pod = bench.instance_dir(&id).join("pod");
    fs::create_dir_all(&pod).unwrap();
    fs::write(pod.join("file"), "").unwrap();
    // A process with CAP_LINUX_IMMUTABLE can protect files from removal.
    let change = |flag| super::bench::run("chattr", &[flag, &pod.display().to_string()]);
    change("+i");
    bench.end(&id).await.unwrap();
    assert_eq!(bench.resources_of(&id), Vec::<String>::new());
    let removed = bench.config.state_dir.join("removed");
    let left = fs::read_dir(&removed).unwrap().next().unwrap().unwrap().path();
    super::bench::run("chattr", &["-i", &left.join("pod").display().to_string()]);
    bench.restart();
    bench.provider.list_owned().await.unwrap();
    wait_for("all files are removed", async || {
        fs::read_dir(&removed).is_ok_and(|mut left| left.next().is_none())
    })
    .await;
    bench.assert_clean(&id);
    let _ = unlinkat(CWD, &removed, AtFlags::REMOVEDIR);
}
