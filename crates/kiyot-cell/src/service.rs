//! Service of systemd on a machine of the cell's own (`kiyot-cell service`): boots the cell on a
//! stock distribution or an image of it, and supervises containerd and the agent. The machine
//! powers off when it ends.
//!
//! A machine runs the service once in its life. At a second start, after a crash or a reboot, the
//! daemon may have given the pod to another cell, so the machine powers off.

mod boot_data;
mod boot_record;
mod metadata;
mod routes;

use std::{env, fs, io, os::unix::fs::DirBuilderExt, path::Path};

use kiyot_link::bootstrap::CellFileError;
use rustix::fs::Mode;

use crate::{
    agent,
    dirs::{CellDir, DirError},
    init::{self, bounded_log::BoundedLog, private, services},
    machine::mounts,
    power_off,
};

/// Variable that systemd sets for the processes of its units.
const SYSTEMD_VARIABLE: &str = "INVOCATION_ID";

/// Errors that keep a machine from serving its cell.
#[derive(Debug, thiserror::Error)]
pub enum ServiceError {
    /// The process was not started by systemd.
    #[error(
        "service must be a unit of systemd, which sets {SYSTEMD_VARIABLE}: it powers the machine \
         off when it ends"
    )]
    NoUnit,
    /// The cell's directory can't be used.
    #[error(transparent)]
    Dir(#[from] DirError),
    /// The machine may not run its cell.
    #[error(transparent)]
    Record(#[from] boot_record::BootRecordError),
    /// The boot data can't be read.
    #[error(transparent)]
    BootData(#[from] boot_data::BootDataError),
    /// The boot data can't be written.
    #[error(transparent)]
    CellFile(#[from] CellFileError),
    /// A mount failed.
    #[error(transparent)]
    Mount(#[from] mounts::MountError),
    /// The cell's own tmpfs can't be mounted.
    #[error(transparent)]
    Private(#[from] init::mount_error::MountError),
    /// The machine's routes can't be set.
    #[error(transparent)]
    Routes(#[from] routes::RouteError),
    /// The services can't be started.
    #[error(transparent)]
    Services(#[from] services::ServicesError),
    /// A step of the start failed; the message names the step.
    #[error("cannot {0}")]
    Step(&'static str, #[source] io::Error),
}

/// Boots the cell, runs it until its end, and powers the machine off. Returns only if systemd did
/// not start it.
pub fn run(dir: &Path) -> Result<i32, ServiceError> {
    if env::var_os(SYSTEMD_VARIABLE).is_none() {
        return Err(ServiceError::NoUnit);
    }
    // containerd creates the roots of containers with this mask: under a tighter mask, only root
    // could run programs in them. systemd's units have this mask unless an image sets another.
    rustix::process::umask(Mode::from_raw_mode(0o022));
    if let Err(error) = serve(dir) {
        // The provider shows the end of the console when the cell doesn't enrol.
        eprintln!("kiyot-cell: {}", crate::with_sources(&error));
    }
    power_off::now()
}

fn serve(dir: &Path) -> Result<(), ServiceError> {
    let step = |what| move |source| ServiceError::Step(what, source);
    // Armed first, so that a machine that no daemon knows ends even if a later step hangs.
    let power_off = power_off::arm().map_err(step("arm the power-off"))?;
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(dir)
        .map_err(step("create the cell's directory"))?;
    let dir = CellDir::open(dir)?;
    boot_record::begin(&dir)?;
    let (mut file, machine) = boot_data::read(&dir)?;
    file.registry_config_dir = Some(agent::registries::config_path());
    file.restrict_oom_score_adj = !may_lower_oom_score();
    power_off.set_deadline(machine.power_off_after_secs);
    file.write(&dir.cell_file())?;
    let certificate = dir.agent().join(crate::uplink::CERTIFICATE_FILE);
    power_off.renewed_after(certificate, file.bootstrap.orphan_timeout_secs);
    init::make_dirs(&dir).map_err(step("create the cell's directories"))?;
    let snapshotter = private::mount_all(&dir)?;
    mounts::private(&dir)?;
    routes::keep(&machine, &file.bootstrap.gateway)?;
    let console = BoundedLog::stderr().map_err(step("duplicate standard error"))?;
    services::run(&dir, &file, snapshotter, &console)?;
    Ok(())
}

/// Returns whether processes may lower their OOM score. They may not if the machine is itself a
/// container.
fn may_lower_oom_score() -> bool {
    let score = services::MACHINE_OOM_SCORE_ADJ.to_string();
    fs::write("/proc/self/oom_score_adj", score).is_ok()
}
