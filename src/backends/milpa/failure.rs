//! Failures of parts that know nothing of the kubelet's protocol.

use tonic::{Code, Status};

/// Failure of a call to a part: its class, the side at fault, and a message for a pod's events.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    class: Class,
    side: Side,
    message: String,
}

/// Side at fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The request, which no side can fulfil.
    Request,
    /// The node: this daemon, its file systems or its containerd.
    Node,
    /// The cell, its agent or its containerd.
    Cell,
}

/// Class of a failure. The containerds of node and cell have gRPC's, so that each has its own here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "the classes of gRPC")]
pub enum Class {
    Cancelled,
    Unknown,
    InvalidArgument,
    DeadlineExceeded,
    NotFound,
    AlreadyExists,
    PermissionDenied,
    ResourceExhausted,
    FailedPrecondition,
    Aborted,
    OutOfRange,
    Unimplemented,
    Internal,
    Unavailable,
    DataLoss,
    Unauthenticated,
}

/// Advice to a caller of a failed call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Retry {
    /// The same call may succeed later.
    Later,
    /// The call may succeed after a change of the request or of the system.
    AfterChange,
    /// The call never succeeds.
    Never,
}

impl Failure {
    /// Creates a failure for which the request is at fault.
    pub fn request(class: Class, message: impl Into<String>) -> Self {
        Self { class, side: Side::Request, message: message.into() }
    }

    /// Creates a failure of the node.
    pub fn node(class: Class, message: impl Into<String>) -> Self {
        Self { class, side: Side::Node, message: message.into() }
    }

    /// Creates a failure of the cell.
    pub fn cell(class: Class, message: impl Into<String>) -> Self {
        Self { class, side: Side::Cell, message: message.into() }
    }

    /// Returns the failure of a call to the node's containerd.
    pub fn of_node(status: Status) -> Self {
        Self::node(Class::from(status.code()), status.message())
    }

    /// Returns the failure of a call to a cell.
    pub fn of_cell(status: Status) -> Self {
        Self::cell(Class::from(status.code()), status.message())
    }

    /// Replaces the message.
    pub fn with_message(self, message: impl Into<String>) -> Self {
        Self { message: message.into(), ..self }
    }

    /// Returns the class.
    pub fn class(&self) -> Class {
        self.class
    }

    /// Returns the side at fault.
    pub fn side(&self) -> Side {
        self.side
    }

    /// Returns the message: what failed, the value, and what is allowed.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// Returns the advice to the caller.
    pub fn retry(&self) -> Retry {
        match self.class {
            Class::Cancelled
            | Class::Unknown
            | Class::DeadlineExceeded
            | Class::ResourceExhausted
            | Class::Aborted
            | Class::Internal
            | Class::Unavailable => Retry::Later,
            Class::NotFound
            | Class::AlreadyExists
            | Class::PermissionDenied
            | Class::FailedPrecondition
            | Class::DataLoss
            | Class::Unauthenticated => Retry::AfterChange,
            Class::InvalidArgument | Class::OutOfRange | Class::Unimplemented => Retry::Never,
        }
    }
}

impl From<Code> for Class {
    fn from(code: Code) -> Self {
        match code {
            Code::Cancelled => Self::Cancelled,
            Code::InvalidArgument => Self::InvalidArgument,
            Code::DeadlineExceeded => Self::DeadlineExceeded,
            Code::NotFound => Self::NotFound,
            Code::AlreadyExists => Self::AlreadyExists,
            Code::PermissionDenied => Self::PermissionDenied,
            Code::ResourceExhausted => Self::ResourceExhausted,
            Code::FailedPrecondition => Self::FailedPrecondition,
            Code::Aborted => Self::Aborted,
            Code::OutOfRange => Self::OutOfRange,
            Code::Unimplemented => Self::Unimplemented,
            Code::Internal => Self::Internal,
            Code::Unavailable => Self::Unavailable,
            Code::DataLoss => Self::DataLoss,
            Code::Unauthenticated => Self::Unauthenticated,
            // A failed call with the code of success is as unknown to its caller.
            Code::Unknown | Code::Ok => Self::Unknown,
        }
    }
}
