//! Fuzz targets: content of volumes, and listings from cells, made from any bytes.

use std::{
    collections::BTreeMap,
    ffi::OsStr,
    os::unix::ffi::OsStrExt as _,
    path::{Component, Path},
};

use bytes::Bytes;
use kiyot_linux::tree::RelPath;
use kiyot_proto::cell::{FileChange, Root};

use self::disk::Disk;
use super::{
    plan::{CellPath, DATA_LINK, plan},
    subpath,
    tree::{Attributes, CopyState, Entry, Tree},
};

pub(super) mod disk;

/// Path of the copy in the cell.
const COPY_PATH: &str = "volumes/kubernetes.io~secret/s";
/// Most entries of a generated tree, so that each input ends soon.
const MAX_GENERATED_ENTRIES: usize = 24;

/// Update of a volume: two generated trees, and the changes from one to the other.
#[derive(Debug)]
pub struct Update {
    /// Changes that make a first copy, in the pod's directory `volumes/kubernetes.io~secret`.
    pub first: Vec<FileChange>,
    /// Changes from the first copy to the second.
    pub second: Vec<FileChange>,
    /// Expected entries in the end: path, mode, target of a link, content of a file.
    pub expected: Vec<(String, u32, Option<String>, Option<Bytes>)>,
}

/// Plans changes from a tree to a second tree, interrupts them, and plans changes to a third tree,
/// on a disk that refuses every change that an agent refuses. In the end the copy is the volume. If
/// `..data` resolves before and in the end, it resolves after every step. With any listing of a
/// cell, no change leads out of the copy.
///
/// # Panics
/// If a property does not hold.
pub fn volumes(mut bytes: &[u8]) {
    subpaths(bytes);
    let place = CellPath::new(Root::Memory, COPY_PATH);
    let cut = usize::from(take(&mut bytes, 1).first().copied().unwrap_or_default());
    let (old, new, newest) = (tree(&mut bytes), tree(&mut bytes), tree(&mut bytes));

    let mut disk = Disk::of(&old);
    let resolves = Disk::of(&old).resolves()
        && Disk::of(&new).resolves()
        && is_atomic(&old)
        && is_atomic(&new);
    for change in plan(&CopyState::of(&old), &new, &place) {
        assert_within(&change, &place);
        disk.apply(COPY_PATH, &change);
        assert!(!resolves || disk.resolves(), "{disk:?} after {change:?}");
    }
    assert!(disk.is(&new), "{disk:?} is not {new:?}");
    assert_eq!(plan(&CopyState::of(&new), &new, &place), []);

    let (mut disk, before) = (Disk::of(&old), CopyState::of(&old));
    for change in plan(&before, &new, &place).iter().take(cut) {
        disk.apply(COPY_PATH, change);
    }
    disk.interrupt();
    let known = CopyState::from_listing(&before.between(&new).listing());
    for change in plan(&known, &newest, &place) {
        disk.apply(COPY_PATH, &change);
    }
    assert!(disk.is(&newest), "{disk:?} is not {newest:?}");

    // Any listing that a cell may send.
    for change in plan(&CopyState::from_listing(bytes), &newest, &place) {
        assert_within(&change, &place);
    }
    let decoded = CopyState::from_listing(bytes);
    assert_eq!(CopyState::from_listing(&decoded.listing()), decoded);
}

/// Returns the changes from nothing to a tree and on to a second tree; `None` if no file system
/// allows the trees' names.
pub fn update(mut bytes: &[u8]) -> Option<Update> {
    let place = CellPath::new(Root::Pod, COPY_PATH);
    let (old, new) = (tree(&mut bytes), tree(&mut bytes));
    let long =
        |tree: &Tree| tree.entries.keys().any(|path| path.split('/').any(|name| name.len() > 255));
    if long(&old) || long(&new) {
        return None;
    }
    let first = plan(&CopyState::default(), &old, &place);
    let second = plan(&CopyState::of(&old), &new, &place);
    let expected = new.entries.into_iter().map(|(path, entry)| {
        let path = format!("{COPY_PATH}/{path}");
        match entry {
            Entry::Dir(attributes) => (path, attributes.mode, None, None),
            Entry::File(attributes, content) => (path, attributes.mode, None, Some(content)),
            Entry::Link(target) => (path, 0, Some(target), None),
        }
    });
    Some(Update { first, second, expected: expected.collect() })
}

