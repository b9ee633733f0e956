//! Makes a directory hold exactly a given set of files.

use std::{
    collections::BTreeMap,
    fs, io,
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
};

use kiyot_linux::tree::beneath;

/// Makes a directory of directories hold exactly these files. Replaces them one by one, because
/// cells read them meanwhile, in the order of their paths, so that `hosts.toml` follows the files
/// that it names (`0-ca.pem`). Only the owner can read the files.
pub(super) fn make(directory: &Path, files: &BTreeMap<PathBuf, Vec<u8>>) -> io::Result<()> {
    if !directory.exists() && files.is_empty() {
        return Ok(());
    }
    for (path, content) in files {
        let path = beneath(directory, path)?;
        if fs::read(&path).is_ok_and(|found| found == *content) {
            continue;
        }
        if let Some(parent) = path.parent() {
            fs::DirBuilder::new().recursive(true).mode(0o700).create(parent)?;
        }
        kiyot_link::private_file::write(&path, content)?;
    }
    for host in entries(directory)? {
        for file in entries(&host)? {
            let is_wanted = file.strip_prefix(directory).is_ok_and(|file| files.contains_key(file));
            if !is_wanted {
                fs::remove_file(&file)?;
            }
        }
        // Fails if it isn't empty.
        let _ = fs::remove_dir(&host);
    }
    Ok(())
}

/// Returns the sorted paths in a directory; empty if the directory is absent.
pub(super) fn entries(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut paths: Vec<PathBuf> =
        entries.map(|entry| Ok(entry?.path())).collect::<io::Result<_>>()?;
    paths.sort();
    Ok(paths)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn directory_has_exactly_the_given_files() {
        let dir = tempfile::tempdir().unwrap();
        let directory = dir.path().join("registries");
        make(&directory, &BTreeMap::new()).unwrap();
        assert!(!directory.exists());
        let files = |names: &[&str]| {
            names
                .iter()
                .map(|name| (PathBuf::from(name), name.as_bytes().to_vec()))
                .collect::<BTreeMap<_, _>>()
        };
        for names in [
            &["a/0-key.pem", "a/hosts.toml", "b/hosts.toml"] as &[_],
            &["b/hosts.toml", "c/hosts.toml"],
            &[],
        ] {
            make(&directory, &files(names)).unwrap();
            let mut found: Vec<_> = entries(&directory)
                .unwrap()
                .iter()
                .flat_map(|host| entries(host).unwrap())
                .collect();
            found.sort();
            assert_eq!(found, names.iter().map(|name| directory.join(name)).collect::<Vec<_>>());
            assert!(
                found
                    .iter()
                    .all(|path| fs::metadata(path).unwrap().permissions().mode() & 0o777 == 0o600)
            );
            assert_eq!(
                entries(&directory).unwrap().len(),
                names
                    .iter()
                    .map(|name| &name[..1])
                    .collect::<std::collections::BTreeSet<_>>()
                    .len()
            );
        }
    }
}
