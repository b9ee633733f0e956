//! Full disks, of the guest and of the node.

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::Command,
};

use kiyot_testkit::{Kiyot, KiyotOptions, LIMIT, Node, wait_until};

use super::{WAIT, options, pod, run};

/// File system in memory with a size, which is unmounted when dropped.
struct Disk(PathBuf);

impl Disk {
    fn mount(path: &Path, size: &str) -> Self {
        fs::create_dir_all(path).unwrap();
        let status = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs"])
            .arg(path)
            .status();
        assert!(status.unwrap().success(), "mount {}", path.display());
        Self(path.to_owned())
    }

    /// Takes all free space. Returns the file that occupies it.
    fn fill(&self) -> PathBuf {
        let path = self.0.join("filler");
        let mut file = fs::File::create(&path).unwrap();
        for size in [1 << 20, 4096] {
            while file.write_all(&vec![0; size]).is_ok() {}
        }
        path
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

/// Verifies V14.
#[tokio::test]
#[ignore = "takes long without KVM; make test-vm"]
async fn full_disk_fails_writes_of_the_pod_and_harms_nothing_else() {
    let node = Node::start().await;
    let disk = Disk::mount(&node.directory().join("kiyot/state"), "512m");
    let of_provider = "disk_size = \"256Mi\"\n".to_owned();
    let kiyot = Kiyot::start(&node, KiyotOptions { of_provider, ..options() }).await;
    let mut kubelet = kiyot.kubelet().await;
    let running = kubelet.run_pod(&pod("full", &format!("echo up; {WAIT}"))).await.unwrap();
    let main = running.container("main").clone();
    let cell = kiyot.cells().remove(0);

    // The node's disk is full: nothing new is launched, and the reason is named.
    let filler = disk.fill();
    let second = pod("second", WAIT);
    let config = kubelet.prepare(&second);
    let refused = kubelet.run_sandbox(&config, "").await.unwrap_err();
    let message = refused.message().to_lowercase();
    assert!(message.contains("no space"), "{refused:?}");
    kubelet.forget(&second);
    wait_until("nothing is left of the refused launch", LIMIT, async || {
        (kiyot.cells() == [cell.clone()]).then_some(())
    })
    .await;

    // The machine goes on. Its write fails when the data has to reach the node's disk.
    let write = "dd if=/dev/urandom of=/lost bs=1M count=16 conv=fsync 2>&1; echo code $?";
    let output = run(&mut kubelet, &main.id, write).await;
    assert!(output.contains("code 1"), "{output}");
    assert_eq!(run(&mut kubelet, &main.id, "echo there").await, "there\n");
    fs::remove_file(filler).unwrap();
    let write = "rm -f /lost; dd if=/dev/zero of=/kept bs=1M count=8 conv=fsync && ls /kept";
    assert_eq!(run(&mut kubelet, &main.id, write).await, "/kept\n");
    let console = super::console(&kiyot, &cell);
    assert!(console.contains("I/O error"), "{console}");

    // The guest's disk is full.
    let fill = "dd if=/dev/zero of=/fill bs=1M 2>&1 | grep -o 'No space left on device'";
    assert_eq!(run(&mut kubelet, &main.id, fill).await, "No space left on device\n");
    assert_eq!(run(&mut kubelet, &main.id, "rm /fill; sync; echo there").await, "there\n");

    kubelet.stop_and_remove(&running).await.unwrap();
    assert_eq!(kiyot.cells(), Vec::<String>::new());
    drop(kiyot);
    drop(disk);
    let left = node.stop();
    assert!(left.is_empty(), "leftovers:\n{left}");
}
