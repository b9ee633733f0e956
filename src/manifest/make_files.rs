//! Directories, files and links of a plan, made on the node.

use std::{
    fs, io,
    os::unix::fs::{PermissionsExt, lchown, symlink},
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
            Self::Group { path, gid, writable } => set_group(path, *gid, *writable),
        }
    }

    /// Returns the path of the entry.
    pub fn path(&self) -> &Path {
        match self {
            Self::Directory { path, .. }
            | Self::File { path, .. }
            | Self::Link { path, .. }
            | Self::Group { path, .. } => path,
        }
    }
}

/// Gives a tree to a group, which enters its directories, and to which new files in them belong.
fn set_group(path: &Path, gid: u32, writable: bool) -> io::Result<()> {
    lchown(path, None, Some(gid))?;
    let metadata = fs::symlink_metadata(path)?;
    if metadata.is_symlink() {
        return Ok(());
    }
    let rights = if writable { 0o660 } else { 0o440 };
    let of_dir = if metadata.is_dir() { 0o2110 } else { 0 };
    set_mode(path, metadata.permissions().mode() & 0o7777 | rights | of_dir)?;
    if metadata.is_dir() {
        for entry in fs::read_dir(path)? {
            set_group(&entry?.path(), gid, writable)?;
        }
    }
    Ok(())
}

fn set_mode(path: &Path, mode: u32) -> io::Result<()> {
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn group_of_a_volume_enters_its_directories_and_reads_its_files() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("volume");
        fs::create_dir_all(root.join("sub")).unwrap();
        fs::write(root.join("sub/file"), "x").unwrap();
        symlink("sub/file", root.join("link")).unwrap();
        set_mode(&root, 0o700).unwrap();
        set_mode(&root.join("sub/file"), 0o600).unwrap();
        // Another group is root's alone to give.
        let gid = fs::metadata(&root).unwrap().gid();
        let gid = if rustix::process::geteuid().is_root() { 2000 } else { gid };
        for (writable, dir_mode, file_mode) in [(false, 0o2750, 0o640), (true, 0o2770, 0o660)] {
            Entry::Group { path: root.clone(), gid, writable }.make().unwrap();
            let found = |path: &str| {
                let metadata = fs::symlink_metadata(root.join(path)).unwrap();
                (metadata.gid(), metadata.mode() & 0o7777)
            };
            assert_eq!((found(""), found("sub/file")), ((gid, dir_mode), (gid, file_mode)));
            assert_eq!(found("link").0, gid);
        }
    }
}
