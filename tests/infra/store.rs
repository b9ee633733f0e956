//! The store on a disk that is full.

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
};

use kiyot::backends::milpa::store::{Batch, Store, Table};
use kiyot_proto::store::Cell;

use super::bench::run;

/// Bytes of a disk, for the store and as much again.
const DISK_BYTES: u64 = 64 << 20;
/// Records that are kept on a full disk: more than a node has pods, and each longer than most.
const RECORDS: usize = 500;
const RECORD_BYTES: usize = 4 << 10;

/// A mounted file system, unmounted when it is dropped.
struct Disk(PathBuf);

impl Disk {
    fn mount(path: &Path, arguments: &[&str]) -> Self {
        fs::create_dir_all(path).unwrap();
        run("mount", &[arguments, &[&path.display().to_string()]].concat());
        Self(path.to_owned())
    }

    /// Takes all that is left of it.
    fn fill(&self) {
        let mut file = fs::File::create(self.0.join("filler")).unwrap();
        for size in [1 << 20, 4096, 1] {
            while file.write_all(&vec![0; size]).is_ok() {}
        }
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        run("umount", &["-l", &self.0.display().to_string()]);
    }
}

async fn keeps_records(state: &Path, disk: &Disk) {
    let store = Store::open(state).await.unwrap();
    let keep = async |store: &Store, number: usize| {
        let mut batch = Batch::default();
        let record = Cell { reason: "r".repeat(RECORD_BYTES), ..Default::default() };
        batch.put(Table::Cells, &format!("cell-{number}"), &record);
        store.commit(batch).await
    };
    keep(&store, 0).await.unwrap();
    disk.fill();
    for number in 1..RECORDS {
        keep(&store, number).await.unwrap_or_else(|error| panic!("record {number}: {error:?}"));
    }
    // And each of them changes once more.
    for number in 0..RECORDS {
        keep(&store, number).await.unwrap_or_else(|error| panic!("change {number}: {error:?}"));
    }
    store.close().await;
    let store = Store::open(state).await.unwrap();
    assert_eq!(store.load::<Cell>(Table::Cells).await.unwrap().len(), RECORDS);
    store.close().await;
}

/// Verifies X43.
#[tokio::test]
async fn store_on_a_full_tmpfs_keeps_records() {
    let temp = tempfile::tempdir().unwrap();
    let path = temp.path().join("disk");
    let size = format!("size={DISK_BYTES}");
    let disk = Disk::mount(&path, &["-t", "tmpfs", "-o", &size, "tmpfs"]);
    keeps_records(&path, &disk).await;
}

/// Verifies X43.
#[tokio::test]
async fn store_on_a_full_ext4_keeps_records() {
    let temp = tempfile::tempdir().unwrap();
    let (image, path) = (temp.path().join("image"), temp.path().join("disk"));
    fs::File::create(&image).unwrap().set_len(DISK_BYTES).unwrap();
    let image = image.display().to_string();
    // Nothing is kept for root, which the daemon is.
    run("mkfs.ext4", &["-q", "-m", "0", &image]);
    let disk = Disk::mount(&path, &["-o", "loop", &image]);
    keeps_records(&path, &disk).await;
}
