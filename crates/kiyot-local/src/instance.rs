//! The directory of an instance, which is created first and removed last.

use std::{
    collections::BTreeSet,
    ffi::OsString,
    fs::{self, DirBuilder, OpenOptions},
    io::{self, Read, Seek, SeekFrom, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use kiyot_engine::{
    id::CellId,
    provider::{Attachment, ErrorClass, ProviderError},
};
use kiyot_linux::tree::own;
use rustix::fs::{IFlags, OFlags, ioctl_getflags, ioctl_setflags};
use serde::{Deserialize, Serialize};

use crate::{
    boot_id, cgroup,
    process::Identity,
    shortage::{found, is_shortage},
};

/// The CRI plugin's directory in the cell's containerd, with a directory for each container.
const CRI_ROOT: &str = "containerd/io.containerd.grpc.v1.cri";
/// The directory with the names of network namespaces (`ip netns`).
const NETNS_DIR: &str = "/run/netns";
/// Bounds the returned part of a console, in bytes.
const CONSOLE_TAIL: u64 = 16 * 1024;

/// The directory of an instance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Home {
    dir: PathBuf,
    cell: CellId,
}

/// The content of an instance's `instance.json`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct InstanceRecord {
    /// The digest of the launch's token.
    pub(super) token_sha256: String,
    /// The node's boot id at the launch. After a reboot, PIDs have no meaning.
    pub(super) boot_id: String,
    /// The process `kiyot-cell launch`.
    pub(super) launcher: Option<Identity>,
    /// The instance type; empty for the provider's default type.
    #[serde(default)]
    pub(super) instance_type: String,
    /// The cgroups of the instance's containers, recorded when it ends.
    #[serde(default)]
    pub(super) cgroups: BTreeSet<PathBuf>,
    /// The pod of the network. The network's address must be found even if `network.json` can't be
    /// read.
    #[serde(default)]
    pub(super) attachment: Option<Attachment>,
    /// The `cgroup_parent` of the pod whose CPU weight the instance has; empty without a pod.
    #[serde(default)]
    pub(super) weight_of: String,
    /// True if the record exists but can't be read. The cgroup then shows if the instance runs.
    #[serde(skip)]
    pub(super) is_unreadable: bool,
}

/// The process of an instance, by its record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Launcher {
    /// No process was started after the last boot.
    None,
    /// The instance's process.
    Process(Identity),
    /// The record can't be read, which proves nothing.
    Unknown,
}

impl InstanceRecord {
    pub(super) fn launcher(&self) -> Launcher {
        match self.launcher {
            _ if self.is_unreadable => Launcher::Unknown,
            Some(process) if self.boot_id == boot_id() => Launcher::Process(process),
            _ => Launcher::None,
        }
    }
}

impl Launcher {
    /// Returns whether the instance of a cell runs. The cell's cgroup decides if the record can't
    /// be read.
    pub(super) fn runs(self, cell: &CellId) -> io::Result<bool> {
        match self {
            Self::None => Ok(false),
            Self::Process(process) => process.runs(),
            Self::Unknown => {
                let hierarchies = cgroup::hierarchies()?;
                Ok(!cgroup::processes(&hierarchies, cell.as_str())?.is_empty())
            }
        }
    }
}

impl Home {
    /// Returns the directory of a cell.
    pub(crate) fn new(cells: &Path, cell: &CellId) -> Self {
        Self { dir: cells.join(cell.as_str()), cell: cell.clone() }
    }

