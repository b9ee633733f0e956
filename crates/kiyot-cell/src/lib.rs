//! Programs of a cell: launch, init (PID 1 of a cell on its node), machine (PID 1 of a machine of
//! its own), service (unit of systemd on such a machine) and agent.

pub mod agent;
pub mod dirs;
pub mod init;
pub mod launch;
pub mod launch_vm;
pub mod machine;
pub mod namespaces;
mod power_off;
pub mod service;
pub mod uplink;

/// Returns an error with all its sources in one line.
pub fn with_sources(error: &dyn std::error::Error) -> String {
    let mut message = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        message.push_str(": ");
        message.push_str(&error.to_string());
        source = error.source();
    }
    message
}
