//! `kiyot-cell`: the one program of ours in a cell.

use std::{error::Error, path::PathBuf, process::ExitCode};

use clap::{Parser, Subcommand};
use kiyot_cell::{agent, init, launch};

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
    let outcome = match Arguments::parse().role {
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
