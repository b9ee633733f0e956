//! The store on a full disk.

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
};

use kiyot::backends::milpa::store::{Batch, Store, Table};
use kiyot_proto::store::Cell;

use super::bench::run;

/// The bytes of a disk: twice the size of the store.
const DISK_BYTES: u64 = 64 << 20;
/// The records that are committed on a full disk: more than the pods of a node, and longer than
/// most records.
const RECORDS: usize = 500;
const RECORD_BYTES: usize = 4 << 10;

/// A file system that is unmounted when it is dropped.
struct Disk(PathBuf);

impl Disk {
    fn mount(path: &Path, arguments: &[&str]) -> Self {
        fs::create_dir_all(path).unwrap();
        run("mount", &[arguments, &[&path.display().to_string()]].concat());
        Self(path.to_owned())
    }

    /// Writes until no space is left.
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

/// Asserts that the store commits records on a full disk.
async fn assert_commits_when_full(state: &Path, disk: &Disk) {
    let store = Store::open(state).await.unwrap();
    let commit = async |store: &Store, number: usize| {
        let mut batch = Batch::default();
        let record = Cell { reason: "r".repeat(RECORD_BYTES), ..Default::default() };
        batch.put(Table::Cells, &format!("cell-{number}"), &record);
        store.commit(batch).await
    };
    commit(&store, 0).await.unwrap();
    disk.fill();
    for number in 1..RECORDS {
        commit(&store, number).await.unwrap_or_else(|error| panic!("record {number}: {error:?}"));
    }
    // Each record is then replaced once.
    for number in 0..RECORDS {
        commit(&store, number).await.unwrap_or_else(|error| panic!("change {number}: {error:?}"));
    }
    store.close().await;
    let store = Store::open(state).await.unwrap();
    assert_eq!(store.load::<Cell>(Table::Cells).await.unwrap().len(), RECORDS);
    store.close().await;
}

/// Verifies X43.
#[tokio::test]
async fn store_on_a_full_tmpfs_commits_records() {
    let temp = tempfile::tempdir().unwrap();
    let path = temp.path().join("disk");
    let size = format!("size={DISK_BYTES}");
    let disk = Disk::mount(&path, &["-t", "tmpfs", "-o", &size, "tmpfs"]);
    assert_commits_when_full(&path, &disk).await;
}

/// Verifies X43.
#[tokio::test]
async fn store_on_a_full_ext4_commits_records() {
    let temp = tempfile::tempdir().unwrap();
    let (image, path) = (temp.path().join("image"), temp.path().join("disk"));
    fs::File::create(&image).unwrap().set_len(DISK_BYTES).unwrap();
    let image = image.display().to_string();
    // No blocks are reserved for root, as which the daemon runs.
    run("mkfs.ext4", &["-q", "-m", "0", &image]);
    let disk = Disk::mount(&path, &["-o", "loop", &image]);
    assert_commits_when_full(&path, &disk).await;
}
