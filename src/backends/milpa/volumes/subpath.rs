//! Which part of which volume a subPath is: the kubelet's bind mount says it. Pure.

use std::path::{Path, PathBuf};

/// One line of `/proc/self/mountinfo`. Names in it are any bytes.
#[derive(Debug, PartialEq, Eq)]
struct Mount<'a> {
    /// Major and minor number.
    device: &'a [u8],
    /// What of the file system is mounted.
    root: PathBuf,
    /// Where.
    point: PathBuf,
}

/// Where in the volume at `volume` the bind mount at `sub_path` leads; `None` if it is no mount, or
/// of another volume.
pub(super) fn resolve(mountinfo: &[u8], volume: &Path, sub_path: &Path) -> Option<PathBuf> {
    let mounts: Vec<Mount<'_>> = mountinfo.split(|byte| *byte == b'\n').filter_map(mount).collect();
    let bound = mounts.iter().rev().find(|mount| mount.point == sub_path)?;
    // The last one mounted at the longest path is the one that is seen.
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

/// A line: id, parent, device, root, mount point, and what is of no interest.
fn mount(line: &[u8]) -> Option<Mount<'_>> {
    let mut words = line.split(|byte| *byte == b' ').skip(2);
    Some(Mount {
        device: words.next()?,
        root: unescaped(words.next()?),
        point: unescaped(words.next()?),
    })
}

/// The kernel writes space, tab, newline and backslash as three octal digits.
fn unescaped(word: &[u8]) -> PathBuf {
    let mut out = Vec::with_capacity(word.len());
    let mut rest = word;
    while let Some((&byte, after)) = rest.split_first() {
        let code =
            after.get(..3).filter(|digits| byte == b'\\' && digits.iter().all(u8::is_ascii_digit));
        let code = code.and_then(|digits| std::str::from_utf8(digits).ok());
        match code.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(code) => {
                out.push(code);
                rest = &after[3..];
            }
            None => {
                out.push(byte);
                rest = after;
            }
        }
    }
    use std::os::unix::ffi::OsStringExt as _;
    std::ffi::OsString::from_vec(out).into()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MOUNTS: &str = "\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 8:2 /lib /var/lib rw - ext4 /dev/sda2 rw
40 30 0:50 / /var/lib/kubelet/pods/u/volumes/kubernetes.io~empty-dir/mem rw - tmpfs tmpfs rw
41 30 8:2 /lib/kubelet/pods/u/volumes/kubernetes.io~empty-dir/v/a\\040b/c /var/lib/kubelet/pods/u/volume-subpaths/v/app/0 rw - ext4 /dev/sda2 rw
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
    fn mounts_say_where_a_sub_path_leads() {
        assert_eq!(resolved("v", "v/app/0").as_deref(), Some("a b/c"));
        assert_eq!(resolved("mem", "mem/app/1").as_deref(), Some("x"));
        assert_eq!(resolved("v", "v/app/2").as_deref(), Some(""));
        assert_eq!(resolved("v", "v/app/9"), None);
        assert_eq!(resolved("mem", "v/app/0"), None);
        assert_eq!(resolved("other", "v/app/0"), None);
    }

    #[test]
    fn names_that_are_no_text_hide_nothing() {
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

    #[test]
    fn only_digits_are_a_code() {
        assert_eq!(
            (unescaped(b"a\\040b"), unescaped(b"a\\+40b")),
            ("a b".into(), "a\\+40b".into())
        );
    }

    proptest! {
        #[test]
        fn any_text_is_taken(text in "[0-9 :/\\\\a\n]{0,80}") {
            let _ = resolve(text.as_bytes(), Path::new("/a"), Path::new("/a/a"));
            let _ = unescaped(text.as_bytes());
        }
    }
}
