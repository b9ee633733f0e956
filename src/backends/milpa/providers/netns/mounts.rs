//! What is mounted, and unmounting it.

use std::{
    ffi::OsString,
    fs, io,
    os::unix::ffi::OsStringExt,
    path::{Path, PathBuf},
};

use rustix::mount::{UnmountFlags, unmount};

/// One line of `/proc/self/mountinfo`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Mount {
    /// Which directory of the file system it shows.
    pub(super) root: PathBuf,
    /// Where.
    pub(super) point: PathBuf,
    /// The kind of file system.
    pub(super) kind: String,
    /// The file system's own options.
    pub(super) options: String,
}

/// Reads the lines, the lowest mount first. A line that is none is left out.
pub(super) fn parse(mountinfo: &[u8]) -> Vec<Mount> {
    mountinfo.split(|byte| *byte == b'\n').filter_map(parse_line).collect()
}

fn parse_line(line: &[u8]) -> Option<Mount> {
    let mut fields = line.split(|byte| *byte == b' ');
    let root = path(fields.nth(3)?);
    let point = path(fields.next()?);
    let mut rest = fields.skip_while(|field| *field != b"-").skip(1);
    let kind = String::from_utf8_lossy(rest.next()?).into_owned();
    let options = String::from_utf8_lossy(rest.nth(1)?).into_owned();
    Some(Mount { root, point, kind, options })
}

/// Blanks, line ends and backslashes are written as three octal digits.
fn path(field: &[u8]) -> PathBuf {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((first, after)) = rest.split_first() {
        let octal = (*first == b'\\')
            .then(|| after.get(..3))
            .flatten()
            .filter(|digits| digits.iter().all(u8::is_ascii_digit));
        let value =
            octal.and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok());
        if let (Some(value), Some(after)) = (value, after.get(3..)) {
            bytes.push(value);
            rest = after;
        } else {
            bytes.push(*first);
            rest = after;
        }
    }
    OsString::from_vec(bytes).into()
}

/// Unmounts all that is mounted beneath a directory or on it, the last first.
pub(super) fn unmount_beneath(dir: &Path) -> io::Result<()> {
    let mounts = parse(&fs::read("/proc/self/mountinfo")?);
    for mount in mounts.iter().rev().filter(|mount| mount.point.starts_with(dir)) {
        match unmount(&mount.point, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
            // Taken away with one above it.
            Ok(()) | Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOENT) => {}
            Err(error) => {
                return Err(io::Error::other(format!("{}: {error}", mount.point.display())));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_line() {
        let line = br"36 35 98:0 /mnt1 /mnt\0402\134x rw,noatime master:1 shared:2 - ext3 /dev/root rw,errors=continue";
        let mount = parse_line(line).unwrap();
        assert_eq!(
            mount,
            Mount {
                root: "/mnt1".into(),
                point: r"/mnt 2\x".into(),
                kind: "ext3".into(),
                options: "rw,errors=continue".into()
            }
        );
        assert_eq!(parse(b"\n36 35 98:0\n"), []);
    }

    proptest! {
        #[test]
        fn no_line_is_too_strange(line in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse(&line);
        }
    }

    #[test]
    fn nothing_beneath_is_fine() {
        unmount_beneath(Path::new("/no/such/dir")).unwrap();
    }
}
