//! Jail of QEMU (`kiyot-cell run-vm`): its own namespaces and root, and an unprivileged user that
//! can't gain privileges. A guest that takes over its QEMU finds only the node's programs, its own
//! disk, its own boot data, and the network of its own cell.

use std::{
    env,
    ffi::OsStr,
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, Write},
    os::{
        fd::AsRawFd,
        unix::{
            fs::{DirBuilderExt, OpenOptionsExt, symlink},
            net::UnixListener,
            process::CommandExt,
        },
    },
    path::{Path, PathBuf},
    process::Command,
};

use kiyot_link::vm_file::{Accelerator, VmFile};
use kiyot_linux::tree::own;
use nix::{
    sched::{CloneFlags, unshare},
    unistd::{Gid, Uid, chown, setgroups, setresgid, setresuid},
};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::{CWD, FileType, Mode, makedev, mknodat},
    io::{FdFlags, fcntl_setfd},
    mount::{
        MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_bind, mount_change,
        mount_remount, unmount,
    },
    process::{Signal, chdir, pivot_root, set_parent_process_death_signal},
    thread::set_no_new_privs,
};

use super::{VmError, qemu, qemu::paths, space, step};
use crate::dirs::CellDir;

/// Directories of the node's programs and libraries; absent directories are skipped. Some are links
/// on most distributions.
const PROGRAMS: [&str; 9] = ["usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "nix", "gnu"];
/// Files of the node that programs need to start.
const FILES: [&str; 1] = ["etc/ld.so.cache"];
/// Device files: path, major and minor number (Linux, devices.txt).
const DEVICES: [(&str, u32, u32); 3] =
    [("dev/null", 1, 3), ("dev/urandom", 1, 9), ("dev/net/tun", 10, 200)];
/// See [`DEVICES`].
const KVM: (&str, u32, u32) = ("dev/kvm", 10, 232);
/// Name of the monitor's socket in its directory.
const MONITOR: &str = "qmp.sock";
/// Mount options of the jail's root, which has only directories, links and boot data.
const ROOT_OPTIONS: &std::ffi::CStr = c"size=4m,mode=0755";

/// Becomes QEMU. Returns only if this fails.
pub fn run(dir: &Path) -> Result<i32, VmError> {
    if std::process::id() != 1 {
        let error = io::Error::other("not the first process of a PID namespace");
        return Err(VmError::Step("run a virtual machine", error));
    }
    let dir = CellDir::open(dir)?;
    let file = VmFile::read(&dir.vm_file())?;
    unshare(CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWUTS | CloneFlags::CLONE_NEWIPC)
        .map_err(step("create the namespaces"))?;
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)
        .map_err(step("make the mounts private"))?;
    rustix::process::umask(Mode::from_raw_mode(0o022));
    let jail = Jail { root: dir.root(), user: file.user, group: file.group };
    let monitor = listen(&dir.qmp())?;
    jail.build(&dir, &file)?;
    jail.enter()?;
    drop_privileges(&file)?;
    space::limit(file.disk_bytes.unwrap_or(0)).map_err(step("limit the space on the disk"))?;
    let mut command = Command::new(&file.program);
    let program = file.program.file_name().unwrap_or(OsStr::new("qemu"));
    let cell = dir.path().file_name().unwrap_or_default().to_string_lossy();
    command.arg0(program).args(qemu::arguments(&file, &cell, monitor.as_raw_fd())).env_clear();
    command.env("PATH", env::var_os("PATH").unwrap_or_default());
    // A change of the user clears the parent-death signal, and exec keeps it.
    follow_parent()?;
    Err(VmError::Path("run", file.program.clone(), command.exec()))
}

/// Directory that becomes the root of QEMU.
struct Jail {
    root: PathBuf,
    user: u32,
    group: u32,
}

impl Jail {
    fn build(&self, dir: &CellDir, file: &VmFile) -> Result<(), VmError> {
        create_dir(&self.root)?;
        mount("kiyot", &self.root, "tmpfs", MountFlags::NOSUID, ROOT_OPTIONS)
            .map_err(path_error("mount a file system on", &self.root))?;
        for name in PROGRAMS {
            self.add_programs(name)?;
        }
        for name in FILES {
            let path = own(Path::new("/"), name);
            if path.is_file() {
                self.add_file(&path, name, Access::ReadOnly)?;
            }
        }
        for device in DEVICES.iter().chain((file.accelerator == Accelerator::Kvm).then_some(&KVM)) {
            self.add_device(device)?;
        }
        self.add_file(&file.kernel, paths::KERNEL, Access::ReadOnly)?;
        if let Some(initramfs) = &file.initramfs {
            self.add_file(initramfs, paths::INITRAMFS, Access::ReadOnly)?;
        }
        if let Some(root) = &file.root {
            self.add_file(root, paths::ROOT, Access::ReadOnly)?;
        }
        if file.disk_bytes.is_some() {
            self.own(&dir.vm_disk())?;
            self.add_file(&dir.vm_disk(), paths::DISK, Access::ReadWrite)?;
        }
        if file.network.is_some() {
            self.add_cell_file(dir)?;
        }
        Ok(())
    }

    /// Returns the path on the node of a path in the jail.
    fn inside(&self, path: &'static str) -> PathBuf {
        own(&self.root, path.trim_start_matches('/'))
    }

