//! Mounts below a pod's directories.

use std::{fs, os::unix::fs::MetadataExt, path::PathBuf};

use kiyot_cell::agent::files::{FileError, Files};
use kiyot_proto::cell::{FileChange, MakeDir, MountTmpfs, Root, WriteFile, file_change::Change};

struct Fixture {
    temp: tempfile::TempDir,
    files: Files,
}

impl Fixture {
    fn new() -> Self {
        let temp = tempfile::tempdir().unwrap();
        let files = Files::open(temp.path(), temp.path()).unwrap();
        Self { temp, files }
    }

    fn apply(&self, path: &str, change: Change) -> Result<(), FileError> {
        self.files.apply(
            FileChange { root: Root::Memory as i32, path: path.into(), change: Some(change) },
            &mut None,
        )
    }

    fn path(&self, path: &str) -> PathBuf {
        self.temp.path().join(path)
    }

    fn mounts(&self) -> usize {
        let name = self.temp.path().to_str().unwrap();
        fs::read_to_string("/proc/self/mountinfo")
            .unwrap()
            .lines()
            .filter(|line| line.contains(name))
            .count()
    }
}

fn tmpfs(size_bytes: u64, mode: u32, keep: bool) -> Change {
    Change::MountTmpfs(MountTmpfs { mode, uid: 7, gid: 8, size_bytes, keep })
}

fn file(content: &'static [u8]) -> Change {
    Change::WriteFile(WriteFile { mode: 0o644, content: content.into(), ..Default::default() })
}

#[test]
fn tmpfs_has_size_mode_and_owner_and_is_removed_with_its_directory() {
    let bench = Fixture::new();
    bench.apply("e/v", tmpfs(1 << 20, 0o2770, false)).unwrap();
    let stat = fs::metadata(bench.path("e/v")).unwrap();
    assert_eq!((stat.mode() & 0o7777, stat.uid(), stat.gid()), (0o2770, 7, 8));
    let size = || {
        let stat = rustix::fs::statvfs(bench.path("e/v")).unwrap();
        stat.f_blocks * stat.f_frsize
    };
    assert_eq!(size(), 1 << 20);
    bench.apply("e/v/kept", file(b"x")).unwrap();
    bench.apply("e/v", tmpfs(1 << 21, 0o700, true)).unwrap();
    assert_eq!(size(), 1 << 20, "keep leaves the tmpfs unchanged");
    bench.apply("e/v", tmpfs(1 << 21, 0o700, false)).unwrap();
    assert_eq!(
        (size(), fs::metadata(bench.path("e/v")).unwrap().mode() & 0o7777),
        (1 << 21, 0o700)
    );
    assert_eq!(fs::read(bench.path("e/v/kept")).unwrap(), b"x");
    assert_eq!(bench.mounts(), 1);
    let full = fs::write(bench.path("e/v/big"), vec![1; 3 << 20]).unwrap_err();
    assert_eq!(full.kind(), std::io::ErrorKind::StorageFull);
    bench.apply("e", Change::Remove(true)).unwrap();
    assert!(!bench.path("e").exists() && bench.mounts() == 0);
}

#[test]
fn directory_and_file_are_bind_mounted() {
    let bench = Fixture::new();
    bench
        .apply("from/dir", Change::MakeDir(MakeDir { mode: 0o755, ..Default::default() }))
        .unwrap();
    bench.apply("from/dir/file", file(b"content")).unwrap();
    bench.apply("to/dir", Change::Bind("from/dir".into())).unwrap();
    bench.apply("to/file", Change::Bind("from/dir/file".into())).unwrap();
    bench.apply("to/dir", Change::Bind("from/dir".into())).unwrap();
    assert_eq!(fs::read(bench.path("to/dir/file")).unwrap(), b"content");
    assert_eq!(fs::read(bench.path("to/file")).unwrap(), b"content");
    assert_eq!(bench.mounts(), 2);
    bench.apply("to", Change::Remove(true)).unwrap();
    assert_eq!(bench.mounts(), 0);
    assert_eq!(
        fs::read(bench.path("from/dir/file")).unwrap(),
        b"content",
        "the source of the bind mount stays"
    );
    assert!(bench.apply("to", Change::Bind("absent".into())).is_err());
}
