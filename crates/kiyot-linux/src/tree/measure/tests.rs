use std::{
    fs::{self, File},
    os::unix::fs::{MetadataExt, symlink},
    path::Path,
};

use rustix::fs::{CWD, Mode, OFlags, openat};

use super::*;

fn start(path: &Path) -> Measurement {
    let dir = openat(CWD, path, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()).unwrap();
    Measurement::begin(dir).unwrap()
}

fn measure(path: &Path, entries: usize) -> Usage {
    let mut measurement = start(path);
    loop {
        assert!(measurement.open.len() <= MAX_OPEN_LEVELS);
        if let MeasureProgress::Done(usage) = measurement.step(entries).unwrap() {
            return usage;
        }
    }
}

/// Returns the bytes that a measurement counts for a file.
fn size(path: &Path) -> u64 {
    (fs::symlink_metadata(path).unwrap().blocks() * BLOCK_BYTES).max(MIN_ENTRY_BYTES)
}

/// Verifies X44.
#[test]
fn measurement_counts_each_file_once_and_follows_no_link() {
    let temp = tempfile::tempdir().unwrap();
    let tree = temp.path().join("tree");
    fs::create_dir_all(tree.join("a/b")).unwrap();
    fs::write(temp.path().join("outside"), vec![1; 1 << 20]).unwrap();
    symlink(temp.path(), tree.join("a/link")).unwrap();
    fs::write(tree.join("a/b/file"), vec![1; 300_000]).unwrap();
    fs::hard_link(tree.join("a/b/file"), tree.join("a/second")).unwrap();
    nix::unistd::mkfifo(&tree.join("fifo"), nix::sys::stat::Mode::S_IRUSR).unwrap();
    let expected: u64 = ["", "a", "a/b", "a/link", "a/b/file", "fifo"]
        .iter()
        .map(|path| size(&tree.join(path)))
        .sum();
    for entries in [1, 2, 1000] {
        let usage = measure(&tree, entries);
        assert_eq!(usage, Usage { bytes: expected, entries: 7, unseen: 0 });
    }
}

#[test]
fn measurement_of_a_sparse_file_counts_allocated_blocks() {
    let temp = tempfile::tempdir().unwrap();
    let sparse = File::create(temp.path().join("sparse")).unwrap();
    sparse.set_len(1 << 43).unwrap();
    assert_eq!(measure(temp.path(), 10).bytes, size(temp.path()) + MIN_ENTRY_BYTES);
}

/// Verifies X41.
#[test]
fn measurement_of_100_000_levels_counts_all_entries() {
    let temp = crate::tree::remove::tests::in_memory();
    let tree = temp.path().join("tree");
    fs::create_dir(&tree).unwrap();
    crate::tree::remove::tests::nest(&tree, 100_000, c"d");
    fs::write(tree.join("d/z"), vec![1; 1 << 20]).unwrap();
    let usage = measure(&tree, 5000);
    assert_eq!((usage.entries, usage.unseen), (100_002, 0));
    assert!(usage.bytes >= 100_000 * MIN_ENTRY_BYTES + (1 << 20));
    while crate::tree::remove(open(temp.path()), c"tree", crate::tree::MountPolicy::Refuse, 50_000)
        .unwrap()
        == crate::tree::RemoveProgress::Partial
    {}
}

fn open(path: &Path) -> OwnedFd {
    openat(CWD, path, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()).unwrap()
}

#[test]
fn measurement_after_a_rename_resumes_at_an_open_ancestor() {
    let temp = tempfile::tempdir().unwrap();
    let tree = temp.path().join("tree");
    fs::create_dir_all(tree.join("first")).unwrap();
    // A directory below the open levels is moved while the walk is in it.
    crate::tree::remove::tests::nest(&tree.join("first"), MAX_OPEN_LEVELS + 20, c"d");
    let mut measurement = start(&tree);
    while measurement.ancestors.len() < MAX_OPEN_LEVELS + 15 {
        measurement.step(1).unwrap();
    }
    let deep = tree.join("first").join(["d"; MAX_OPEN_LEVELS + 5].join("/"));
    fs::rename(deep, temp.path().join("elsewhere")).unwrap();
    fs::write(tree.join("first/last"), vec![1; 1 << 20]).unwrap();
    let usage = loop {
        if let MeasureProgress::Done(usage) = measurement.step(1).unwrap() {
            break usage;
        }
    };
    assert_eq!(usage.unseen, 1);
    assert!(usage.entries >= (MAX_OPEN_LEVELS + 20) as u64);
}
