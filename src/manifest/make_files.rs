//! Directories, files and links of a plan, made on the node.

use std::{
    fs, io,
    os::unix::fs::{PermissionsExt, symlink},
    path::Path,
};

use super::Entry;

impl Entry {
    /// Makes the entry. Existing directories stay, files are written anew.
    pub fn make(&self) -> io::Result<()> {
        match self {
            Self::Directory { path, mode } => {
                fs::create_dir_all(path)?;
                set_mode(path, *mode)
            }
            Self::File { path, mode, content } => {
                fs::write(path, &content.0)?;
                set_mode(path, *mode)
            }
            Self::Link { path, target } => {
                let beside = path.with_added_extension("beside");
                match fs::remove_file(&beside) {
                    Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                    _ => {}
                }
                symlink(target, &beside)?;
                fs::rename(beside, path)
            }
        }
    }

    /// Returns the path of the entry.
    pub fn path(&self) -> &Path {
        match self {
            Self::Directory { path, .. } | Self::File { path, .. } | Self::Link { path, .. } => {
                path
            }
        }
    }
}

fn set_mode(path: &Path, mode: u32) -> io::Result<()> {
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
}
