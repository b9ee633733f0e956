//! Registry configuration of a machine of the cell's own, in containerd's `config_path`.

use std::{
    fs, io,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
};

use kiyot_link::{
    bind_limits::{MAX_REGISTRY_DIRS, MAX_REGISTRY_FILES},
    private_file,
};
use kiyot_linux::tree::RelPath;
use kiyot_proto::cell::RegistryFile;
use tonic::Status;

/// Parent of the directories, on a tmpfs: some files are keys.
const DIR: &str = "/run/kiyot/registries";
/// Number of path components below [`DIR`]: number of the directory, host, file.
const NAMES: usize = 3;

/// Returns containerd's `config_path`. An absent directory has no hosts.
pub fn config_path() -> PathBuf {
    let roots: Vec<String> =
        (0..MAX_REGISTRY_DIRS).map(|number| format!("{DIR}/{number}")).collect();
    roots.join(":").into()
}

/// Replaces the registry configuration.
pub fn replace(owns_machine: bool, files: &[RegistryFile]) -> Result<(), Status> {
    if files.is_empty() {
        return Ok(());
    }
    if !owns_machine {
        return Err(Status::failed_precondition(
            "registry configuration: can't be set, the cell uses that of its node",
        ));
    }
    write(Path::new(DIR), files)
}

fn write(dir: &Path, files: &[RegistryFile]) -> Result<(), Status> {
    if files.len() > MAX_REGISTRY_FILES {
        return Err(Status::invalid_argument(format!(
            "{} files of registries: too many; allowed: at most {MAX_REGISTRY_FILES}",
            files.len()
        )));
    }
    let parse = |file: &RegistryFile| {
        let path = RelPath::parse(&file.path).ok();
        path.filter(|path| path.as_str().split('/').count() == NAMES).ok_or_else(|| {
            Status::invalid_argument(format!(
                "file of a registry {:?}: invalid path; allowed: NUMBER/HOST/NAME",
                file.path
            ))
        })
    };
    let paths = files.iter().map(parse).collect::<Result<Vec<_>, _>>()?;
    let failed = |error: io::Error| {
        Status::internal(format!("cannot write the registry configuration: {error}"))
    };
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
        _ => {}
    }
    for (path, file) in paths.iter().zip(files) {
        let path = path.beneath(dir);
        if let Some(parent) = path.parent() {
            fs::DirBuilder::new().recursive(true).mode(0o700).create(parent).map_err(failed)?;
        }
        private_file::write(&path, &file.content).map_err(failed)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use tonic::Code;

    use super::*;

    fn file(path: &str) -> RegistryFile {
        RegistryFile { path: path.to_owned(), content: path.as_bytes().to_vec().into() }
    }

    #[test]
    fn configuration_is_replaced_as_a_whole() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().join("registries");
        write(&dir, &[file("0/a/hosts.toml"), file("1/b/hosts.toml")]).unwrap();
        write(&dir, &[file("0/c/hosts.toml")]).unwrap();
        assert!(!dir.join("0/a").exists() && !dir.join("1").exists());
        assert_eq!(fs::read(dir.join("0/c/hosts.toml")).unwrap(), b"0/c/hosts.toml");
    }

    /// Verifies V6.
    #[test]
    fn path_outside_of_the_directory_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        for path in ["", "hosts.toml", "0/../x", "/0/a/b", "0/a/b/c", "../a/b"] {
            let status = write(dir.path(), &[file(path)]).unwrap_err();
            assert_eq!(status.code(), Code::InvalidArgument, "{path}");
        }
        let many = vec![file("0/a/b"); MAX_REGISTRY_FILES + 1];
        assert_eq!(write(dir.path(), &many).unwrap_err().code(), Code::InvalidArgument);
    }

    #[test]
    fn configuration_of_the_node_is_not_replaced() {
        let status = replace(false, &[file("0/a/b")]).unwrap_err();
        assert_eq!(status.code(), Code::FailedPrecondition);
        assert!(replace(false, &[]).is_ok());
    }
}
