//! The kubelet's `staticPodPath`.

use std::{
    fs::File,
    hash::{BuildHasher, RandomState},
    io::{self, Read, Write},
    os::fd::OwnedFd,
    path::{Path, PathBuf},
};

use rustix::{
    fs::{AtFlags, CWD, Dir, Mode, OFlags, RenameFlags, fsync, openat, renameat_with, unlinkat},
    io::Errno,
};
use serde_json::Value;

use super::{PodName, StaticPod};
use crate::{error::Error, names::listed};

/// The kubelet's configuration.
const KUBELET_CONFIG: &str = "/var/lib/kubelet/config.yaml";
/// The key of the directory in the kubelet's configuration.
const KEY: &str = "staticPodPath";
/// Bounds the configuration in bytes.
const MAX_CONFIG_BYTES: u64 = 1024 * 1024;
/// Begin of the names of files that are not complete. A kubelet skips files that begin with a dot.
const TEMPORARY_PREFIX: &str = ".kiyot-";

/// An open directory of static pods.
#[derive(Debug)]
pub(crate) struct StaticPodDirectory {
    fd: OwnedFd,
    path: PathBuf,
}

impl StaticPodDirectory {
    /// Opens a directory, by default the directory of the kubelet's configuration.
    pub(crate) fn open(path: Option<PathBuf>) -> Result<Self, Error> {
        let path = path.map_or_else(|| configured(Path::new(KUBELET_CONFIG)), Ok)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = openat(CWD, &path, flags, Mode::empty()).map_err(|error| {
            Error::Usage(format!(
                "{}: {}; allowed: the directory of the kubelet's {KEY}",
                path.display(),
                io::Error::from(error)
            ))
        })?;
        Ok(Self { fd, path })
    }

    /// Writes the files of pods, all of them or none. A kubelet never reads a part of a file.
    pub(crate) fn put(&self, pods: &[StaticPod]) -> Result<(), Error> {
        let mut files = Files { directory: self, names: Vec::new() };
        let mut temporary = Vec::new();
        for pod in pods {
            let name = format!("{TEMPORARY_PREFIX}{:016x}", RandomState::new().hash_one(&pod.name));
            files.write(&name, &pod.json).map_err(|error| self.failed(&pod.name, error))?;
            temporary.push(name);
        }
        for (pod, name) in pods.iter().zip(&temporary) {
            files.rename(name, &pod.name.file()).map_err(|error| match error {
                Errno::EXIST => Error::Failed(format!(
                    "pod {} exists: {}; allowed: another name, or `milpactl delete` before",
                    pod.name,
                    self.path.join(pod.name.file()).display()
                )),
                error => self.failed(&pod.name, error),
            })?;
        }
        // The files are complete: they stay.
        files.names.clear();
        fsync(&self.fd).map_err(io::Error::from)?;
        Ok(())
    }

    /// Removes the file of a pod.
    pub(crate) fn remove(&self, pod: &PodName) -> Result<(), Error> {
        match unlinkat(&self.fd, pod.file(), AtFlags::empty()) {
            Ok(()) => Ok(fsync(&self.fd).map_err(io::Error::from)?),
            Err(Errno::NOENT) => {
                let names: Vec<String> = self.pods()?.iter().map(ToString::to_string).collect();
                let there = if names.is_empty() { "none".to_owned() } else { listed(&names) };
                Err(Error::Name(format!(
                    "no static pod {pod} of `milpactl create` in {}; there: {there}; other pods \
                     end by `kubectl delete`, and their cells by `milpactl drain`",
                    self.path.display()
                )))
            }
            Err(error) => Err(self.failed(pod, error)),
        }
    }

    /// Returns the pods that `milpactl create` has made, sorted.
    fn pods(&self) -> Result<Vec<PodName>, Error> {
        let mut pods = Vec::new();
        for entry in Dir::read_from(&self.fd).map_err(io::Error::from)? {
            let entry = entry.map_err(io::Error::from)?;
            pods.extend(entry.file_name().to_str().ok().and_then(PodName::of_file));
        }
        pods.sort();
        Ok(pods)
    }

    fn failed(&self, pod: &PodName, error: Errno) -> Error {
        let file = self.path.join(pod.file());
        Error::Failed(format!("pod {pod}: {}: {}", file.display(), io::Error::from(error)))
    }
}

/// New files of a directory, removed when dropped.
struct Files<'a> {
    directory: &'a StaticPodDirectory,
    names: Vec<String>,
}

impl Files<'_> {
    /// Writes a file that only the owner reads. It is on the disk before it gets its name.
    fn write(&mut self, name: &str, text: &str) -> Result<(), Errno> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let file = openat(&self.directory.fd, name, flags, Mode::RUSR | Mode::WUSR)?;
        self.names.push(name.to_owned());
        let mut file = File::from(file);
        let written = file.write_all(text.as_bytes()).and_then(|()| file.sync_all());
        written.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))
    }

    /// Renames a file to a name that no file has.
    fn rename(&mut self, old: &str, new: &str) -> Result<(), Errno> {
        let fd = &self.directory.fd;
        renameat_with(fd, old, fd, new, RenameFlags::NOREPLACE)?;
        self.names.retain(|name| name != old);
        self.names.push(new.to_owned());
        Ok(())
    }
}

impl Drop for Files<'_> {
    fn drop(&mut self) {
        for name in &self.names {
            // Best effort: the error that led here is reported.
            let _ = unlinkat(&self.directory.fd, name.as_str(), AtFlags::empty());
        }
    }
}

/// Returns the directory of a kubelet's configuration.
fn configured(file: &Path) -> Result<PathBuf, Error> {
    let refused = |why: String| {
        Error::Usage(format!(
            "{}: {why}; allowed: {KEY} in the kubelet's configuration, or --static-pod-path \
             DIRECTORY",
            file.display()
        ))
    };
    let mut text = String::new();
    let read = File::open(file)
        .and_then(|opened| opened.take(MAX_CONFIG_BYTES + 1).read_to_string(&mut text));
    read.map_err(|error| refused(error.to_string()))?;
    if text.len() as u64 > MAX_CONFIG_BYTES {
        return Err(refused(format!("more than {MAX_CONFIG_BYTES} bytes")));
    }
    let config: Value = serde_saphyr::from_str(&text)
        .map_err(|error| refused(format!("is not YAML: {}", error.without_snippet())))?;
    let path = config.get(KEY).and_then(Value::as_str).filter(|path| !path.is_empty());
    let path = path.ok_or_else(|| refused(format!("has no {KEY}")))?;
    // A kubelet resolves a relative path against the directory of its configuration.
    Ok(file.parent().unwrap_or(Path::new("/")).join(path))
}

#[cfg(test)]
mod tests;
