use std::{
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt, symlink},
    path::PathBuf,
};

use kiyot_proto::cell::{MakeDir, WriteFile};
use proptest::prelude::*;
use tempfile::TempDir;

use super::*;

struct Fixture {
    temp: TempDir,
    files: Files,
    writer: Option<FileWriter>,
}

impl Fixture {
    fn new() -> Self {
        let temp = tempfile::tempdir().unwrap();
        for name in ["pod", "memory", "outside"] {
            fs::create_dir(temp.path().join(name)).unwrap();
        }
        let files = Files::open(&temp.path().join("pod"), &temp.path().join("memory")).unwrap();
        Self { temp, files, writer: None }
    }

    fn pod(&self, path: &str) -> PathBuf {
        self.temp.path().join("pod").join(path)
    }

    fn apply(&mut self, path: &str, change: Change) -> Result<(), FileError> {
        self.files.apply(
            FileChange { root: Root::Pod as i32, path: path.into(), change: Some(change) },
            &mut self.writer,
        )
    }

    fn get(&self, path: &str, limit: u32) -> Result<GetFileReply, FileError> {
        self.files.get(&GetFileRequest {
            root: Root::Pod as i32,
            path: path.into(),
            limit,
            last: false,
        })
    }
}

fn make_dir(mode: u32) -> Change {
    let (uid, gid) = current_ids();
    Change::MakeDir(MakeDir { mode, uid, gid, keep: false })
}

fn write(mode: u32, content: &'static [u8], more: bool) -> Change {
    let (uid, gid) = current_ids();
    Change::WriteFile(WriteFile { mode, uid, gid, content: content.into(), more, in_place: false })
}

fn current_ids() -> (u32, u32) {
    (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw())
}

#[test]
fn make_dir_creates_parents_and_sets_mode() {
    let mut fixture = Fixture::new();
    fixture.apply("a/b/c", make_dir(0o1777)).unwrap();
    assert_eq!(fs::metadata(fixture.pod("a/b/c")).unwrap().mode() & 0o7777, 0o1777);
    assert_eq!(fs::metadata(fixture.pod("a/b")).unwrap().mode() & 0o7777, 0o755);
    fixture.apply("a/b/c", make_dir(0o700)).unwrap();
    assert_eq!(fs::metadata(fixture.pod("a/b/c")).unwrap().mode() & 0o7777, 0o700);
    let keep = Change::MakeDir(MakeDir { mode: 0o777, keep: true, ..Default::default() });
    fixture.apply("a/b/c", keep).unwrap();
    assert_eq!(fs::metadata(fixture.pod("a/b/c")).unwrap().mode() & 0o7777, 0o700);
}

#[test]
fn file_is_replaced_atomically() {
    let mut fixture = Fixture::new();
    fixture.apply("v", make_dir(0o755)).unwrap();
    fixture.apply("v/key", write(0o444, b"one", false)).unwrap();
    let before = fs::File::open(fixture.pod("v/key")).unwrap();
    fixture.apply("v/key", write(0o440, b"two", false)).unwrap();
    assert_eq!(fs::read(fixture.pod("v/key")).unwrap(), b"two");
    assert_eq!(fs::metadata(fixture.pod("v/key")).unwrap().mode() & 0o7777, 0o440);
    assert_eq!(std::io::read_to_string(before).unwrap(), "one");
}

#[test]
fn file_of_several_parts_appears_when_complete() {
    let mut fixture = Fixture::new();
    fixture.apply("f", write(0o600, b"ab", true)).unwrap();
    assert!(!fixture.pod("f").exists());
    fixture.apply("f", Change::Append("cd".into())).unwrap();
    fixture.apply("f", Change::Append("".into())).unwrap();
    assert_eq!(fs::read(fixture.pod("f")).unwrap(), b"abcd");

    fixture.apply("g", write(0o600, b"ab", true)).unwrap();
    assert!(matches!(
        fixture.apply("other", Change::Append("x".into())),
        Err(FileError::Rejected { .. })
    ));
    assert!(matches!(
        fixture.apply("g", Change::Append("x".into())),
        Err(FileError::Rejected { .. })
    ));
    let left: Vec<_> =
        fs::read_dir(fixture.pod("")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["f"], "the temporary file is removed");
}

