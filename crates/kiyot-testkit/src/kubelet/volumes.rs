//! Volumes on the node, in the layout of the kubelet's plugins.

use std::{
    collections::BTreeMap,
    fs,
    io::{self, ErrorKind},
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
    sync::atomic::{AtomicU32, Ordering},
};

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

/// A volume of a pod.
#[derive(Debug, Clone)]
pub struct Volume {
    /// Volume name.
    pub name: String,
    /// Mode of its files.
    pub mode: u32,
    /// Source of its content.
    pub source: Source,
}

/// Source of a volume's files, by their path in the volume.
#[derive(Debug, Clone)]
pub enum Source {
    /// A ConfigMap, on disk.
    ConfigMap(BTreeMap<String, Vec<u8>>),
    /// A Secret, in memory.
    Secret(BTreeMap<String, Vec<u8>>),
    /// A projected volume such as a token, in memory.
    Projected(BTreeMap<String, Vec<u8>>),
    /// The downward API, on disk.
    DownwardApi(BTreeMap<String, Vec<u8>>),
    /// An empty directory.
    EmptyDir {
        /// Medium `Memory`.
        memory: bool,
    },
    /// A hostPath.
    HostPath(PathBuf),
}

impl Source {
    /// Returns files with these texts.
    pub fn files(texts: &[(&str, &str)]) -> BTreeMap<String, Vec<u8>> {
        texts.iter().map(|(name, text)| ((*name).to_owned(), text.as_bytes().to_vec())).collect()
    }

    fn plugin(&self) -> &'static str {
        match self {
            Self::ConfigMap(_) => "kubernetes.io~configmap",
            Self::Secret(_) => "kubernetes.io~secret",
            Self::Projected(_) => "kubernetes.io~projected",
            Self::DownwardApi(_) => "kubernetes.io~downward-api",
            Self::EmptyDir { .. } => "kubernetes.io~empty-dir",
            Self::HostPath(_) => "kubernetes.io~host-path",
        }
    }

    fn in_memory(&self) -> bool {
        matches!(self, Self::Secret(_) | Self::Projected(_) | Self::EmptyDir { memory: true })
    }
}

/// Returns the path of a volume on the node, beneath its pod's directory.
pub fn path(pod: &Path, volume: &Volume) -> PathBuf {
    match &volume.source {
        Source::HostPath(path) => path.clone(),
        source => pod.join("volumes").join(source.plugin()).join(&volume.name),
    }
}

/// Creates a volume.
pub(super) fn create(pod: &Path, volume: &Volume) {
    let directory = path(pod, volume);
    if matches!(volume.source, Source::HostPath(_)) {
        return;
    }
    fs::create_dir_all(&directory).expect("a volume's directory can be made");
    if volume.source.in_memory() {
        mount("tmpfs", &directory, "tmpfs", MountFlags::empty(), None)
            .expect("a tmpfs can be mounted");
    }
    fs::set_permissions(&directory, fs::Permissions::from_mode(0o777)).expect("a mode can be set");
    match &volume.source {
        Source::ConfigMap(files)
        | Source::Secret(files)
        | Source::Projected(files)
        | Source::DownwardApi(files) => {
            write_atomically(&directory, files, volume.mode).expect("a volume can be written");
        }
        Source::EmptyDir { .. } | Source::HostPath(_) => {}
    }
}

/// Unmounts a volume.
pub(super) fn remove(pod: &Path, volume: &Volume) {
    if volume.source.in_memory() {
        let _ = unmount(path(pod, volume), UnmountFlags::DETACH);
    }
}

/// Writes files as the kubelet's AtomicWriter does (pkg/volume/util/atomic_writer.go): writes a new
/// timestamped directory and moves `..data` to it by a rename. The visible names are links through
/// `..data`.
pub fn write_atomically(
    directory: &Path,
    files: &BTreeMap<String, Vec<u8>>,
    mode: u32,
) -> io::Result<()> {
    static WRITES: AtomicU32 = AtomicU32::new(1);
    let name = format!("..2026_01_02_03_04_05.{:09}", WRITES.fetch_add(1, Ordering::Relaxed));
    let data = directory.join(&name);
    fs::create_dir(&data)?;
    fs::set_permissions(&data, fs::Permissions::from_mode(0o755))?;
    for (file, contents) in files {
        let file = data.join(file);
        file.parent().map_or(Ok(()), fs::create_dir_all)?;
        fs::write(&file, contents)?;
        fs::set_permissions(&file, fs::Permissions::from_mode(mode))?;
    }
    let old = fs::read_link(directory.join("..data")).ok();
    symlink(&name, directory.join("..data_tmp"))?;
    fs::rename(directory.join("..data_tmp"), directory.join("..data"))?;
    let visible = |file: &String| file.split('/').next().map(str::to_owned);
    for first in files.keys().filter_map(visible) {
        match symlink(Path::new("..data").join(&first), directory.join(&first)) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            other => other?,
        }
    }
    for entry in fs::read_dir(directory)?.flatten() {
        let removed = |name: &str| {
            !name.starts_with("..") && !files.keys().filter_map(visible).any(|first| first == name)
        };
        if entry.file_name().to_str().is_some_and(removed) {
            fs::remove_file(entry.path())?;
        }
    }
    old.map_or(Ok(()), |old| fs::remove_dir_all(directory.join(old)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn volume_update_replaces_the_data_link_and_removed_files() {
        let directory = tempfile::tempdir().unwrap();
        write_atomically(
            directory.path(),
            &Source::files(&[("kept", "one"), ("gone", "x"), ("sub/deep", "y")]),
            0o640,
        )
        .unwrap();
        assert_eq!(fs::read_to_string(directory.path().join("sub/deep")).unwrap(), "y");
        let before = fs::read_link(directory.path().join("..data")).unwrap();

        write_atomically(directory.path(), &Source::files(&[("kept", "two")]), 0o400).unwrap();
        assert_eq!(fs::read_to_string(directory.path().join("kept")).unwrap(), "two");
        assert_eq!(
            fs::metadata(directory.path().join("kept")).unwrap().permissions().mode() & 0o777,
            0o400
        );
        assert!(!directory.path().join(before).exists());
        assert!(directory.path().join("gone").symlink_metadata().is_err());
    }
}
