//! Errors of calls.

use std::{fmt, time::Duration};

/// Error code of a dry run if the call would have succeeded.
pub const DRY_RUN_SUCCEEDED: &str = "DryRunOperation";

/// Error codes of calls with accepted credentials but without permission for the action.
const DENIED: [&str; 3] = ["UnauthorizedOperation", "AccessDenied", "AccessDeniedException"];

/// The error of a call.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{operation}: {failure}")]
pub struct CallError {
    /// The name of the call in the API, such as `RunInstances`.
    pub operation: &'static str,
    /// The failure.
    pub failure: Failure,
}

/// The failure of a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Failure {
    /// EC2 refused the call; the call had no effect.
    Refused {
        /// The error code, such as `InsufficientInstanceCapacity`, if the response has one.
        code: Option<String>,
        /// EC2's message.
        message: String,
    },
    /// EC2 failed (HTTP status 5xx). The call may have had its effect.
    Failed {
        /// The error code, if the response has one.
        code: Option<String>,
        /// EC2's message.
        message: String,
    },
    /// The call was not sent: no credentials, or no connection was made.
    NotSent(String),
    /// The call was sent and not answered. It may have its effect, now or later.
    Unanswered(String),
    /// No answer within the time limit. The call may have its effect, now or later.
    TooSlow(Duration),
    /// The answer lacks a field, or has an invalid one.
    Incomplete(&'static str),
}

impl CallError {
    /// Returns the error code of EC2; `None` if EC2 did not answer, or without a code.
    pub fn code(&self) -> Option<&str> {
        match &self.failure {
            Failure::Refused { code, .. } | Failure::Failed { code, .. } => code.as_deref(),
            _ => None,
        }
    }

    /// Returns whether EC2 knows the caller, but the caller's policy does not permit the action.
    pub fn is_denied(&self) -> bool {
        self.code().is_some_and(|code| DENIED.contains(&code))
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused { code, message } | Self::Failed { code, message } => {
                write!(f, "{}: {message}", code.as_deref().unwrap_or_default())
            }
            Self::NotSent(cause) => write!(f, "not sent: {cause}"),
            Self::Unanswered(cause) => write!(f, "not answered: {cause}"),
            Self::TooSlow(limit) => write!(f, "not answered within {} s", limit.as_secs()),
            Self::Incomplete(field) => write!(f, "the answer has no valid {field}"),
        }
    }
}