#[test]
fn data_link_is_swapped_as_the_kubelet_does() {
    let mut fixture = Fixture::new();
    fixture.apply("v/..2026", make_dir(0o755)).unwrap();
    fixture.apply("v/..2026/key", write(0o644, b"x", false)).unwrap();
    fixture.apply("v/..data_tmp", Change::Symlink("..2026".into())).unwrap();
    fixture.apply("v/..data_tmp", Change::RenameTo("v/..data".into())).unwrap();
    fixture.apply("v/key", Change::Symlink("..data/key".into())).unwrap();
    fixture.apply("v/key", Change::Symlink("..data/key".into())).unwrap();
    assert_eq!(fs::read(fixture.pod("v/key")).unwrap(), b"x");
    fixture.apply("v", Change::Remove(true)).unwrap();
    fixture.apply("v", Change::Remove(true)).unwrap();
    fixture.apply("never/was", Change::Remove(true)).unwrap();
    assert!(!fixture.pod("v").exists());
}

#[test]
fn symlink_leading_out_is_not_followed() {
    let mut fixture = Fixture::new();
    let outside = fixture.temp.path().join("outside");
    fs::write(outside.join("secret"), "s").unwrap();
    symlink(&outside, fixture.pod("out")).unwrap();
    symlink(outside.join("secret"), fixture.pod("file")).unwrap();
    assert!(fixture.get("out/secret", 10).is_err());
    assert!(fixture.get("file", 10).is_err());
    assert!(fixture.apply("out/new", write(0o600, b"x", false)).is_err());
    assert!(fixture.apply("out/new", make_dir(0o755)).is_err());
    assert!(fixture.apply("out/new/deeper", make_dir(0o755)).is_err());
    assert!(fixture.apply("out", make_dir(0o700)).is_err());
    assert!(fixture.apply("secret", Change::RenameTo("out/secret".into())).is_err());
    assert!(fixture.apply("out/secret", Change::Remove(true)).is_err());
    assert!(fixture.apply("bound", Change::Bind("out".into())).is_err());
    fixture.apply("out", Change::Remove(true)).unwrap();
    assert_eq!(fs::read(outside.join("secret")).unwrap(), b"s");
    // A link in the place of a file is replaced, not followed.
    fixture.apply("file", write(0o600, b"mine", false)).unwrap();
    assert_eq!(fs::read(outside.join("secret")).unwrap(), b"s");
    assert!(fs::symlink_metadata(fixture.pod("file")).unwrap().is_file());
}

#[test]
fn get_reads_regular_files_up_to_the_limit() {
    let fixture = Fixture::new();
    fs::write(fixture.pod("message"), "0123456789").unwrap();
    assert_eq!(
        fixture.get("message", 4).unwrap(),
        GetFileReply { content: "0123".into(), exists: true }
    );
    assert_eq!(fixture.get("message", 100).unwrap().content, "0123456789");
    assert!(!fixture.get("absent", 4).unwrap().exists);
    assert!(!fixture.get("absent/too", 4).unwrap().exists);
    fs::create_dir(fixture.pod("dir")).unwrap();
    assert!(fixture.get("dir", 4).is_err());
    rustix::fs::mkfifoat(CWD, fixture.pod("pipe"), Mode::RUSR | Mode::WUSR).unwrap();
    assert!(fixture.get("pipe", 4).is_err());
}

#[test]
fn values_out_of_range_are_rejected() {
    let mut fixture = Fixture::new();
    assert!(matches!(fixture.apply("d", make_dir(0o10000)), Err(FileError::Value { .. })));
    let invalid_owner =
        Change::MakeDir(MakeDir { mode: 0o700, uid: u32::MAX, ..Default::default() });
    assert!(matches!(fixture.apply("d", invalid_owner), Err(FileError::Value { .. })));
    let change = FileChange { root: 7, path: "d".into(), change: Some(make_dir(0o700)) };
    assert!(matches!(fixture.files.apply(change, &mut None), Err(FileError::Value { .. })));
    assert_eq!(
        Status::from(fixture.get("../x", 1).unwrap_err()).code(),
        tonic::Code::InvalidArgument
    );
}

