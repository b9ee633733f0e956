//! Part of a volume that a subPath selects, from the kubelet's bind mount. Pure.

use std::path::{Path, PathBuf};

use kiyot_linux::mountinfo;

/// Returns the path, in the volume at `volume`, of the bind mount at `sub_path`; `None` if
/// `sub_path` is not a mount, or is a mount of another volume.
pub(super) fn resolve(table: &[u8], volume: &Path, sub_path: &Path) -> Option<PathBuf> {
    let mounts = mountinfo::parse(table);
    let bound = mounts.iter().rev().find(|mount| mount.point == sub_path)?;
    // The last mount at the longest path is the visible one.
    let holder = mounts
        .iter()
        .filter(|mount| volume.starts_with(&mount.point))
        .max_by_key(|mount| mount.point.components().count())?;
    if holder.device != bound.device {
        return None;
    }
    let in_file_system = holder.root.join(volume.strip_prefix(&holder.point).ok()?);
    bound.root.strip_prefix(in_file_system).ok().map(Path::to_owned)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MOUNTS: &str = r"22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 8:2 /lib /var/lib rw - ext4 /dev/sda2 rw
40 30 0:50 / /var/lib/kubelet/pods/u/volumes/kubernetes.io~empty-dir/mem rw - tmpfs tmpfs rw
41 30 8:2 /lib/kubelet/pods/u/volumes/kubernetes.io~empty-dir/v/a\040b/c /var/lib/kubelet/pods/u/volume-subpaths/v/app/0 rw - ext4 /dev/sda2 rw
42 30 0:50 /x /var/lib/kubelet/pods/u/volume-subpaths/mem/app/1 rw - tmpfs tmpfs rw
43 30 8:2 /lib/kubelet/pods/u/volumes/kubernetes.io~empty-dir/v /var/lib/kubelet/pods/u/volume-subpaths/v/app/2 rw - ext4 /dev/sda2 rw
";

    fn resolved(volume: &str, sub_path: &str) -> Option<String> {
        let pod = Path::new("/var/lib/kubelet/pods/u");
        let found = resolve(
            MOUNTS.as_bytes(),
            &pod.join("volumes/kubernetes.io~empty-dir").join(volume),
            &pod.join("volume-subpaths").join(sub_path),
        );
        found.map(|path| path.to_str().unwrap().to_owned())
    }

    #[test]
    fn sub_path_resolves_by_its_bind_mount() {
        assert_eq!(resolved("v", "v/app/0").as_deref(), Some("a b/c"));
        assert_eq!(resolved("mem", "mem/app/1").as_deref(), Some("x"));
        assert_eq!(resolved("v", "v/app/2").as_deref(), Some(""));
        assert_eq!(resolved("v", "v/app/9"), None);
        assert_eq!(resolved("mem", "v/app/0"), None);
        assert_eq!(resolved("other", "v/app/0"), None);
    }

    #[test]
    fn non_utf8_mounts_do_not_hide_others() {
        let mounts =
            [b"23 22 8:3 / /strange/\xff rw - ext4 /dev/sda3 rw\n".as_slice(), MOUNTS.as_bytes()]
                .concat();
        let pod = Path::new("/var/lib/kubelet/pods/u");
        let found = resolve(
            &mounts,
            &pod.join("volumes/kubernetes.io~empty-dir/v"),
            &pod.join("volume-subpaths/v/app/0"),
        );
        assert_eq!(found.as_deref(), Some(Path::new("a b/c")));
    }

    proptest! {
        #[test]
        fn arbitrary_mount_tables_do_not_panic(text in "[0-9 :/\\\\a\n]{0,80}") {
            let _ = resolve(text.as_bytes(), Path::new("/a"), Path::new("/a/a"));
        }
    }
}
