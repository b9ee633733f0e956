//! Files with another content in the cell, because the kubelet has filled in a figure of the node.
//! Pure.

use kiyot_proto::store::ReplacedFile;

use super::{
    plan::DATA_LINK,
    reader::FileOrTree,
    tree::{Entry, Tree},
};

/// Suffix of the path of a removed file in a mount table.
const DELETED: &str = "//deleted";

/// Replaces the contents of files of a volume that the kubelet publishes by `..data`.
pub(super) fn replace_in_volume(tree: &mut Tree, volume: &str, files: &[ReplacedFile]) {
    let Some(Entry::Link(data)) = tree.entries.get(DATA_LINK).cloned() else { return };
    for file in files.iter().filter(|file| file.volume == volume) {
        replace(tree, &format!("{data}/{}", file.path), file);
    }
}

/// Replaces the contents in a part of a volume that the kubelet publishes by `..data`. `path` is
/// the part's path below the volume: a file or directory of a version, which may be deleted.
pub(super) fn replace_in_part(
    part: &mut FileOrTree,
    volume: &str,
    path: &str,
    files: &[ReplacedFile],
) {
    let path = path.strip_suffix(DELETED).unwrap_or(path);
    let Some((_version, path)) = path.split_once('/') else { return };
    for file in files.iter().filter(|file| file.volume == volume) {
        let below = file.path.strip_prefix(path);
        match part {
            FileOrTree::File(_, content) if below == Some("") => {
                *content = file.content.clone().into();
            }
            FileOrTree::File(..) => {}
            FileOrTree::Tree(tree) => {
                if let Some(below) = below.and_then(|below| below.strip_prefix('/')) {
                    replace(tree, below, file);
                }
            }
        }
    }
}

fn replace(tree: &mut Tree, path: &str, file: &ReplacedFile) {
    if let Some(Entry::File(_, content)) = tree.entries.get_mut(path) {
        *content = file.content.clone().into();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backends::milpa::volumes::tree::Attributes;

    const ATTRIBUTES: Attributes = Attributes { mode: 0o644, uid: 0, gid: 7 };

    fn file(content: &str) -> Entry {
        Entry::File(ATTRIBUTES, content.to_owned().into())
    }

    fn tree(entries: &[(&str, Entry)]) -> Tree {
        let owned = |(path, entry): &(&str, Entry)| ((*path).to_owned(), entry.clone());
        Tree { root: ATTRIBUTES, entries: entries.iter().map(owned).collect() }
    }

    fn replaced() -> Vec<ReplacedFile> {
        let of = |(volume, path): (&str, &str)| ReplacedFile {
            volume: volume.to_owned(),
            path: path.to_owned(),
            content: "2".to_owned(),
        };
        [("v", "cpus"), ("v", "a/b"), ("v", "absent"), ("other", "labels")].map(of).into()
    }

    /// Verifies K23.
    #[test]
    fn replacement_changes_only_files_of_the_volume() {
        let volume = |cpus: &str, below: &str| {
            tree(&[
                ("..data", Entry::Link("..v1".to_owned())),
                ("..v1", Entry::Dir(ATTRIBUTES)),
                ("..v1/a", Entry::Dir(ATTRIBUTES)),
                ("..v1/a/b", file(below)),
                ("..v1/cpus", file(cpus)),
                ("..v1/labels", file("1000")),
                ("cpus", Entry::Link("..data/cpus".to_owned())),
            ])
        };
        let mut own = volume("1000", "1000");
        replace_in_volume(&mut own, "v", &replaced());
        assert_eq!(own, volume("2", "2"));
    }

    /// Verifies K23.
    #[test]
    fn files_in_a_part_of_the_volume_are_replaced() {
        let part = |path: &str, mut part: FileOrTree| {
            replace_in_part(&mut part, "v", path, &replaced());
            part
        };
        let content = |path: &str| match part(path, FileOrTree::File(ATTRIBUTES, "1000".into())) {
            FileOrTree::File(ATTRIBUTES, content) => content,
            other => panic!("{other:?}"),
        };
        for (path, expected) in [
            ("..v1/cpus", "2"),
            ("..v1/cpus//deleted", "2"),
            ("..v1/a/b", "2"),
            ("..v1/labels", "1000"),
            ("..v1/cpu", "1000"),
            ("..v1", "1000"),
        ] {
            assert_eq!(content(path), expected, "{path}");
        }
        let directory = |b: &str| FileOrTree::Tree(tree(&[("b", file(b)), ("c", file("1000"))]));
        assert_eq!(part("..v1/a", directory("1000")), directory("2"));
    }
}