#[test]
fn tree_with_unreadable_entries_is_removed() {
    let mut fixture = Fixture::new();
    fixture.apply("t/a/b/c/d", make_dir(0o700)).unwrap();
    fs::write(fixture.pod("t/a/b/file"), "x").unwrap();
    symlink("/", fixture.pod("t/a/link")).unwrap();
    fs::set_permissions(fixture.pod("t/a/b/file"), fs::Permissions::from_mode(0o000)).unwrap();
    fixture.apply("t", Change::Remove(true)).unwrap();
    assert!(!fixture.pod("t").exists());
}

/// Verifies X41.
#[test]
fn tree_deeper_than_any_path_is_removed() {
    let mut fixture = Fixture::new();
    fs::create_dir(fixture.pod("tree")).unwrap();
    let open = |dir: &OwnedFd, name: &str| {
        openat(dir, name, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()).unwrap()
    };
    let mut dir = openat(CWD, fixture.pod("tree"), OFlags::DIRECTORY, Mode::empty()).unwrap();
    let name = "d".repeat(255);
    for _ in 0..300 {
        rustix::fs::mkdirat(&dir, name.as_str(), Mode::RWXU).unwrap();
        dir = open(&dir, &name);
    }
    fixture.apply("tree", Change::Remove(true)).unwrap();
    assert!(!fixture.pod("tree").exists());
}

/// Verifies Y51.
#[test]
fn pipe_in_place_of_a_file_is_not_opened() {
    let fixture = Fixture::new();
    nix::unistd::mkfifo(&fixture.pod("pipe"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    let path = RelPath::parse("pipe").unwrap();
    for write in [false, true] {
        let error = fixture.files.open_pod_file(&path, write).unwrap_err();
        assert!(matches!(error, FileError::Rejected { why: "not a regular file", .. }), "{error}");
    }
}

proptest! {
    #[test]
    fn path_parses_only_if_plain_and_relative(path in "[a./\\\\]{0,12}") {
        let is_plain = |name: &str| !matches!(name, "" | "." | "..");
        let plain = !path.is_empty() && path.split('/').all(is_plain);
        prop_assert_eq!(RelPath::parse(&path).is_ok(), plain);
        if let Ok(parsed) = RelPath::parse(&path) {
            let (parent, name) = (parsed.parent(), parsed.name());
            let joined =
                if parent.is_empty() { name.to_owned() } else { format!("{parent}/{name}") };
            prop_assert_eq!(joined, path);
        }
    }
}

/// Verifies U13.
#[test]
fn file_that_is_written_in_place_keeps_its_inode_and_mode() {
    let mut fixture = Fixture::new();
    let in_place = |mode, content, more| match write(mode, content, more) {
        Change::WriteFile(file) => Change::WriteFile(WriteFile { in_place: true, ..file }),
        other => other,
    };
    fixture.apply("hosts", in_place(0o644, b"a long first line", false)).unwrap();
    let before = fs::metadata(fixture.pod("hosts")).unwrap();
    fixture.apply("hosts", in_place(0o600, b"one", true)).unwrap();
    fixture.apply("hosts", Change::Append(b" two"[..].into())).unwrap();
    fixture.apply("hosts", Change::Append([][..].into())).unwrap();
    let after = fs::metadata(fixture.pod("hosts")).unwrap();
    assert_eq!((after.ino(), after.mode()), (before.ino(), before.mode()));
    assert_eq!(fs::read(fixture.pod("hosts")).unwrap(), b"one two");
    // Without the flag a file is replaced.
    fixture.apply("hosts", write(0o644, b"three", false)).unwrap();
    assert_ne!(fs::metadata(fixture.pod("hosts")).unwrap().ino(), before.ino());
    // Only a regular file is written, and no link is followed.
    fs::write(fixture.temp.path().join("outside/file"), "theirs").unwrap();
    symlink(fixture.temp.path().join("outside/file"), fixture.pod("link")).unwrap();
    fixture.apply("link", in_place(0o644, b"ours", false)).unwrap_err();
    assert_eq!(fs::read(fixture.temp.path().join("outside/file")).unwrap(), b"theirs");
}
