//! Modules of the kernel that the machine needs before its root is mounted.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

use kiyot_linux::tree::beneath;
use nix::{
    errno::Errno,
    kmod::{ModuleInitFlags, finit_module},
};

/// List of the modules in the initramfs, in load order; the files are beside it.
pub(super) const LIST: &str = "/modules/list";

/// A module can't be loaded.
#[derive(Debug, thiserror::Error)]
#[error("module {0:?} of the kernel")]
pub struct ModuleError(PathBuf, #[source] io::Error);

/// Loads all modules of a list, and removes their files, which take memory.
pub(super) fn load_all(list: &Path) -> Result<(), ModuleError> {
    let names = match fs::read_to_string(list) {
        Ok(names) => names,
        // The kernel has everything built in.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(ModuleError(list.to_owned(), error)),
    };
    let dir = list.parent().unwrap_or(list);
    for name in names.lines().filter(|name| !name.is_empty()) {
        let path =
            beneath(dir, name).map_err(|error| ModuleError(list.to_owned(), error.into()))?;
        load(&path).map_err(|error| ModuleError(path, error))?;
    }
    // Remaining files only take memory.
    let _ = fs::remove_dir_all(dir);
    Ok(())
}

fn load(path: &Path) -> io::Result<()> {
    match finit_module(File::open(path)?, c"", ModuleInitFlags::empty()) {
        // EEXIST: already loaded.
        Ok(()) | Err(Errno::EEXIST) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
