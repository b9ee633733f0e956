//! Errors and exit codes by kind of failure.

use std::{cmp::Ordering, io};

use kiyot_proto::{ADMIN_REVISION, admin};
use tonic::{Code, Status};

use crate::spdy::UpgradeError;

/// Wrong arguments (`EX_USAGE` of sysexits.h).
pub(crate) const USAGE: u8 = 64;
/// An unknown or ambiguous name (`EX_NOINPUT`).
const NO_SUCH_NAME: u8 = 66;
/// The daemon can't be reached (`EX_UNAVAILABLE`).
const UNAVAILABLE: u8 = 69;
/// The daemon is of another version (`EX_PROTOCOL`).
const OTHER_VERSION: u8 = 76;
/// The caller has no rights (`EX_NOPERM`).
const NOT_PERMITTED: u8 = 77;
/// Everything else.
pub(crate) const FAILURE: u8 = 1;

/// The version of this program.
pub(crate) const OWN: &str = env!("CARGO_PKG_VERSION");

/// The failure of a command.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The arguments are wrong in a way that clap doesn't see.
    #[error("{0}")]
    Usage(String),
    /// No object has the name.
    #[error("{0}")]
    Name(String),
    /// Several objects have the name.
    #[error("{0}")]
    NotUnique(String),
    /// The socket does not answer.
    #[error(
        "no daemon answers at {socket}: {cause}; is kiyot running, and is --socket its \
         admin.listen?"
    )]
    Unreachable {
        /// The path of the socket.
        socket: String,
        /// The cause.
        cause: String,
    },
    /// The socket can't be opened by this user.
    #[error(
        "no permission to open {socket}; allowed: root, and members of the group of admin.group"
    )]
    Closed {
        /// The path of the socket.
        socket: String,
    },
    /// The daemon does not have the method.
    #[error("the daemon ({daemon}) does not have the method that milpactl {OWN} calls: {advice}")]
    OtherVersion {
        /// The version of the daemon.
        daemon: String,
        /// Advice for the user.
        advice: &'static str,
    },
    /// The daemon refused or failed.
    #[error("{}", .0.message())]
    Daemon(Status),
    /// The daemon did not answer in time.
    #[error("the daemon did not answer within {0} s")]
    TooSlow(u64),
    /// The command did not do what it should.
    #[error("{0}")]
    Failed(String),
    /// The streams of a pod were not opened.
    #[error("{0}")]
    Streams(#[from] UpgradeError),
    /// The streams of a pod have ended, and the daemon can't be asked for the reason.
    #[error("connection to {pod} lost: {cause}")]
    Lost {
        /// The pod, as namespace/name.
        pod: String,
        /// The failure of the daemon.
        cause: Box<Error>,
    },
    /// Standard output, or a file, can't be written.
    #[error("output: {0}")]
    Output(#[from] io::Error),
}

impl Error {
    /// Returns the error for a method that the daemon lacks. The version is `None` if the daemon
    /// lacks the method for its version too.
    pub(crate) fn without_method(daemon: Option<&admin::VersionResponse>) -> Self {
        let advice = daemon.and_then(|daemon| advice(daemon.revision));
        let daemon = match daemon {
            Some(daemon) => format!("version {}", daemon.version),
            None => "of an unknown version".to_owned(),
        };
        Self::OtherVersion { daemon, advice: advice.unwrap_or("use the milpactl of its version") }
    }

    /// Returns the exit code.
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Self::Usage(_) => USAGE,
            Self::Name(_) | Self::NotUnique(_) => NO_SUCH_NAME,
            Self::Unreachable { .. } => UNAVAILABLE,
            Self::OtherVersion { .. } => OTHER_VERSION,
            Self::Closed { .. } => NOT_PERMITTED,
            Self::Daemon(status) => match status.code() {
                Code::NotFound => NO_SUCH_NAME,
                Code::InvalidArgument => USAGE,
                Code::PermissionDenied => NOT_PERMITTED,
                Code::Unavailable => UNAVAILABLE,
                Code::Unimplemented => OTHER_VERSION,
                _ => FAILURE,
            },
            Self::TooSlow(_) => UNAVAILABLE,
            Self::Streams(UpgradeError::Io(_) | UpgradeError::TimedOut(_)) => UNAVAILABLE,
            Self::Lost { cause, .. } => cause.exit_code(),
            Self::Streams(_) | Self::Failed(_) | Self::Output(_) => FAILURE,
        }
    }

    /// Returns the message, without the control characters that a daemon could have sent.
    pub(crate) fn text(&self) -> String {
        let is_shown = |character: &char| !character.is_control() || *character == '\n';
        self.to_string().chars().filter(is_shown).collect()
    }
}

/// Returns the advice for a daemon by the revision of its API; `None` for this program's revision.
pub(crate) fn advice(revision: u32) -> Option<&'static str> {
    match revision.cmp(&ADMIN_REVISION) {
        Ordering::Less => Some("it is older, upgrade the daemon"),
        Ordering::Greater => Some("it is newer, upgrade milpactl"),
        Ordering::Equal => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_code_depends_on_the_kind_of_failure() {
        let of = |code: Code| Error::Daemon(Status::new(code, "")).exit_code();
        assert_eq!(of(Code::NotFound), 66);
        assert_eq!(of(Code::PermissionDenied), 77);
        assert_eq!(of(Code::Unavailable), 69);
        assert_eq!(of(Code::Unimplemented), 76);
        assert_eq!(of(Code::Internal), 1);
        assert_eq!(Error::Usage(String::new()).exit_code(), 64);
    }

    #[test]
    fn message_of_a_daemon_can_not_write_to_the_terminal() {
        let status = Status::internal("\u{1b}[2Jgone\u{7}");
        assert_eq!(Error::Daemon(status).text(), "[2Jgone");
    }
}
