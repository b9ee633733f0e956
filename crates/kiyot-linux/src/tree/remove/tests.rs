use std::{
    ffi::OsStr,
    fs::{self, File},
    os::unix::{ffi::OsStrExt, fs::symlink},
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
};

use rustix::fs::{CWD, mkdirat};

use super::*;

/// The most entries of a call.
const ENTRIES: usize = 10_000;

/// Creates a directory, on a tmpfs if the machine has one: some disks remove only a few hundred
/// directories a second.
pub(crate) fn in_memory() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

fn open(path: &Path) -> OwnedFd {
    openat(CWD, path, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()).unwrap()
}

/// Calls `remove` until it is done. Returns the number of calls.
fn remove_all(parent: &Path, name: &CStr) -> usize {
    let parent = open(parent);
    (1..)
        .find(|_| {
            remove(&parent, name, MountPolicy::Refuse, ENTRIES).unwrap() == RemoveProgress::Done
        })
        .unwrap()
}

/// Creates nested directories.
pub(crate) fn nest(dir: &Path, levels: usize, name: &CStr) {
    let mut dir = open(dir);
    for _ in 0..levels {
        mkdirat(&dir, name, Mode::RWXU).unwrap();
        dir = openat(&dir, name, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()).unwrap();
    }
}

/// Verifies X41.
#[test]
fn removal_of_100_000_levels_leaves_nothing() {
    let temp = in_memory();
    fs::create_dir(temp.path().join("tree")).unwrap();
    nest(&temp.path().join("tree"), 100_000, c"d");
    let calls = remove_all(temp.path(), c"tree");
    assert!(calls > 10, "{calls} calls");
    assert_eq!(fs::read_dir(temp.path()).unwrap().count(), 0);
}

#[test]
fn removal_of_a_wide_and_nested_tree_leaves_nothing() {
    let temp = in_memory();
    let tree = temp.path().join("tree");
    for outer in 0..300 {
        fs::create_dir_all(tree.join(format!("{outer}/a/b"))).unwrap();
        for inner in 0..30 {
            File::create(tree.join(format!("{outer}/a/{inner}"))).unwrap();
            fs::create_dir_all(tree.join(format!("{outer}/a/b/{inner}/c"))).unwrap();
        }
    }
    assert!(remove_all(temp.path(), c"tree") > 1);
    assert!(!tree.exists());
}

/// Verifies X41.
#[test]
fn removal_follows_no_link_and_removes_every_kind_of_file() {
    let temp = tempfile::tempdir().unwrap();
    let (tree, kept) = (temp.path().join("tree"), temp.path().join("kept"));
    fs::create_dir_all(tree.join("inner")).unwrap();
    fs::create_dir(&kept).unwrap();
    fs::write(kept.join("file"), "kept").unwrap();
    symlink(&kept, tree.join("link")).unwrap();
    symlink(&kept, tree.join("inner/link")).unwrap();
    symlink("nowhere", tree.join("inner/dangling")).unwrap();
    let fifo = nix::sys::stat::Mode::S_IRUSR;
    nix::unistd::mkfifo(&tree.join("inner/fifo"), fifo).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(tree.join("inner/socket")).unwrap();
    File::create(tree.join(OsStr::from_bytes(&[b'x'; 255]))).unwrap();
    fs::create_dir_all(
        tree.join(OsStr::from_bytes(b"\xff\xfe")).join(OsStr::from_bytes(&[0xc0; 255])),
    )
    .unwrap();
    let sparse = File::create(tree.join("inner/sparse")).unwrap();
    // Some file systems don't support this length.
    let _ = sparse.set_len(1 << 43);
    remove_all(temp.path(), c"tree");
    assert!(!tree.exists());
    assert_eq!(fs::read_to_string(kept.join("file")).unwrap(), "kept");
    symlink(&kept, temp.path().join("link")).unwrap();
    remove_all(temp.path(), c"link");
    assert_eq!(fs::read_dir(temp.path()).unwrap().count(), 1);
    assert_eq!(fs::read_to_string(kept.join("file")).unwrap(), "kept");
}

#[test]
fn removal_of_an_absent_name_succeeds() {
    let temp = tempfile::tempdir().unwrap();
    assert_eq!(remove_all(temp.path(), c"absent"), 1);
}

