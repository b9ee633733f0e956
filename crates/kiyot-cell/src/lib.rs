//! The agent and the init of a cell.

pub mod agent;
pub mod dirs;
pub mod init;
pub mod launch;
pub mod namespaces;
pub mod netlink;
pub mod uplink;

/// An error and all that is beneath it, in one line.
pub fn with_sources(error: &dyn std::error::Error) -> String {
    let mut words = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        words.push_str(": ");
        words.push_str(&error.to_string());
        source = error.source();
    }
    words
}
