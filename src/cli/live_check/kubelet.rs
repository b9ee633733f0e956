//! The configuration of the kubelet that runs on this node, by its command line in /proc.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read},
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use kiyot_linux::tree::{beneath, own};

use super::kubelet_config::{Fields, Flags, KubeletConfig};

/// Name of the kubelet's process.
const COMM: &str = "kubelet\n";
/// Longest command line and longest file, in bytes.
const MAX_BYTES: u64 = 1 << 20;
/// Most files of `--config-dir`.
const MAX_DROP_INS: usize = 100;
/// Ending of the files of `--config-dir`.
const DROP_IN: &str = "conf";

/// A running kubelet.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Kubelet {
    pub(super) pid: u32,
    pub(super) config: KubeletConfig,
}

/// Reads the configuration of the oldest process that is a kubelet; `None` without a kubelet.
pub(super) fn read(proc: &Path) -> Result<Option<Kubelet>, String> {
    let Some(pid) = pid(proc).map_err(|error| unreadable(proc, &error))? else { return Ok(None) };
    let dir = process_dir(proc, pid)?;
    let path = own(&dir, "cmdline");
    let line = text(&path).map_err(|error| unreadable(&path, &error))?;
    let flags = Flags::read(line.split_terminator('\0'));
    let mut files: Vec<PathBuf> = Vec::new();
    files.extend(flags.file.as_deref().map(|file| of_process(&dir, file)).transpose()?);
    if let Some(directory) = &flags.directory {
        files.extend(drop_ins(&of_process(&dir, directory)?)?);
    }
    let mut parts = Vec::new();
    for file in files {
        let text = text(&file).map_err(|error| unreadable(&file, &error))?;
        // The error could quote values of the file.
        let fields: Fields = serde_saphyr::from_str(&text)
            .map_err(|_| format!("{}: is no KubeletConfiguration in YAML", file.display()))?;
        parts.push(fields);
    }
    parts.push(flags.fields);
    let config = KubeletConfig::merged(parts)
        .map_err(|error| format!("configuration of process {pid} can't be read: {error}"))?;
    Ok(Some(Kubelet { pid, config }))
}

/// Returns the lowest id of a kubelet's process of root or the caller.
fn pid(proc: &Path) -> io::Result<Option<u32>> {
    let own_uid = rustix::process::geteuid().as_raw();
    let mut lowest = None;
    for entry in fs::read_dir(proc)? {
        let entry = entry?;
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        // The process may have ended.
        let Ok(owner) = entry.metadata().map(|metadata| metadata.uid()) else { continue };
        let is_kubelet = [0, own_uid].contains(&owner)
            && text(&own(&entry.path(), "comm")).is_ok_and(|comm| comm == COMM);
        if is_kubelet && lowest.is_none_or(|lowest| pid < lowest) {
            lowest = Some(pid);
        }
    }
    Ok(lowest)
}

fn process_dir(proc: &Path, pid: u32) -> Result<PathBuf, String> {
    beneath(proc, pid.to_string()).map_err(|error| error.to_string())
}

/// Returns a path as a process sees it: its root may not be the caller's.
fn of_process(dir: &Path, path: &str) -> Result<PathBuf, String> {
    let (from, path) = match path.strip_prefix('/') {
        Some(path) => (own(dir, "root"), path),
        None => (own(dir, "cwd"), path),
    };
    beneath(&from, path.trim_end_matches('/')).map_err(|error| error.to_string())
}

/// Returns the files of a directory, ordered by name.
fn drop_ins(directory: &Path) -> Result<Vec<PathBuf>, String> {
    let mut files = Vec::new();
    let failed = |error: io::Error| unreadable(directory, &error);
    for entry in fs::read_dir(directory).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let path = entry.path();
        if entry.file_type().map_err(failed)?.is_dir() {
            return Err(format!("{}: is not read; allowed: files alone", path.display()));
        }
        if path.extension().is_some_and(|extension| extension == DROP_IN) {
            files.push(path);
        }
        if files.len() > MAX_DROP_INS {
            let directory = directory.display();
            return Err(format!(
                "{directory}: has more files than {MAX_DROP_INS}; allowed: as many"
            ));
        }
    }
    files.sort();
    Ok(files)
}

