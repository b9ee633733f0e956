//! Parser of `/proc/<pid>/mountinfo` (proc_pid_mountinfo(5)).

use std::{
    ffi::OsString,
    fs, io,
    os::unix::ffi::OsStringExt,
    path::{Path, PathBuf},
};

/// Mount table of the calling process.
const SELF: &str = "/proc/self/mountinfo";

/// A mount of a mount namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    /// Device of the file system, as `major:minor`.
    pub device: String,
    /// Directory of the file system that is mounted, as in a bind mount.
    pub root: PathBuf,
    /// Mount point, relative to the root of the process.
    pub point: PathBuf,
    /// File system type.
    pub kind: String,
    /// Options of the file system, separated by commas.
    pub options: String,
}

impl Mount {
    fn parse(line: &[u8]) -> Option<Self> {
        let mut fields = line.split(|byte| *byte == b' ').skip(2);
        let text = |field| String::from_utf8_lossy(field).into_owned();
        let device = text(fields.next()?);
        let root = unescape(fields.next()?);
        let point = unescape(fields.next()?);
        let mut rest = fields.skip_while(|field| *field != b"-").skip(1);
        let kind = text(rest.next()?);
        let options = text(rest.nth(1)?);
        Some(Self { device, root, point, kind, options })
    }
}

/// Returns the path of the calling process's mount table, for error messages.
pub fn path() -> &'static Path {
    Path::new(SELF)
}

/// Reads the mounts of the calling process, in the order in which they are stacked.
pub fn read() -> io::Result<Vec<Mount>> {
    Ok(parse(&fs::read(SELF)?))
}

/// Parses a mount table. Skips malformed lines.
pub fn parse(mountinfo: &[u8]) -> Vec<Mount> {
    mountinfo.split(|byte| *byte == b'\n').filter_map(Mount::parse).collect()
}

/// Decodes a path. The kernel writes space, tab, newline, backslash and, in newer kernels, `#` as a
/// backslash and three octal digits, and all other bytes unchanged.
fn unescape(field: &[u8]) -> PathBuf {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((first, after)) = rest.split_first() {
        let escaped = (*first == b'\\').then(|| after.split_at_checked(3)).flatten();
        let decoded = escaped.and_then(|(digits, after)| Some((octal(digits)?, after)));
        let (byte, next) = decoded.unwrap_or((*first, after));
        bytes.push(byte);
        rest = next;
    }
    OsString::from_vec(bytes).into()
}

/// Parses three octal digits. `u8::from_str_radix` would accept a sign too.
fn octal(digits: &[u8]) -> Option<u8> {
    digits.iter().try_fold(0_u8, |value, digit| {
        let digit = char::from(*digit).to_digit(8)?;
        value.checked_mul(8)?.checked_add(u8::try_from(digit).ok()?)
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStrExt;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn line_is_parsed_into_its_fields() {
        let line = concat!(
            r"36 35 98:0 /mnt1 /mnt\0402\134x rw,noatime master:1 shared:2 - ",
            "ext3 /dev/root rw,errors=continue",
        );
        let mount = Mount {
            device: "98:0".into(),
            root: "/mnt1".into(),
            point: r"/mnt 2\x".into(),
            kind: "ext3".into(),
            options: "rw,errors=continue".into(),
        };
        assert_eq!(parse(line.as_bytes()), [mount]);
    }

    #[test]
    fn malformed_line_hides_no_other_line() {
        let table = b"\n36 35 98:0\n22 1 254:0 / / rw - ext4 /dev/vda rw\n22 1 254:0 / /a\n";
        assert_eq!(parse(table).len(), 1);
    }

    #[test]
    fn escape_is_a_backslash_with_three_octal_digits() {
        for (field, path) in [
            (&b"/run/netns/a\\040b"[..], &b"/run/netns/a b"[..]),
            (b"/a\\134\xff\\04", b"/a\\\xff\\04"),
            (b"a\\+40b", b"a\\+40b"),
            (b"a\\089", b"a\\089"),
            (b"a\\777", b"a\\777"),
        ] {
            assert_eq!(unescape(field).as_os_str().as_bytes(), path);
        }
    }

    #[test]
    fn own_mounts_have_a_root() {
        assert!(read().unwrap().iter().any(|mount| mount.point == Path::new("/")));
    }

    proptest! {
        #[test]
        fn arbitrary_table_is_parsed_without_panic(
            table in prop::collection::vec(any::<u8>(), 0..200)
        ) {
            let _ = parse(&table);
            let _ = unescape(&table);
        }

        #[test]
        fn arbitrary_text_is_parsed_without_panic(table in "[0-9 :/\\\\a\n-]{0,80}") {
            let _ = parse(table.as_bytes());
        }
    }
}