#[test]
fn removal_of_a_tree_with_moved_names_leaves_nothing() {
    let temp = tempfile::tempdir().unwrap();
    let tree = temp.path().join("tree");
    for number in 0..20 {
        fs::create_dir_all(tree.join(format!("{MOVED_PREFIX}{number}/x/y"))).unwrap();
    }
    fs::create_dir_all(tree.join("a/b/c/d/e")).unwrap();
    fs::write(tree.join(format!("{MOVED_PREFIX}20")), "").unwrap();
    let mut removal = Removal::new(open(&tree), MountPolicy::Refuse, Budget(usize::MAX));
    // The first moved directory collides with all these names. With a random base it would not.
    (removal.base, removal.moved) = (0, 0);
    assert!(removal.pass().unwrap());
    assert_eq!((removal.moved, fs::read_dir(&tree).unwrap().count()), (0, 0));
}

/// Creates a directory of non-empty directories, and directories at the top with names of moved
/// directories.
fn wide_tree_with_moved_names(tree: &Path, wide: usize, moved: usize) {
    for number in 0..wide {
        fs::create_dir_all(tree.join(format!("wide/{number}/x"))).unwrap();
    }
    for number in 0..moved {
        fs::create_dir_all(tree.join(format!("{MOVED_PREFIX}{number}/x/y"))).unwrap();
    }
}

/// The file system decides on the order of a directory's entries: the wide directory may come
/// before all directories that earlier calls have moved out of it.
/// Verifies X41.
#[test]
fn names_of_earlier_calls_do_not_slow_down_a_call() {
    let temp = in_memory();
    wide_tree_with_moved_names(temp.path(), 2000, 5000);
    let mut removal = Removal::new(open(temp.path()), MountPolicy::Refuse, Budget(1000));
    removal.remove_at_top(c"wide").unwrap();
    let left = fs::read_dir(temp.path().join("wide")).unwrap().count();
    assert!(left <= 1600, "{left} of 2000 directories are left");
}

/// Verifies X41.
#[test]
fn search_for_a_free_name_ends_with_the_budget() {
    let temp = in_memory();
    wide_tree_with_moved_names(temp.path(), 10, 500);
    let mut removal = Removal::new(open(temp.path()), MountPolicy::Refuse, Budget(100));
    (removal.base, removal.moved) = (0, 0);
    removal.remove_at_top(c"wide").unwrap();
    assert!(removal.moved <= 100, "{} names were tried", removal.moved);
    assert_eq!(fs::read_dir(temp.path().join("wide")).unwrap().count(), 10);
}

#[test]
fn removal_without_renames_leaves_nothing() {
    let temp = in_memory();
    let tree = temp.path().join("tree");
    fs::create_dir_all(tree.join("a")).unwrap();
    nest(&tree.join("a"), 500, c"d");
    fs::create_dir_all(tree.join("a/x/y")).unwrap();
    let parent = open(temp.path());
    let top = dir::open_dir(&parent, c"tree").unwrap();
    let budget = Budget(usize::MAX);
    let mut removal = Removal::new(top, MountPolicy::Refuse, budget);
    // 500 levels, x with y, and a.
    let top = open(&tree);
    for _ in 0..600 {
        removal.remove_leaf(top.as_fd(), c"a").unwrap();
    }
    assert_eq!(fs::read_dir(&tree).unwrap().count(), 0);
}

/// Verifies X41.
#[test]
fn removal_of_a_growing_tree_ends_once_it_stops_growing() {
    let temp = in_memory();
    let tree = temp.path().join("tree");
    fs::create_dir(&tree).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for number in 0_u64.. {
                if stop.load(Ordering::SeqCst) {
                    return;
                }
                // Each call may fail, because the tree is being removed.
                let _ = fs::create_dir_all(tree.join(format!("{}/a/b", number % 7)));
                let _ = fs::rename(tree.join("1/a"), tree.join("2/a/b/c"));
                let _ = fs::write(tree.join("3/a/file"), "");
                let _ = symlink("/", tree.join("4/a/b/link"));
            }
        });
        let parent = open(temp.path());
        for _ in 0..200 {
            let removed = remove(&parent, c"tree", MountPolicy::Refuse, 50).unwrap();
            assert!(matches!(removed, RemoveProgress::Done | RemoveProgress::Partial));
        }
        stop.store(true, Ordering::SeqCst);
    });
    remove_all(temp.path(), c"tree");
    assert!(!tree.exists());
}
