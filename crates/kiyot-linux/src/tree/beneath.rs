//! Paths beneath a directory. Only this module joins a key, name or path from outside to a
//! directory: `tests/structure` finds other joins.

use std::{
    ffi::OsStr,
    fmt, io,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};

/// Longest path from outside, in bytes.
pub const MAX_PATH_BYTES: usize = 2048;
/// Longest name, in bytes (`NAME_MAX`).
const MAX_NAME_BYTES: usize = 255;
/// Most names of a path from outside. A volume may nest 64 directories.
pub const MAX_PATH_NAMES: usize = 128;
/// Most characters that an error shows of a refused path.
const MAX_SHOWN_CHARS: usize = 128;

/// An error of a path from outside: the path may lead out of its directory, or is out of bounds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PathError {
    /// The beginning of the path.
    path: String,
    allowed: &'static str,
}

impl PathError {
    fn new(path: &OsStr, allowed: &'static str) -> Self {
        let bytes = path.as_bytes();
        let shown = String::from_utf8_lossy(&bytes[..bytes.len().min(MAX_SHOWN_CHARS * 4)]);
        Self { path: shown.chars().take(MAX_SHOWN_CHARS).collect(), allowed }
    }
}

impl fmt::Display for PathError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { path, allowed } = self;
        write!(
            f,
            "path {path:?}: invalid; allowed: {allowed} without \".\", \"..\", NUL or empty names, \
             of at most {MAX_PATH_NAMES} names of {MAX_NAME_BYTES} bytes, {MAX_PATH_BYTES} bytes \
             in all"
        )
    }
}

impl std::error::Error for PathError {}

impl From<PathError> for io::Error {
    fn from(error: PathError) -> Self {
        Self::new(io::ErrorKind::InvalidInput, error)
    }
}

/// Joins a key, name or path from outside to a directory. Does not access the file system: a
/// symbolic link in the directory can still lead out of it.
pub fn beneath(dir: &Path, path: impl AsRef<OsStr>) -> Result<PathBuf, PathError> {
    check(path.as_ref()).map(|()| dir.join(path.as_ref()))
}

/// Validates an absolute path from outside.
pub fn absolute(path: &str) -> Result<PathBuf, PathError> {
    path.strip_prefix('/')
        .and_then(|names| beneath(Path::new("/"), names.trim_end_matches('/')).ok())
        .ok_or_else(|| PathError::new(path.as_ref(), "an absolute path"))
}

/// Joins a name of the program's own to a directory. Names from outside aren't `'static`.
#[must_use]
pub fn own(dir: &Path, name: &'static str) -> PathBuf {
    dir.join(name)
}

/// Refuses a path that may lead out of a directory, or is out of bounds.
fn check(path: &OsStr) -> Result<(), PathError> {
    let is_plain = |name: &[u8]| {
        !matches!(name, b"" | b"." | b"..") && name.len() <= MAX_NAME_BYTES && !name.contains(&0)
    };
    let bytes = path.as_bytes();
    let mut names = bytes.split(|byte| *byte == b'/');
    if bytes.len() <= MAX_PATH_BYTES
        && names.clone().count() <= MAX_PATH_NAMES
        && names.all(is_plain)
    {
        return Ok(());
    }
    Err(PathError::new(path, "a relative path"))
}

/// A relative path that leads out of its directory only by symbolic links.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RelPath(String);

impl RelPath {
    /// Validates a path.
    pub fn parse(path: &str) -> Result<Self, PathError> {
        check(path.as_ref()).map(|()| Self(path.to_owned()))
    }

    /// Returns the last component.
    #[must_use]
    pub fn name(&self) -> &str {
        self.0.rsplit('/').next().unwrap_or(&self.0)
    }

    /// Returns the path without its last component; empty if it has a single component.
    #[must_use]
    pub fn parent(&self) -> &str {
        self.0.rsplit_once('/').map_or("", |(parent, _)| parent)
    }

    /// Returns the path as a string.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the path beneath a directory.
    #[must_use]
    pub fn beneath(&self, dir: &Path) -> PathBuf {
        dir.join(&self.0)
    }
}

impl fmt::Display for RelPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Verifies X61.
    #[test]
    fn path_that_leads_out_or_is_out_of_bounds_is_refused() {
        let (deep, long) = (["a"; MAX_PATH_NAMES + 1].join("/"), "a".repeat(MAX_NAME_BYTES + 1));
        let large = [&*"a".repeat(MAX_NAME_BYTES); 9].join("/");
        let leading_out = ["..", "../x", "a/../../x", "a/..", "/etc", "/", "//a"];
        let unusual = ["", ".", "./a", "a//b", "a/", "a\0b", &deep, &long, &large];
        for path in ["", "a", "/..", "/a/../b", "/a//b", "/"] {
            absolute(path).unwrap_err();
        }
        for path in leading_out.into_iter().chain(unusual) {
            let error = beneath(Path::new("/d"), path).unwrap_err();
            assert_eq!(RelPath::parse(path), Err(error.clone()), "{path:?}");
            assert!(error.to_string().len() < 512, "{error}");
        }
    }

    /// Verifies X61.
    #[test]
    fn plain_path_is_joined() {
        for path in ["a", "a/b", "..a", "a..", "...", "a b\n", &["a"; MAX_PATH_NAMES - 1].join("/")]
        {
            let joined = PathBuf::from(format!("/d/{path}"));
            assert_eq!(beneath(Path::new("/d"), path), Ok(joined.clone()));
            assert_eq!(RelPath::parse(path).unwrap().beneath(Path::new("/d")), joined);
            assert_eq!(absolute(&format!("/d/{path}/")), Ok(joined));
        }
        let names = [&*"a".repeat(MAX_NAME_BYTES); 7].join("/");
        let largest = format!("{names}/{}/a", "a".repeat(MAX_NAME_BYTES - 1));
        assert_eq!(largest.len(), MAX_PATH_BYTES);
        RelPath::parse(&largest).unwrap();
        RelPath::parse(&(largest + "a")).unwrap_err();
        let not_a_text = OsStr::from_bytes(b"\xff");
        assert_eq!(beneath(Path::new("/d"), not_a_text), Ok(Path::new("/d").join(not_a_text)));
        let path = RelPath::parse("a/b/c").unwrap();
        assert_eq!((path.parent(), path.name()), ("a/b", "c"));
        assert_eq!(own(Path::new("/d"), "a"), Path::new("/d/a"));
    }
}