/// Resolves subPaths with any text as the mount table, and with the table that the kernel would
/// show for a bind of `volume/below` with any names.
///
/// # Panics
/// If a path leads out of the volume, or not to the bound directory.
fn subpaths(bytes: &[u8]) {
    let (volume, sub_path) =
        (Path::new("/pods/u/volumes/p/v"), Path::new("/pods/u/volume-subpaths/v/app/0"));
    if let Some(below) = subpath::resolve(bytes, volume, sub_path) {
        assert!(below.is_relative(), "{}", below.display());
    }
    let below =
        Path::new(OsStr::from_bytes(bytes.split(|byte| *byte == 0).next().unwrap_or_default()));
    let plain = below.components().all(|part| matches!(part, Component::Normal(_)));
    if plain {
        let mut text = b"22 1 8:1 / / rw - ext4 /dev/sda1 rw\n\
            23 22 8:2 /\xff /strange\xff rw - ext4 /dev/sda2 rw\n\
            40 22 8:1 "
            .to_vec();
        for byte in volume.join(below).as_os_str().as_bytes() {
            match byte {
                b' ' | b'\t' | b'\n' | b'\\' | b'#' => text.extend(format!("\\{byte:03o}").bytes()),
                _ => text.push(*byte),
            }
        }
        text.extend(b" /pods/u/volume-subpaths/v/app/0 rw - ext4 /dev/sda1 rw\n");
        assert_eq!(subpath::resolve(&text, volume, sub_path).as_deref(), Some(below));
    }
}

/// Panics unless a change stays in the copy, with a path that an agent accepts.
fn assert_within(change: &FileChange, place: &CellPath) {
    let below = change
        .path
        .strip_prefix(&place.path)
        .and_then(|rest| if rest.is_empty() { Some(rest) } else { rest.strip_prefix('/') });
    assert!(
        change.root() == place.root
            && below.is_some_and(|below| below.is_empty() || RelPath::parse(below).is_ok()),
        "{change:?}"
    );
}

/// Returns whether a tree is as the kubelet's writer leaves it: links, and only the directory
/// behind `..data`.
fn is_atomic(tree: &Tree) -> bool {
    let Some(Entry::Link(data)) = tree.entries.get(DATA_LINK) else { return false };
    data.starts_with("..")
        && tree.entries.iter().all(|(path, entry)| {
            path.contains('/') || path == data || matches!(entry, Entry::Link(_))
        })
}

fn take<'a>(bytes: &mut &'a [u8], most: usize) -> &'a [u8] {
    let (taken, rest) = bytes.split_at(most.min(bytes.len()));
    *bytes = rest;
    taken
}

/// Generates a tree: a byte with a mode, then entries. An entry is a byte with kind and mode, a
/// byte that selects its directory among the previous ones, its name up to a byte 0, and its
/// content or target with a length before it. The byte 0xff ends the tree.
fn tree(bytes: &mut &[u8]) -> Tree {
    const MODES: [u32; 4] = [0o755, 0o644, 0o400, 0o1777];
    // Files can't be given away without privileges.
    let (uid, gid) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
    let attributes = |byte: u8| Attributes { mode: MODES[usize::from(byte >> 6)], uid, gid };
    // Writable by its owner.
    let of_dir = |byte: u8| Attributes { mode: attributes(byte).mode | 0o700, uid, gid };
    let root = of_dir(take(bytes, 1).first().copied().unwrap_or_default());
    let mut entries = BTreeMap::new();
    let mut dirs = vec![String::new()];
    for _ in 0..MAX_GENERATED_ENTRIES {
        let &[kind, dir] = take(bytes, 2) else { break };
        if kind == 0xff {
            break;
        }
        let name = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
        let name = String::from_utf8_lossy(take(bytes, name)).into_owned();
        take(bytes, 1);
        let length = take(bytes, 1).first().copied().map(usize::from).unwrap_or_default();
        let content = take(bytes, length);
        let parent = &dirs[usize::from(dir) % dirs.len()];
        let path = if parent.is_empty() { name.clone() } else { format!("{parent}/{name}") };
        if name.contains('/') || RelPath::parse(&name).is_err() || entries.contains_key(&path) {
            continue;
        }
        let entry = match kind & 7 {
            // Sent in several parts.
            4 => Entry::File(attributes(kind), content.repeat(1 << 11).into()),
            0 | 1 | 5 => Entry::File(attributes(kind), Bytes::copy_from_slice(content)),
            2 | 6 => Entry::Dir(of_dir(kind)),
            _ if content.is_empty() => continue,
            _ => Entry::Link(String::from_utf8_lossy(content).replace('\0', "?")),
        };
        if matches!(entry, Entry::Dir(_)) {
            dirs.push(path.clone());
        }
        entries.insert(path, entry);
    }
    Tree { root, entries }
}
