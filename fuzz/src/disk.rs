//! File changes of a cell's agent, on a disk.

use std::{
    fs, io,
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
};

use kiyot::backends::milpa::volumes::fuzzing::{self, Update};
use kiyot_cell::agent::files::{FileWriter, Files, RelPath};
use kiyot_proto::cell::{
    FileChange, GetFileRequest, MakeDir, Root, WriteFile, file_change::Change,
};
use prost::Message;
use tempfile::TempDir;

/// Limit of the changes of an input, so that each input ends soon.
const CHANGES: usize = 32;
/// Prefix of unfinished files.
const UNFINISHED: &str = ".kiyot-unfinished-";

/// The agent's two directories, and a third directory outside. A link in the first directory leads
/// to the third, but no change may reach it.
struct Bench {
    temp: TempDir,
    files: Files,
    writing: Option<FileWriter>,
}

impl Bench {
    fn new() -> io::Result<Self> {
        let temp = tempfile::tempdir()?;
        for name in ["pod", "memory", "outside"] {
            fs::create_dir(temp.path().join(name))?;
        }
        fs::write(temp.path().join("outside/secret"), "s")?;
        symlink("../outside", temp.path().join("pod/out"))?;
        let files = Files::open(&temp.path().join("pod"), &temp.path().join("memory"))?;
        Ok(Self { temp, files, writing: None })
    }

    fn path(&self, root: i32, path: &str) -> PathBuf {
        self.temp
            .path()
            .join(if root == i32::from(Root::Memory) { "memory" } else { "pod" })
            .join(path)
    }

    /// Applies a change, and checks the reported result.
    fn apply(&mut self, change: FileChange) {
        let FileChange { root, path, .. } = change.clone();
        let at = self.path(root, &path);
        let done = self.files.apply(change.clone(), &mut self.writing);
        if RelPath::parse(&path).is_err() || Root::try_from(root).is_err() {
            return assert!(done.is_err(), "{path:?} of {root} is taken");
        }
        if done.is_err() {
            return;
        }
        match change.change {
            Some(Change::MakeDir(MakeDir { mode, keep, .. })) => {
                let found =
                    fs::symlink_metadata(&at).unwrap_or_else(|error| panic!("{path:?}: {error}"));
                assert!(
                    keep || (found.is_dir() && found.permissions().mode() & 0o7777 == mode),
                    "{path:?}: {found:?}"
                );
            }
            // A file may be unreadable although its owner may change it.
            Some(Change::WriteFile(WriteFile { content, more: false, mode, .. }))
                if mode & 0o400 != 0 =>
            {
                let limit = u32::try_from(content.len()).unwrap_or(u32::MAX).saturating_add(1);
                let got = self.files.get(&GetFileRequest {
                    root,
                    path: path.clone(),
                    limit,
                    last: false,
                });
                assert!(
                    matches!(&got, Ok(got) if got.exists && got.content == content),
                    "{path:?}: {got:?}"
                );
            }
            Some(Change::Symlink(target)) => {
                assert_eq!(fs::read_link(&at).ok(), Some(PathBuf::from(target)))
            }
            Some(Change::Remove(true)) => {
                assert!(fs::symlink_metadata(&at).is_err(), "{path:?} still exists")
            }
            Some(Change::RenameTo(to)) => {
                assert!(fs::symlink_metadata(self.path(root, &to)).is_ok(), "{to:?} is absent")
            }
            _ => {}
        }
    }

    /// Checks that nothing outside has changed and no unfinished file is left.
    fn check(mut self, named: bool) {
        self.writing = None;
        let outside = self.temp.path().join("outside");
        assert_eq!(fs::read_to_string(outside.join("secret")).ok().as_deref(), Some("s"));
        assert_eq!(names(&outside), ["secret"]);
        assert_eq!(names(self.temp.path()), ["memory", "outside", "pod"]);
        if !named {
            nothing_unfinished(&self.temp.path().join("pod"));
            nothing_unfinished(&self.temp.path().join("memory"));
        }
    }
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(dir)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

fn nothing_unfinished(dir: &Path) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        assert!(!entry.file_name().to_string_lossy().starts_with(UNFINISHED), "{:?}", entry.path());
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            nothing_unfinished(&entry.path());
        }
    }
}

/// Returns whether a change needs no mount.
fn is_plain(change: &FileChange) -> bool {
    !matches!(change.change, Some(Change::MountTmpfs(_) | Change::Bind(_)))
}

/// Applies length-prefixed changes.
pub fn changes(mut bytes: &[u8]) {
    let Ok(mut bench) = Bench::new() else { return };
    let named = bytes.windows(UNFINISHED.len()).any(|window| window == UNFINISHED.as_bytes());
    for _ in 0..CHANGES {
        let Ok(change) = FileChange::decode_length_delimited(&mut bytes) else { break };
        if is_plain(&change) {
            bench.apply(change);
        }
        if bytes.is_empty() {
            break;
        }
    }
    bench.check(named);
}

/// Copies a volume and then its next state into a cell, by the daemon's plan and the agent's code.
pub fn update(bytes: &[u8]) {
    let Some(Update { first, second, expected }) = fuzzing::update(bytes) else { return };
    let Ok(mut bench) = Bench::new() else { return };
    let place = bench.path(Root::Pod.into(), "volumes/kubernetes.io~secret");
    fs::create_dir_all(&place).unwrap_or_else(|error| panic!("{error}"));
    for change in first.into_iter().chain(second) {
        let done = bench.files.apply(change.clone(), &mut bench.writing);
        assert!(done.is_ok(), "{change:?}: {done:?}");
    }
    let mut found = 0;
    count(&place.join("s"), &mut found);
    assert_eq!(found, expected.len());
    for (path, mode, link, content) in expected {
        let at = bench.path(Root::Pod.into(), &path);
        let metadata =
            fs::symlink_metadata(&at).unwrap_or_else(|error| panic!("{path:?}: {error}"));
        match (link, content) {
            (Some(target), _) => assert_eq!(fs::read_link(&at).ok(), Some(PathBuf::from(target))),
            (None, Some(content)) => assert!(
                metadata.is_file() && fs::read(&at).is_ok_and(|found| found == content),
                "{path:?}"
            ),
            (None, None) => assert!(metadata.is_dir(), "{path:?}"),
        }
        assert!(
            metadata.is_symlink() || metadata.permissions().mode() & 0o7777 == mode,
            "{path:?}: {metadata:?}"
        );
    }
    bench.check(true);
}

fn count(dir: &Path, found: &mut usize) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        *found += 1;
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            count(&entry.path(), found);
        }
    }
}
