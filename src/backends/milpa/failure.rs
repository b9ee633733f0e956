//! Failures of parts that don't know the kubelet's protocol.

pub use tonic::Code;
use tonic::Status;

/// Failure of a call to a part: its code, the side at fault, and a message for a pod's events.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    code: Code,
    side: Side,
    message: String,
}

/// Side at fault for a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The request, which no side can fulfil.
    Request,
    /// The node: this daemon, its file systems or its containerd.
    Node,
    /// The cell, its agent or its containerd.
    Cell,
}

impl Failure {
    /// Creates a failure for which the request is at fault.
    pub fn request(code: Code, message: impl Into<String>) -> Self {
        Self { code, side: Side::Request, message: message.into() }
    }

    /// Creates a failure of the node.
    pub fn node(code: Code, message: impl Into<String>) -> Self {
        Self { code, side: Side::Node, message: message.into() }
    }

    /// Creates a failure of the cell.
    pub fn cell(code: Code, message: impl Into<String>) -> Self {
        Self { code, side: Side::Cell, message: message.into() }
    }

    /// Returns the failure of a call to the node's containerd.
    pub fn of_node(status: Status) -> Self {
        Self::node(code_of(&status), status.message())
    }

    /// Returns the failure of a call to a cell.
    pub fn of_cell(status: Status) -> Self {
        Self::cell(code_of(&status), status.message())
    }

    /// Replaces the message.
    pub fn with_message(self, message: impl Into<String>) -> Self {
        Self { message: message.into(), ..self }
    }

    /// Returns the code.
    pub fn code(&self) -> Code {
        self.code
    }

    /// Returns the side at fault.
    pub fn side(&self) -> Side {
        self.side
    }

    /// Returns the message: what failed, the value, and what is allowed.
    pub fn message(&self) -> &str {
        &self.message
    }
}

/// Returns the code of a failed call. A failure with the code `Ok` has the code `Unknown`.
fn code_of(status: &Status) -> Code {
    match status.code() {
        Code::Ok => Code::Unknown,
        code => code,
    }
}
