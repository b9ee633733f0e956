//! Services of a cell: containerd and the agent.

use std::{
    io,
    net::{Ipv4Addr, TcpListener},
    os::unix::process::CommandExt,
    path::Path,
    process::Command,
    time::Duration,
};

use kiyot_link::bootstrap::CellFile;

use super::{
    MAX_LOG_BYTES, POWER_OFF_EXIT_CODE, base_spec,
    bounded_log::BoundedLog,
    containerd::{Settings, Snapshotter},
    supervisor::{Service, Supervisor},
};
use crate::{dirs::CellDir, launch::DEFAULT_PATH};

/// OOM score adjustment of containerd and the agent on a machine of the cell's own, as in
/// containerd's systemd unit: when memory is short, the kernel kills a container instead.
/// Containers have their own scores.
pub(crate) const MACHINE_OOM_SCORE_ADJ: i32 = -999;

/// File with variables of containerd's environment on a machine of the cell's own. The agent writes
/// it to a tmpfs, because the variables may have passwords.
pub(crate) const CONTAINERD_ENVIRONMENT: &str = "/run/kiyot/containerd.env";

/// A step of the start of the services failed; the message names the step.
#[derive(Debug, thiserror::Error)]
#[error("cannot {0}")]
pub struct ServicesError(&'static str, #[source] io::Error);

/// Runs containerd, with the snapshotter of the cell's disk, and the agent until the cell must
/// power off. Requires the cell's directories and mounts, and its loopback up.
pub fn run(
    dir: &CellDir,
    file: &CellFile,
    snapshotter: Snapshotter,
    console: &BoundedLog,
) -> Result<(), ServicesError> {
    let step = |what| move |source| ServicesError(what, source);
    let stream_port =
        free_port().map_err(step("find a free port for containerd's streaming server"))?;
    let settings = Settings { file, dir, stream_port, snapshotter };
    std::fs::write(dir.containerd_toml(), settings.render())
        .map_err(step("write containerd's configuration"))?;
    if !file.cri.rlimits.is_empty() {
        std::fs::write(dir.base_spec(), base_spec::render(&file.cri.rlimits))
            .map_err(step("write the base of containers' specs"))?;
    }

    let mut supervisor = Supervisor::start().map_err(step("start the reaper"))?;
    let containerd_log = BoundedLog::open(dir.containerd_log(), MAX_LOG_BYTES)
        .map_err(step("open containerd's log"))?;

    let mut containerd = Command::new(&file.containerd);
    containerd.arg("--config").arg(dir.containerd_toml());
    if file.machine.is_some() {
        // The kernel starts PID 1 without `PATH`.
        containerd.env("PATH", DEFAULT_PATH);
    }
    let protected = |service: Service| match file.machine {
        Some(_) => service.with_oom_score_adj(MACHINE_OOM_SCORE_ADJ),
        None => service,
    };
    let containerd = Service::new("containerd", containerd, None, &containerd_log)
        .map_err(step("prepare containerd"))?;
    let containerd = match file.machine {
        Some(_) => containerd.with_environment(Path::new(CONTAINERD_ENVIRONMENT)),
        None => containerd,
    };
    supervisor.add(protected(containerd));

    let mut agent = Command::new("/proc/self/exe");
    // Name in the process list.
    agent
        .arg0("kiyot-cell")
        .arg("agent")
        .arg("--dir")
        .arg(dir.path())
        .arg("--stream-port")
        .arg(stream_port.to_string());
    let agent = Service::new("agent", agent, Some(POWER_OFF_EXIT_CODE), console)
        .map_err(step("prepare the agent"))?;
    // An agent that can't run can't enforce the orphan timeout, so init does.
    let max_failing = Duration::from_secs(file.bootstrap.orphan_timeout_secs);
    supervisor.add(protected(agent.with_max_failing(max_failing)));

    supervisor.run(console);
    Ok(())
}

/// Returns a free port, which stays free because nothing else runs in the network namespace yet.
fn free_port() -> io::Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port())
}
