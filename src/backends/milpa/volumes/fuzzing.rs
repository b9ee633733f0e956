//! What may be in volumes, and what a cell may say of its copies, as any bytes. For kiyot-fuzz
//! alone.

use std::{
    collections::BTreeMap,
    ffi::OsStr,
    os::unix::ffi::OsStrExt as _,
    path::{Component, Path},
};

use bytes::Bytes;
use kiyot_proto::cell::{FileChange, Root};

use super::{
    disk::Disk,
    plan::{DATA, Place, plan},
    subpath,
    tree::{Attributes, Entry, Shadow, Tree, is_plain},
};

/// Where copies are.
const PLACE: &str = "volumes/kubernetes.io~secret/s";
/// Entries of one tree, so that each input has its end soon.
const ENTRIES: usize = 24;

/// A change of a volume: two trees as bytes say, and the changes that lead from one to the other.
#[derive(Debug)]
pub struct Update {
    /// The changes that make a first copy, in the directory `volumes/kubernetes.io~secret` of the
    /// pod's.
    pub first: Vec<FileChange>,
    /// The changes that make it the second.
    pub second: Vec<FileChange>,
    /// What must be there in the end: path, mode, and a link's target or a file's content; neither,
    /// of a directory.
    pub expected: Vec<(String, u32, Option<String>, Option<Bytes>)>,
}

/// Plans from one tree to another, and to a third after the second was interrupted, on a disk that
/// refuses what an agent refuses. Every step leaves `..data` leading somewhere if it did before and
/// does in the end; in the end the copy is the volume. Whatever a cell says of its copy, no change
/// leads elsewhere.
///
/// # Panics
/// If not.
pub fn volumes(mut bytes: &[u8]) {
    let place = Place::new(Root::Memory, PLACE);
    let cut = usize::from(take(&mut bytes, 1).first().copied().unwrap_or_default());
    let (old, new, newest) = (tree(&mut bytes), tree(&mut bytes), tree(&mut bytes));

    let mut disk = Disk::of(&old);
    let resolves = Disk::of(&old).resolves()
        && Disk::of(&new).resolves()
        && is_atomic(&old)
        && is_atomic(&new);
    for change in plan(&Shadow::of(&old), &new, &place) {
        checked(&change, &place);
        disk.apply(PLACE, &change);
        assert!(!resolves || disk.resolves(), "{disk:?} after {change:?}");
    }
    assert!(disk.is(&new), "{disk:?} is not {new:?}");
    assert_eq!(plan(&Shadow::of(&new), &new, &place), []);

    let (mut disk, before) = (Disk::of(&old), Shadow::of(&old));
    for change in plan(&before, &new, &place).iter().take(cut) {
        disk.apply(PLACE, change);
    }
    disk.interrupt();
    let known = Shadow::from_listing(&before.between(&new).listing());
    for change in plan(&known, &newest, &place) {
        disk.apply(PLACE, &change);
    }
    assert!(disk.is(&newest), "{disk:?} is not {newest:?}");

    // What a cell says of its copy.
    for change in plan(&Shadow::from_listing(bytes), &newest, &place) {
        checked(&change, &place);
    }
    let told = Shadow::from_listing(bytes);
    assert_eq!(Shadow::from_listing(&told.listing()), told);
}

/// Two trees, and what leads from nothing to the one and from that to the other. `None` if no file
/// system could have such names.
pub fn update(mut bytes: &[u8]) -> Option<Update> {
    let place = Place::new(Root::Pod, PLACE);
    let (old, new) = (tree(&mut bytes), tree(&mut bytes));
    let long =
        |tree: &Tree| tree.entries.keys().any(|path| path.split('/').any(|name| name.len() > 255));
    if long(&old) || long(&new) {
        return None;
    }
    let first = plan(&Shadow::default(), &old, &place);
    let second = plan(&Shadow::of(&old), &new, &place);
    let expected = new.entries.into_iter().map(|(path, entry)| {
        let path = format!("{PLACE}/{path}");
        match entry {
            Entry::Dir(attributes) => (path, attributes.mode, None, None),
            Entry::File(attributes, content) => (path, attributes.mode, None, Some(content)),
            Entry::Link(target) => (path, 0, Some(target), None),
        }
    });
    Some(Update { first, second, expected: expected.collect() })
}

/// Asks where a subPath leads: of any text, and of the mount that the kernel would show for a bind
/// of `volume/below`, whatever its names are.
///
/// # Panics
/// If it leads out of the volume, or elsewhere than it was bound.
pub fn subpaths(bytes: &[u8]) {
    let (volume, sub_path) =
        (Path::new("/pods/u/volumes/p/v"), Path::new("/pods/u/volume-subpaths/v/app/0"));
    if let Some(below) = subpath::resolve(bytes, volume, sub_path) {
        assert!(below.is_relative(), "{}", below.display());
    }
    let below =
        Path::new(OsStr::from_bytes(bytes.split(|byte| *byte == 0).next().unwrap_or_default()));
    let plain = below.components().all(|part| matches!(part, Component::Normal(_)));
    if plain {
        let mut text = b"22 1 8:1 / / rw - ext4 /dev/sda1 rw\n23 22 8:2 /\xff /strange\xff rw - ext4 /dev/sda2 rw\n40 22 8:1 ".to_vec();
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

/// A change leads into the copy, by a path that an agent takes.
fn checked(change: &FileChange, place: &Place) {
    let below = change
        .path
        .strip_prefix(&place.path)
        .and_then(|rest| if rest.is_empty() { Some(rest) } else { rest.strip_prefix('/') });
    assert!(
        change.root() == place.root
            && below.is_some_and(|below| below.is_empty() || is_plain(below)),
        "{change:?}"
    );
}

/// Whether a tree is as the kubelet's writer leaves it: the directory behind `..data` and its links
/// are all there is.
fn is_atomic(tree: &Tree) -> bool {
    let Some(Entry::Link(data)) = tree.entries.get(DATA) else { return false };
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

/// A tree: a byte with a mode, and entries. An entry is a byte with its kind and mode, one with its
/// directory among those before, its name up to a byte 0, and its content or its target, with its
/// length before it. The byte 0xff ends it.
fn tree(bytes: &mut &[u8]) -> Tree {
    const MODES: [u32; 4] = [0o755, 0o644, 0o400, 0o1777];
    // Whoever this is may give nobody else a file.
    let (uid, gid) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
    let attributes = |byte: u8| Attributes { mode: MODES[usize::from(byte >> 6)], uid, gid };
    // A directory that one may write into.
    let of_dir = |byte: u8| Attributes { mode: attributes(byte).mode | 0o700, uid, gid };
    let root = of_dir(take(bytes, 1).first().copied().unwrap_or_default());
    let mut entries = BTreeMap::new();
    let mut dirs = vec![String::new()];
    for _ in 0..ENTRIES {
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
        if name.contains('/') || !is_plain(&name) || entries.contains_key(&path) {
            continue;
        }
        let entry = match kind & 7 {
            // One of several parts.
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