    /// Returns the instances in the directory of all cells, and the names of other entries.
    pub(super) fn all(cells: &Path) -> io::Result<(Vec<Self>, Vec<OsString>)> {
        let entries = match fs::read_dir(cells) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Default::default()),
            Err(error) => return Err(error),
        };
        let (mut homes, mut strays) = (Vec::new(), Vec::new());
        for entry in entries {
            let name = entry?.file_name();
            match name.to_str().map(CellId::parse) {
                Some(Ok(cell)) => homes.push(Self::new(cells, &cell)),
                _ => strays.push(name),
            }
        }
        Ok((homes, strays))
    }

    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns the cell's id.
    pub(crate) fn cell(&self) -> &str {
        self.cell.as_str()
    }

    pub(super) fn id(&self) -> &CellId {
        &self.cell
    }

    /// Returns the name of the cell's network namespace.
    pub(crate) fn netns_name(&self) -> String {
        format!("kiyot-{}", self.cell)
    }

    pub(super) fn netns_path(&self) -> PathBuf {
        Path::new(NETNS_DIR).join(self.netns_name())
    }

    /// Returns the path of the bootstrap file.
    pub(crate) fn cell_file(&self) -> PathBuf {
        self.dir.join("cell.json")
    }

    /// Returns the path of a file of the provider.
    pub(crate) fn file(&self, name: &'static str) -> PathBuf {
        own(&self.dir, name)
    }

    pub(super) fn network_file(&self) -> PathBuf {
        self.dir.join("network.json")
    }

    /// Returns the ids of the containers and sandboxes on the disk of the cell's containerd.
    pub(super) fn containers(&self) -> io::Result<BTreeSet<String>> {
        let root = self.dir.join(CRI_ROOT);
        let mut containers = BTreeSet::new();
        for kind in ["containers", "sandboxes"] {
            let entries = found(fs::read_dir(own(&root, kind)))?.into_iter().flatten().flatten();
            containers.extend(entries.filter_map(|entry| entry.file_name().into_string().ok()));
        }
        Ok(containers)
    }

    /// Returns the path of `instance.json`.
    pub(super) fn known_file(&self) -> PathBuf {
        self.dir.join("instance.json")
    }

    fn console_file(&self) -> PathBuf {
        self.dir.join("console.log")
    }

    /// Creates the directory with mode 0700.
    pub(crate) fn make(&self) -> io::Result<()> {
        let mut builder = DirBuilder::new();
        builder.mode(0o700);
        match builder.create(&self.dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                if let Some(cells) = self.dir.parent() {
                    builder.recursive(true).create(cells)?;
                    spread_directories(cells);
                }
            }
            Ok(()) => return Ok(()),
            // The directory may already exist.
            Err(_) => {}
        }
        builder.recursive(true).create(&self.dir)
    }

    /// Returns the instance's record, which is empty if the file is absent or unreadable. Returns
    /// an error if the daemon lacks the resources to read it.
    pub(super) fn known(&self) -> io::Result<InstanceRecord> {
        let read = match fs::read(self.known_file()) {
            Ok(content) => serde_json::from_slice(&content).map_err(io::Error::other),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Ok(InstanceRecord::default());
            }
            Err(error) if is_shortage(&error) => return Err(error),
            Err(error) => Err(error),
        };
        Ok(read.unwrap_or_else(|error| {
            tracing::error!(cell = %self.cell, %error, "instance record unreadable");
            InstanceRecord { is_unreadable: true, ..InstanceRecord::default() }
        }))
    }

    pub(super) fn keep(&self, known: &InstanceRecord) -> Result<(), ProviderError> {
        self.write_json(&self.known_file(), known)
    }

    /// Writes a file of the directory atomically.
    pub(super) fn write_json(
        &self,
        path: &Path,
        value: &impl Serialize,
    ) -> Result<(), ProviderError> {
        let failed = |error| ProviderError::transient(format!("write {}", path.display()), error);
        let content = serde_json::to_vec_pretty(value).map_err(|error| {
            ProviderError::new(ErrorClass::Invalid, format!("write {}", path.display()), error)
        })?;
        let draft = path.with_extension("draft");
        let mut file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&draft)
            .map_err(failed)?;
        file.write_all(&content).map_err(failed)?;
        // A plugin's addresses outlive a reboot, so that the record must survive a power failure,
        // too.
        file.sync_data().map_err(failed)?;
        fs::rename(&draft, path).map_err(failed)
    }

    /// Opens the console file for appending.
    pub(super) fn open_console(&self) -> io::Result<fs::File> {
        OpenOptions::new().append(true).create(true).mode(0o600).open(self.console_file())
    }

    /// Returns the end of the console file.
    pub(super) fn console(&self) -> io::Result<String> {
        // A compromised cell may have replaced the file.
        let flags = OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::NOCTTY;
        let mut options = OpenOptions::new();
        options.read(true).custom_flags(i32::try_from(flags.bits()).unwrap_or_default());
        let mut file = match options.open(self.console_file()) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(String::new()),
            Err(error) => return Err(error),
        };
        let metadata = file.metadata()?;
        if !metadata.is_file() {
            return Err(io::Error::other("not a regular file"));
        }
        let length = metadata.len();
        file.seek(SeekFrom::Start(length.saturating_sub(CONSOLE_TAIL)))?;
        let mut tail = Vec::new();
        file.take(CONSOLE_TAIL).read_to_end(&mut tail)?;
        Ok(String::from_utf8_lossy(&tail).into_owned())
    }
}

