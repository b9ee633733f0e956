//! `kiyot-cell`: the one program of ours in a cell.

use std::{error::Error, path::PathBuf, process::ExitCode};

use clap::{Parser, Subcommand};
use kiyot_cell::{agent, init, launch};
use kiyot_link::core_dump;

/// Launches a cell, is its init, or is its agent.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    role: Role,
}

#[derive(Debug, Subcommand)]
enum Role {
    /// Makes a cell's namespaces and waits for the cell's end.
    Launch {
        /// The cell's directory; cell.json is in it.
        #[arg(long)]
        dir: PathBuf,
        /// The file of the network namespace that becomes the cell's.
        #[arg(long)]
        netns: PathBuf,
        /// The control group of the cell's own processes, relative to the root of the tree.
        #[arg(long)]
        cgroup: Option<String>,
    },
    /// Is PID 1 of a cell.
    Init {
        /// The cell's directory.
        #[arg(long)]
        dir: PathBuf,
    },
    /// Speaks for a cell to its gateway.
    Agent {
        /// The cell's directory.
        #[arg(long)]
        dir: PathBuf,
        /// Where the streaming server of the cell's containerd listens, on the loopback.
        #[arg(long)]
        stream_port: u16,
    },
}

fn main() -> ExitCode {
    let role = Arguments::parse().role;
    // Init's containerd and its containers have the limit that the launch was given.
    let cores = match role {
        Role::Init { .. } => core_dump::forbid().and_then(|()| core_dump::allow_children()),
        Role::Launch { .. } | Role::Agent { .. } => core_dump::forbid(),
    };
    if let Err(error) = cores {
        eprintln!("kiyot-cell: cannot forbid core dumps: {error}");
        return ExitCode::FAILURE;
    }
    let outcome = match role {
        Role::Launch { dir, netns, cgroup } => {
            launch::run(&dir, &netns, cgroup.as_deref()).map_err(Box::<dyn Error>::from)
        }
        Role::Init { dir } => init::run(&dir).map_err(Box::<dyn Error>::from),
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