    /// Adds a directory of programs, or the same link if it is a link.
    fn add_programs(&self, name: &'static str) -> Result<(), VmError> {
        let (path, inside) = (own(Path::new("/"), name), self.inside(name));
        if let Ok(target) = fs::read_link(&path) {
            return symlink(target, &inside).map_err(path_error("create the link", &inside));
        }
        if path.is_dir() {
            create_dir(&inside)?;
            self.bind(&path, &inside, Access::ReadOnly)?;
        }
        Ok(())
    }

    fn add_file(&self, path: &Path, name: &'static str, access: Access) -> Result<(), VmError> {
        let inside = self.inside(name);
        if let Some(parent) = inside.parent() {
            create_dir(parent)?;
        }
        File::create(&inside).map_err(path_error("create", &inside))?;
        self.bind(path, &inside, access)
    }

    fn bind(&self, path: &Path, inside: &Path, access: Access) -> Result<(), VmError> {
        mount_bind(path, inside).map_err(path_error("bind-mount", path))?;
        let mut flags = MountFlags::BIND | MountFlags::NOSUID | MountFlags::NODEV;
        if access == Access::ReadOnly {
            flags |= MountFlags::RDONLY;
        }
        mount_remount(inside, flags, c"").map_err(path_error("restrict the mount of", path))
    }

    fn add_device(&self, (name, major, minor): &(&'static str, u32, u32)) -> Result<(), VmError> {
        let inside = self.inside(name);
        if let Some(parent) = inside.parent() {
            create_dir(parent)?;
        }
        let device = makedev(*major, *minor);
        mknodat(CWD, &inside, FileType::CharacterDevice, Mode::from_raw_mode(0o600), device)
            .map_err(path_error("create the device", &inside))?;
        self.own(&inside)
    }

    /// Moves the boot data from the node's disk to the memory of the jail.
    fn add_cell_file(&self, dir: &CellDir) -> Result<(), VmError> {
        let (path, inside) = (dir.cell_file(), self.inside(paths::CELL_FILE));
        let content = fs::read(&path).map_err(path_error("read", &path))?;
        OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o400)
            .open(&inside)
            .and_then(|mut file| file.write_all(&content))
            .map_err(path_error("write", &inside))?;
        self.own(&inside)?;
        fs::remove_file(&path).map_err(path_error("remove", &path))
    }

    /// Gives a file to the user of QEMU.
    fn own(&self, path: &Path) -> Result<(), VmError> {
        chown(path, Some(Uid::from_raw(self.user)), Some(Gid::from_raw(self.group)))
            .map_err(path_error("change the owner of", path))
    }

    /// Makes the jail the root of this mount namespace, and detaches the node's.
    fn enter(&self) -> Result<(), VmError> {
        chdir(&self.root).map_err(path_error("enter", &self.root))?;
        // The old root is stacked on the new one (pivot_root(2), "pivot_root(".", ".")").
        pivot_root(".", ".").map_err(step("pivot to the new root"))?;
        unmount(".", UnmountFlags::DETACH).map_err(step("detach the old root"))?;
        chdir("/").map_err(step("change to the root"))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Access {
    ReadOnly,
    ReadWrite,
}

/// Returns a function that names the step and the path of an error.
fn path_error<E: Into<io::Error>>(
    what: &'static str,
    path: &Path,
) -> impl FnOnce(E) -> VmError + use<E> {
    let path = path.to_owned();
    move |error| VmError::Path(what, path, error.into())
}

fn create_dir(path: &Path) -> Result<(), VmError> {
    DirBuilder::new().recursive(true).mode(0o755).create(path).map_err(path_error("create", path))
}

/// Returns the socket of QEMU's monitor. QEMU can't create it, because it has no writable
/// directory.
fn listen(dir: &Path) -> Result<UnixListener, VmError> {
    create_dir(dir)?;
    // A relative path, because the absolute path may be longer than a socket's address.
    chdir(dir).map_err(path_error("enter", dir))?;
    let socket = UnixListener::bind(MONITOR).map_err(path_error("make a socket in", dir))?;
    // Without `CLOEXEC`, exec keeps the socket open.
    fcntl_setfd(&socket, FdFlags::empty()).map_err(path_error("keep the socket in", dir))?;
    Ok(socket)
}

/// Gives up all privileges permanently. The capabilities end with root's user id.
fn drop_privileges(file: &VmFile) -> Result<(), VmError> {
    let (user, group) = (Uid::from_raw(file.user), Gid::from_raw(file.group));
    if user.is_root() || group.as_raw() == 0 {
        let error = io::Error::other("root; allowed: another user and another group");
        return Err(VmError::Step("run QEMU as this user", error));
    }
    set_no_new_privs(true).map_err(step("forbid new privileges"))?;
    setgroups(&[]).map_err(step("drop the groups"))?;
    setresgid(group, group, group).map_err(step("change the group"))?;
    setresuid(user, user, user).map_err(step("change the user"))
}

/// Makes the kernel kill this process when the launch process ends.
fn follow_parent() -> Result<(), VmError> {
    set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(step("set the parent-death signal"))?;
    // If the launch process has already ended, the write end of standard input is closed.
    let stdin = io::stdin();
    let mut input = [PollFd::new(&stdin, PollFlags::empty())];
    poll(&mut input, Some(&Timespec::default())).map_err(step("poll standard input"))?;
    if input[0].revents().intersects(PollFlags::HUP | PollFlags::ERR) {
        Err(VmError::Orphaned)
    } else {
        Ok(())
    }
}
