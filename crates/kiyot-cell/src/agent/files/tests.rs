use std::{
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt, symlink},
    path::PathBuf,
};

use kiyot_proto::cell::{MakeDir, WriteFile};
use proptest::prelude::*;
use tempfile::TempDir;

use super::*;

struct Bench {
    temp: TempDir,
    files: Files,
    writing: Option<Writing>,
}

impl Bench {
    fn new() -> Self {
        let temp = tempfile::tempdir().unwrap();
        for name in ["pod", "memory", "outside"] {
            fs::create_dir(temp.path().join(name)).unwrap();
        }
        let files = Files::open(&temp.path().join("pod"), &temp.path().join("memory")).unwrap();
        Self { temp, files, writing: None }
    }

    fn pod(&self, path: &str) -> PathBuf {
        self.temp.path().join("pod").join(path)
    }

    fn apply(&mut self, path: &str, change: Change) -> Result<(), FileError> {
        self.files.apply(
            FileChange { root: Root::Pod as i32, path: path.into(), change: Some(change) },
            &mut self.writing,
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
    let (uid, gid) = me();
    Change::MakeDir(MakeDir { mode, uid, gid, keep: false })
}

fn write(mode: u32, content: &'static [u8], more: bool) -> Change {
    let (uid, gid) = me();
    Change::WriteFile(WriteFile { mode, uid, gid, content: content.into(), more })
}

fn me() -> (u32, u32) {
    (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw())
}

#[test]
fn a_directory_is_made_with_its_parents_and_gets_its_mode() {
    let mut bench = Bench::new();
    bench.apply("a/b/c", make_dir(0o1777)).unwrap();
    assert_eq!(fs::metadata(bench.pod("a/b/c")).unwrap().mode() & 0o7777, 0o1777);
    assert_eq!(fs::metadata(bench.pod("a/b")).unwrap().mode() & 0o7777, 0o755);
    bench.apply("a/b/c", make_dir(0o700)).unwrap();
    assert_eq!(fs::metadata(bench.pod("a/b/c")).unwrap().mode() & 0o7777, 0o700);
    let keep = Change::MakeDir(MakeDir { mode: 0o777, keep: true, ..Default::default() });
    bench.apply("a/b/c", keep).unwrap();
    assert_eq!(fs::metadata(bench.pod("a/b/c")).unwrap().mode() & 0o7777, 0o700);
}

#[test]
fn a_file_is_replaced_as_a_whole() {
    let mut bench = Bench::new();
    bench.apply("v", make_dir(0o755)).unwrap();
    bench.apply("v/key", write(0o444, b"one", false)).unwrap();
    let before = fs::File::open(bench.pod("v/key")).unwrap();
    bench.apply("v/key", write(0o440, b"two", false)).unwrap();
    assert_eq!(fs::read(bench.pod("v/key")).unwrap(), b"two");
    assert_eq!(fs::metadata(bench.pod("v/key")).unwrap().mode() & 0o7777, 0o440);
    assert_eq!(std::io::read_to_string(before).unwrap(), "one");
}

#[test]
fn a_long_file_is_in_place_only_when_it_is_whole() {
    let mut bench = Bench::new();
    bench.apply("f", write(0o600, b"ab", true)).unwrap();
    assert!(!bench.pod("f").exists());
    bench.apply("f", Change::Append("cd".into())).unwrap();
    bench.apply("f", Change::Append("".into())).unwrap();
    assert_eq!(fs::read(bench.pod("f")).unwrap(), b"abcd");

    bench.apply("g", write(0o600, b"ab", true)).unwrap();
    assert!(matches!(
        bench.apply("other", Change::Append("x".into())),
        Err(FileError::Order { .. })
    ));
    assert!(matches!(bench.apply("g", Change::Append("x".into())), Err(FileError::Order { .. })));
    let left: Vec<_> =
        fs::read_dir(bench.pod("")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["f"], "nothing is left of the unfinished file");
}

#[test]
fn links_are_made_and_renamed_as_the_kubelet_does() {
    let mut bench = Bench::new();
    bench.apply("v/..2026", make_dir(0o755)).unwrap();
    bench.apply("v/..2026/key", write(0o644, b"x", false)).unwrap();
    bench.apply("v/..data_tmp", Change::Symlink("..2026".into())).unwrap();
    bench.apply("v/..data_tmp", Change::RenameTo("v/..data".into())).unwrap();
    bench.apply("v/key", Change::Symlink("..data/key".into())).unwrap();
    bench.apply("v/key", Change::Symlink("..data/key".into())).unwrap();
    assert_eq!(fs::read(bench.pod("v/key")).unwrap(), b"x");
    bench.apply("v", Change::Remove(true)).unwrap();
    bench.apply("v", Change::Remove(true)).unwrap();
    bench.apply("never/was", Change::Remove(true)).unwrap();
    assert!(!bench.pod("v").exists());
}

#[test]
fn no_link_leads_out() {
    let mut bench = Bench::new();
    let outside = bench.temp.path().join("outside");
    fs::write(outside.join("secret"), "s").unwrap();
    symlink(&outside, bench.pod("out")).unwrap();
    symlink(outside.join("secret"), bench.pod("file")).unwrap();
    assert!(bench.get("out/secret", 10).is_err());
    assert!(bench.get("file", 10).is_err());
    assert!(bench.apply("out/new", write(0o600, b"x", false)).is_err());
    assert!(bench.apply("out/new", make_dir(0o755)).is_err());
    assert!(bench.apply("out/new/deeper", make_dir(0o755)).is_err());
    assert!(bench.apply("out", make_dir(0o700)).is_err());
    assert!(bench.apply("secret", Change::RenameTo("out/secret".into())).is_err());
    assert!(bench.apply("out/secret", Change::Remove(true)).is_err());
    assert!(bench.apply("bound", Change::Bind("out".into())).is_err());
    bench.apply("out", Change::Remove(true)).unwrap();
    assert_eq!(fs::read(outside.join("secret")).unwrap(), b"s");
    // A link in place of a file is replaced, not followed.
    bench.apply("file", write(0o600, b"mine", false)).unwrap();
    assert_eq!(fs::read(outside.join("secret")).unwrap(), b"s");
    assert!(fs::symlink_metadata(bench.pod("file")).unwrap().is_file());
}

#[test]
fn a_file_is_read_to_the_limit_and_only_if_regular() {
    let bench = Bench::new();
    fs::write(bench.pod("message"), "0123456789").unwrap();
    assert_eq!(
        bench.get("message", 4).unwrap(),
        GetFileReply { content: "0123".into(), exists: true }
    );
    assert_eq!(bench.get("message", 100).unwrap().content, "0123456789");
    assert!(!bench.get("absent", 4).unwrap().exists);
    assert!(!bench.get("absent/too", 4).unwrap().exists);
    fs::create_dir(bench.pod("dir")).unwrap();
    assert!(bench.get("dir", 4).is_err());
    rustix::fs::mkfifoat(CWD, bench.pod("pipe"), Mode::RUSR | Mode::WUSR).unwrap();
    assert!(bench.get("pipe", 4).is_err());
}

#[test]
fn values_without_meaning_are_refused() {
    let mut bench = Bench::new();
    assert!(matches!(bench.apply("d", make_dir(0o10000)), Err(FileError::Value { .. })));
    let nobody = Change::MakeDir(MakeDir { mode: 0o700, uid: u32::MAX, ..Default::default() });
    assert!(matches!(bench.apply("d", nobody), Err(FileError::Value { .. })));
    let change = FileChange { root: 7, path: "d".into(), change: Some(make_dir(0o700)) };
    assert!(matches!(bench.files.apply(change, &mut None), Err(FileError::Value { .. })));
    assert_eq!(
        Status::from(bench.get("../x", 1).unwrap_err()).code(),
        tonic::Code::InvalidArgument
    );
}

#[test]
fn a_deep_tree_with_odd_modes_is_removed() {
    let mut bench = Bench::new();
    bench.apply("t/a/b/c/d", make_dir(0o700)).unwrap();
    fs::write(bench.pod("t/a/b/file"), "x").unwrap();
    symlink("/", bench.pod("t/a/link")).unwrap();
    fs::set_permissions(bench.pod("t/a/b/file"), fs::Permissions::from_mode(0o000)).unwrap();
    bench.apply("t", Change::Remove(true)).unwrap();
    assert!(!bench.pod("t").exists());
}

/// Verifies X41.
#[test]
fn tree_deeper_than_any_path_is_removed() {
    let mut bench = Bench::new();
    fs::create_dir(bench.pod("tree")).unwrap();
    let open = |dir: &OwnedFd, name: &str| {
        openat(dir, name, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()).unwrap()
    };
    let mut dir = openat(CWD, bench.pod("tree"), OFlags::DIRECTORY, Mode::empty()).unwrap();
    let name = "d".repeat(255);
    for _ in 0..300 {
        rustix::fs::mkdirat(&dir, name.as_str(), Mode::RWXU).unwrap();
        dir = open(&dir, &name);
    }
    bench.apply("tree", Change::Remove(true)).unwrap();
    assert!(!bench.pod("tree").exists());
}

/// Verifies Y51.
#[test]
fn pipe_in_place_of_a_file_is_not_opened() {
    let bench = Bench::new();
    nix::unistd::mkfifo(&bench.pod("pipe"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    let path = RelPath::parse("pipe").unwrap();
    for write in [false, true] {
        let error = bench.files.open_pod_file(&path, write).unwrap_err();
        assert!(matches!(error, FileError::Order { why: "not a regular file", .. }), "{error}");
    }
}

proptest! {
    #[test]
    fn only_plain_relative_paths_are_taken(path in "[a./\\\\]{0,12}") {
        let plain = !path.is_empty() && path.split('/').all(|name| !matches!(name, "" | "." | ".."));
        prop_assert_eq!(RelPath::parse(&path).is_ok(), plain);
        if let Ok(parsed) = RelPath::parse(&path) {
            let joined = if parsed.parent().is_empty() { parsed.name().to_owned() } else { format!("{}/{}", parsed.parent(), parsed.name()) };
            prop_assert_eq!(joined, path);
        }
    }
}
