//! Isolation of a pod from the node.

use std::fmt;

/// Least isolation of a cell from the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Isolation {
    /// `machine`: a kernel of its own.
    Machine,
    /// `instance`: another machine than the node.
    Instance,
}

impl fmt::Display for Isolation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Machine => "machine",
            Self::Instance => "instance",
        })
    }
}
