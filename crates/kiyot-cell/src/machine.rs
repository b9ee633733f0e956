//! PID 1 of a machine of the cell's own (`kiyot-cell machine`): boots from the initramfs of the
//! cell image, and supervises containerd and the agent. The machine powers off when it returns.
//!
//! The kernel starts it with a root of its own in memory. The image's root is read-only; the disk
//! of the cell is mounted on its directory.

mod boot_data;
mod disks;
mod link_namespace;
mod modules;
pub(crate) mod mounts;
pub(crate) mod wait;

use std::{io, path::Path};

use kiyot_link::bootstrap::{CellFile, CellFileError, Machine};

use crate::{
    agent,
    dirs::{CellDir, DirError},
    init::{self, bounded_log::BoundedLog, loopback, private, services},
    power_off,
};

/// Directory of the cell, the mount point of its disk.
pub const CELL_DIR: &str = "/var/lib/kiyot-cell";
/// Console of the machine. The provider bounds its size.
const CONSOLE: &str = "/dev/console";

/// Errors that keep a machine from serving its cell.
#[derive(Debug, thiserror::Error)]
pub enum MachineError {
    /// The process was not started as PID 1.
    #[error("machine must be PID 1, but has PID {0}")]
    NotFirst(u32),
    /// A mount failed.
    #[error(transparent)]
    Mount(#[from] mounts::MountError),
    /// The cell's own tmpfs can't be mounted.
    #[error(transparent)]
    Private(#[from] init::mount_error::MountError),
    /// A module of the kernel can't be loaded.
    #[error(transparent)]
    Module(#[from] modules::ModuleError),
    /// A disk is absent.
    #[error(transparent)]
    Disk(#[from] disks::DiskError),
    /// The boot data can't be read.
    #[error("boot data {0}")]
    BootData(&'static str, #[source] io::Error),
    /// The boot data is invalid.
    #[error(transparent)]
    CellFile(#[from] CellFileError),
    /// The boot data is for a cell in namespaces of its node.
    #[error("boot data has no field \"machine\"")]
    NoMachine,
    /// A network device can't be found or configured.
    #[error(transparent)]
    Device(#[from] link_namespace::DeviceError),
    /// The cell's directory can't be used.
    #[error(transparent)]
    Dir(#[from] DirError),
    /// The services can't be started.
    #[error(transparent)]
    Services(#[from] services::ServicesError),
    /// A step of the start failed; the message names the step.
    #[error("cannot {0}")]
    Step(&'static str, #[source] io::Error),
}

/// Boots the machine, runs the cell until its end, and powers off. Returns only if it is not PID 1.
pub fn run() -> Result<i32, MachineError> {
    if std::process::id() != 1 {
        return Err(MachineError::NotFirst(std::process::id()));
    }
    if let Err(error) = serve() {
        // The provider shows the end of the console when the cell doesn't enrol.
        eprintln!("kiyot-cell: {}", crate::with_sources(&error));
    }
    power_off::now()
}

fn serve() -> Result<(), MachineError> {
    let step = |what| move |source| MachineError::Step(what, source);
    // Armed first, so that a machine that no daemon knows ends even if a later step hangs.
    let power_off = power_off::arm().map_err(step("arm the power-off"))?;
    mounts::early()?;
    modules::load_all(Path::new(modules::LIST))?;
    let boot_data = boot_data::read()?;
    let mut file = CellFile::parse(Path::new(boot_data::NAME), &boot_data)?;
    file.registry_config_dir = Some(agent::registries::config_path());
    let machine = file.machine.clone().ok_or(MachineError::NoMachine)?;
    power_off.set_deadline(machine.power_off_after_secs);
    mounts::root(&disks::find("root")?, &disks::find("disk")?)?;

    let dir = CellDir::open(Path::new(CELL_DIR))?;
    file.write(&dir.cell_file())?;
    let certificate = dir.agent().join(crate::uplink::CERTIFICATE_FILE);
    power_off.renewed_after(certificate, file.bootstrap.orphan_timeout_secs);
    init::make_dirs(&dir).map_err(step("create the cell's directories"))?;
    let snapshotter = private::mount_all(&dir)?;
    mounts::cell(&dir)?;
    loopback::up().map_err(step("bring up the loopback"))?;
    prepare_devices(&machine)?;
    let console = BoundedLog::open(CONSOLE.into(), u64::MAX).map_err(step("open the console"))?;
    services::run(&dir, &file, snapshotter, &console)?;
    Ok(())
}

fn prepare_devices(machine: &Machine) -> Result<(), MachineError> {
    if let Some(mac) = machine.pod_mac {
        link_namespace::name_pod_device(mac)?;
    }
    if let Some(device) = &machine.link {
        link_namespace::isolate(device)?;
    }
    Ok(())
}
