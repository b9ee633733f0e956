//! `kiyot-cell`: launches a cell, and runs in it as PID 1, as service and as agent.

use std::{error::Error, path::PathBuf, process::ExitCode};

use clap::{Parser, Subcommand};
use kiyot_cell::{agent, init, launch, launch_vm, machine, service};
use kiyot_link::core_dump;

/// Launches a cell, or runs in it as init or agent.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    role: Role,
}

#[derive(Debug, Subcommand)]
enum Role {
    /// Creates a cell's namespaces, starts its init and waits for it.
    Launch {
        /// Directory of the cell, with cell.json.
        #[arg(long)]
        dir: PathBuf,
        /// File of the network namespace for the cell.
        #[arg(long)]
        netns: PathBuf,
        /// Cgroup of the cell's own processes, relative to the root of the hierarchy.
        #[arg(long)]
        cgroup: Option<String>,
    },
    /// Creates a virtual machine with its devices and waits for it.
    LaunchVm {
        /// Directory of the cell, with vm.json and cell.json.
        #[arg(long)]
        dir: PathBuf,
        /// File of the network namespace for the virtual machine.
        #[arg(long)]
        netns: PathBuf,
        /// Cgroup of the virtual machine, relative to the root of the hierarchy.
        #[arg(long)]
        cgroup: Option<String>,
    },
    /// Becomes QEMU with the least rights. Only for launch-vm and probe-vm.
    RunVm {
        /// Directory of the cell.
        #[arg(long)]
        dir: PathBuf,
    },
    /// Boots a virtual machine until its kernel prints, or a time limit.
    ProbeVm {
        /// Directory with vm.json.
        #[arg(long)]
        dir: PathBuf,
    },
    /// Runs as PID 1 of a cell.
    Init {
        /// Directory of the cell.
        #[arg(long)]
        dir: PathBuf,
    },
    /// Runs as PID 1 of a machine of the cell's own.
    Machine,
    /// Runs as a unit of systemd on a machine of the cell's own, which powers off at its end.
    Service {
        /// Directory of the cell.
        #[arg(long, default_value = machine::CELL_DIR)]
        dir: PathBuf,
    },
    /// Runs the agent of a cell.
    Agent {
        /// Directory of the cell.
        #[arg(long)]
        dir: PathBuf,
        /// Loopback port of containerd's streaming server.
        #[arg(long)]
        stream_port: u16,
    },
}

fn main() -> ExitCode {
    let role = Arguments::parse().role;
    // Containerd and the containers keep the core dump limit that launch inherited.
    let cores = match role {
        Role::Init { .. } | Role::Machine | Role::Service { .. } => {
            core_dump::forbid().and_then(|()| core_dump::allow_children())
        }
        Role::Launch { .. }
        | Role::LaunchVm { .. }
        | Role::RunVm { .. }
        | Role::ProbeVm { .. }
        | Role::Agent { .. } => core_dump::forbid(),
    };
    if let Err(error) = cores {
        eprintln!("kiyot-cell: cannot disable core dumps: {error}");
        return ExitCode::FAILURE;
    }
    let outcome = match role {
        Role::Launch { dir, netns, cgroup } => {
            launch::run(&dir, &netns, cgroup.as_deref()).map_err(Box::<dyn Error>::from)
        }
        Role::LaunchVm { dir, netns, cgroup } => {
            launch_vm::run(&dir, &netns, cgroup.as_deref()).map_err(Box::<dyn Error>::from)
        }
        Role::RunVm { dir } => launch_vm::jail::run(&dir).map_err(Box::<dyn Error>::from),
        Role::ProbeVm { dir } => launch_vm::probe::run(&dir).map_err(Box::<dyn Error>::from),
        Role::Init { dir } => init::run(&dir).map_err(Box::<dyn Error>::from),
        Role::Machine => machine::run().map_err(Box::<dyn Error>::from),
        Role::Service { dir } => service::run(&dir).map_err(Box::<dyn Error>::from),
        Role::Agent { dir, stream_port } => {
            agent::run(&dir, stream_port).map_err(Box::<dyn Error>::from)
        }
    };
    match outcome {
        Ok(code) => ExitCode::from(u8::try_from(code).unwrap_or(1)),
        Err(error) => {
            eprintln!("kiyot-cell: {}", kiyot_cell::with_sources(error.as_ref()));
            ExitCode::FAILURE
        }
    }
}