/// Tells ext4 to spread the directories in this one over its block groups, because they are
/// unrelated (chattr(1), `T`). In a common group, a cell's files would be placed behind the inodes
/// of all cells that ended lately, and a file system without a journal would step over these one by
/// one. Other file systems refuse the flag.
fn spread_directories(dir: &Path) {
    let set = fs::File::open(dir).and_then(|dir| {
        let flags = ioctl_getflags(&dir)?;
        Ok(ioctl_setflags(&dir, flags | IFlags::TOPDIR)?)
    });
    if let Err(error) = set {
        tracing::debug!(directory = %dir.display(), %error, "directories not spread");
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn instance_record_round_trips() {
        let dir = tempfile::tempdir().unwrap();
        let cells = dir.path().join("cells");
        assert_eq!(Home::all(&cells).unwrap(), Default::default());
        let home = Home::new(&cells, &CellId::mint().unwrap());
        home.make().unwrap();
        home.make().unwrap();
        assert_eq!(fs::metadata(home.dir()).unwrap().permissions().mode() & 0o777, 0o700);
        assert_eq!(home.known().unwrap(), InstanceRecord::default());
        let known = InstanceRecord {
            token_sha256: "t".into(),
            boot_id: "b".into(),
            launcher: Some(Identity { pid: 7, start: 9 }),
            instance_type: "2cpu-640mib".into(),
            cgroups: ["/a".into()].into(),
            attachment: Some(Attachment { pod_uid: "u".into(), ..Attachment::default() }),
            weight_of: "/kubepods/pod1".into(),
            is_unreadable: false,
        };
        home.keep(&known).unwrap();
        assert_eq!(home.known().unwrap(), known);
        fs::create_dir(cells.join("not-a-cell")).unwrap();
        assert_eq!(Home::all(&cells).unwrap(), (vec![home], vec!["not-a-cell".into()]));
    }

    #[test]
    fn directories_of_cells_are_spread_where_the_file_system_can() {
        let dir = tempfile::tempdir().unwrap();
        let (cells, other) = (dir.path().join("cells"), dir.path().join("other"));
        Home::new(&cells, &CellId::mint().unwrap()).make().unwrap();
        fs::create_dir(&other).unwrap();
        let flags = |path: &Path| ioctl_getflags(fs::File::open(path).unwrap());
        let set = fs::File::open(&other).unwrap();
        if flags(&other).and_then(|flags| ioctl_setflags(set, flags | IFlags::TOPDIR)).is_ok() {
            assert_eq!(flags(&cells).unwrap(), flags(&other).unwrap());
            assert!(flags(&cells).unwrap().contains(IFlags::TOPDIR));
        }
    }

    /// Verifies Y51.
    #[test]
    fn console_that_is_a_pipe_or_a_link_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let home = Home::new(dir.path(), &CellId::mint().unwrap());
        home.make().unwrap();
        nix::unistd::mkfifo(&home.console_file(), nix::sys::stat::Mode::S_IRUSR).unwrap();
        assert!(home.console().unwrap_err().to_string().contains("not a regular file"));
        fs::remove_file(home.console_file()).unwrap();
        std::os::unix::fs::symlink("/proc/self/status", home.console_file()).unwrap();
        assert!(home.console().is_err());
    }

    #[test]
    fn console_returns_its_end() {
        let dir = tempfile::tempdir().unwrap();
        let home = Home::new(dir.path(), &CellId::mint().unwrap());
        home.make().unwrap();
        assert_eq!(home.console().unwrap(), "");
        let mut file = home.open_console().unwrap();
        file.write_all(&[b'x'; 100_000]).unwrap();
        file.write_all(b"the end").unwrap();
        let tail = home.console().unwrap();
        assert!(tail.ends_with("xthe end") && tail.len() == 16 * 1024);
    }
}