fn unreadable(path: &Path, error: &io::Error) -> String {
    format!("{} can't be read: {error}", path.display())
}

/// Reads a file of a bounded size.
fn text(path: &Path) -> io::Result<String> {
    let flags = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
    let file: File = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    let invalid = |rule: String| io::Error::new(io::ErrorKind::InvalidData, rule);
    if !file.metadata()?.is_file() {
        return Err(invalid("not a regular file".to_owned()));
    }
    let mut text = String::new();
    if file.take(MAX_BYTES + 1).read_to_string(&mut text)? as u64 > MAX_BYTES {
        return Err(invalid(format!("longer than {MAX_BYTES} bytes")));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes a process with its files in a root of its own.
    fn process(proc: &Path, pid: u32, comm: &str, line: &str, files: &[(&str, &str)]) {
        let dir = proc.join(pid.to_string());
        fs::create_dir_all(dir.join("root")).unwrap();
        fs::write(dir.join("comm"), comm).unwrap();
        fs::write(dir.join("cmdline"), line.replace(' ', "\0")).unwrap();
        for (name, text) in files {
            let path = dir.join("root").join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
    }

    /// Verifies K31.
    #[test]
    fn kubelet_is_read_by_its_flags_its_file_and_its_drop_ins() {
        let proc = tempfile::tempdir().unwrap();
        assert_eq!(read(proc.path()), Ok(None));
        process(proc.path(), 7, "kubelet-bench\n", "kubelet --max-pods=1", &[]);
        assert_eq!(read(proc.path()), Ok(None));
        let files = [
            (
                "var/config.yaml",
                "kind: KubeletConfiguration\nmaxPods: 50\ncpuManagerPolicy: static",
            ),
            ("etc/k.d/10.conf", "maxPods: 60\nfeatureGates: {A: true}"),
            ("etc/k.d/20.conf", "{\"maxPods\": 70}"),
            ("etc/k.d/30.txt", "no YAML: ["),
        ];
        let line = "/usr/bin/kubelet --config /var/config.yaml --config-dir=/etc/k.d \
                    --cpu-manager-policy=none";
        process(proc.path(), 812, COMM, line, &files);
        process(proc.path(), 9000, COMM, "kubelet --max-pods=1", &[]);
        let kubelet = read(proc.path()).unwrap().unwrap();
        assert_eq!((kubelet.pid, kubelet.config.max_pods), (812, Some(70)));
        assert_eq!(kubelet.config.cpu_manager_policy.as_deref(), Some("none"));
        assert_eq!(kubelet.config.feature_gates, [("A".to_owned(), true)].into());
    }

    /// Verifies K31.
    #[test]
    fn unreadable_configuration_is_an_error_that_names_the_file() {
        let long = "#".repeat(1 << 20) + "\n";
        for (path, text, expected) in [
            ("/a.yaml", None, "root/a.yaml can't be read: No such file"),
            ("/a.yaml", Some("password: [hidden"), "is no KubeletConfiguration in YAML"),
            ("/a.yaml", Some("maxPods: many"), "can't be read: invalid type"),
            ("/a.yaml", Some(long.as_str()), "longer than 1048576 bytes"),
            ("/../a.yaml", Some(""), "path \"../a.yaml\": invalid"),
            ("/", Some(""), "invalid"),
        ] {
            let proc = tempfile::tempdir().unwrap();
            let files: Vec<_> = text.map(|text| ("a.yaml", text)).into_iter().collect();
            process(proc.path(), 5, COMM, &format!("kubelet --config={path}"), &files);
            let error = read(proc.path()).unwrap_err();
            assert!(error.contains(expected) && !error.contains("hidden"), "{path}: {error}");
        }
        let proc = tempfile::tempdir().unwrap();
        process(proc.path(), 5, COMM, "kubelet --config=/f", &[]);
        fs::create_dir(proc.path().join("5/root/f")).unwrap();
        assert!(read(proc.path()).unwrap_err().contains("not a regular file"));
    }
}
