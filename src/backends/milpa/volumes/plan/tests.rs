//! Plans, applied to a tree in memory as the agent applies them to a disk.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::{super::fuzzing::disk::Disk, *};

const COPY_PATH: &str = "volumes/kubernetes.io~secret/s";

fn attributes() -> impl Strategy<Value = Attributes> {
    (prop_oneof![Just(0o644), Just(0o400), Just(0o755)], 0_u32..2, 0_u32..2)
        .prop_map(|(mode, uid, gid)| Attributes { mode, uid, gid })
}

/// Generates any tree; some files have several parts.
fn tree() -> impl Strategy<Value = Tree> {
    let entry = prop_oneof![
        attributes().prop_map(Entry::Dir),
        (
            attributes(),
            prop_oneof![9 => 0_usize..10, 1 => MAX_PART_BYTES - 1..3 * MAX_PART_BYTES + 1]
        )
            .prop_map(|(a, length)| Entry::File(a, vec![b'x'; length].into())),
        "[a-c./]{1,6}".prop_map(Entry::Link),
    ];
    (attributes(), proptest::collection::btree_map("[a-c-](/[a-c-]){0,2}", entry, 0..12)).prop_map(
        |(root, entries)| {
            let mut tree = Tree { root, entries };
            let paths: Vec<String> = tree.entries.keys().cloned().collect();
            for path in paths {
                for above in ancestors(&path) {
                    tree.entries.insert(above.to_owned(), Entry::Dir(root));
                }
            }
            tree
        },
    )
}

/// Generates a tree as the kubelet's atomic writer leaves it.
fn atomic() -> impl Strategy<Value = Tree> {
    (attributes(), 0_u32..4, proptest::collection::btree_map("[a-c](/[a-c])?", "[xyz]{0,3}", 0..5))
        .prop_map(|(root, version, files)| {
            let mut entries = BTreeMap::new();
            let directory = format!("..2026_{version}");
            entries.insert(DATA_LINK.to_owned(), Entry::Link(directory.clone()));
            for (path, content) in files {
                let top = path.split('/').next().unwrap();
                entries.insert(top.to_owned(), Entry::Link(format!("{DATA_LINK}/{top}")));
                // A path that is also the directory of another is a directory only.
                entries
                    .entry(format!("{directory}/{path}"))
                    .or_insert(Entry::File(root, content.into()));
            }
            entries.insert(directory, Entry::Dir(root));
            let paths: Vec<String> = entries.keys().cloned().collect();
            for path in paths {
                for above in ancestors(&path) {
                    entries.insert(above.to_owned(), Entry::Dir(root));
                }
            }
            Tree { root, entries }
        })
}

fn place() -> CellPath {
    CellPath::new(Root::Memory, COPY_PATH)
}

proptest! {
    #[test]
    fn plan_turns_old_tree_into_new_tree(old in tree(), new in tree()) {
        let mut disk = Disk::of(&old);
        for change in plan(&CopyState::of(&old), &new, &place()) {
            disk.apply(COPY_PATH, &change);
        }
        prop_assert!(disk.is(&new), "{:?}", disk);
        prop_assert_eq!(plan(&CopyState::of(&new), &new, &place()), vec![]);
    }

    #[test]
    fn interrupted_plan_is_repaired_by_the_next(
        old in tree(), new in tree(), newest in tree(), cut in 0_usize..40
    ) {
        let mut disk = Disk::of(&old);
        let before = CopyState::of(&old);
        for change in plan(&before, &new, &place()).iter().take(cut) {
            disk.apply(COPY_PATH, change);
        }
        disk.interrupt();
        let known = CopyState::from_listing(&before.between(&new).listing());
        for change in plan(&known, &newest, &place()) {
            disk.apply(COPY_PATH, &change);
        }
        prop_assert!(disk.is(&newest), "{:?}", disk);
    }

    #[test]
    fn data_link_resolves_after_every_change(old in atomic(), new in atomic()) {
        let mut disk = Disk::of(&old);
        for change in plan(&CopyState::of(&old), &new, &place()) {
            disk.apply(COPY_PATH, &change);
            prop_assert!(disk.resolves(), "{:?} after {:?}", disk.entries, change);
        }
        prop_assert_eq!(&disk.entries, &new.entries);
    }

    #[test]
    fn data_link_changes_after_all_content_exists(old in atomic(), new in atomic()) {
        let mut disk = Disk::of(&old);
        for change in plan(&CopyState::of(&old), &new, &place()) {
            disk.apply(COPY_PATH, &change);
            if change.path.ends_with(DATA_LINK) {
                let Some(Entry::Link(target)) = disk.entries.get(DATA_LINK).cloned() else {
                    panic!("no link")
                };
                let below = format!("{target}/");
                let content = new.entries.iter().filter(|(path, _)| path.starts_with(&below));
                for (path, entry) in content {
                    prop_assert_eq!(disk.entries.get(path), Some(entry));
                }
            }
        }
    }
}

#[test]
fn changes_follow_the_order_of_the_atomic_writer() {
    let a = Attributes { mode: 0o644, uid: 0, gid: 0 };
    let version = |name: &str, keys: &[&str]| {
        let mut entries: BTreeMap<String, Entry> = [
            (DATA_LINK.to_owned(), Entry::Link(name.to_owned())),
            (name.to_owned(), Entry::Dir(a)),
        ]
        .into();
        for key in keys {
            entries.insert((*key).to_owned(), Entry::Link(format!("{DATA_LINK}/{key}")));
            entries.insert(format!("{name}/{key}"), Entry::File(a, Bytes::from_static(b"v")));
        }
        Tree { root: a, entries }
    };
    let (old, new) = (version("..1", &["both", "old"]), version("..2", &["both", "new"]));
    let short = |change: &FileChange| {
        let verb = match change.change.as_ref().unwrap() {
            Change::MakeDir(_) => "dir",
            Change::WriteFile(_) => "file",
            Change::Symlink(_) => "link",
            Change::Remove(_) => "remove",
            _ => "other",
        };
        format!("{verb} {}", &change.path[COPY_PATH.len() + 1..])
    };
    let plan: Vec<String> = plan(&CopyState::of(&old), &new, &place()).iter().map(short).collect();
    assert_eq!(
        plan,
        [
            "dir ..2",
            "file ..2/both",
            "file ..2/new",
            "link ..data",
            "link new",
            "remove old",
            "remove ..1"
        ]
    );
}
