//! Rights of a caller, by the user of its process (`SO_PEERCRED`).

use kiyot_proto::admin::{Cell, Pod};
use tonic::Status;

/// The user id of root.
const ROOT: u32 = 0;
/// The user id of nobody.
const NOBODY: u32 = 65_534;

/// The rights of a caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Access {
    /// Everything: root, and the daemon's own user.
    Full,
    /// Methods that read, for the user of this id: the mode of the socket admits its group.
    ReadOnly(u32),
}

impl Access {
    /// Returns the least rights, those of the user `nobody`.
    pub(super) fn without_rights() -> Self {
        Self::ReadOnly(NOBODY)
    }

    /// Returns the rights of a user.
    pub(super) fn of(uid: u32) -> Self {
        if uid == ROOT || uid == rustix::process::geteuid().as_raw() {
            Self::Full
        } else {
            Self::ReadOnly(uid)
        }
    }

    /// Fails with PERMISSION_DENIED if the caller may only read.
    pub(super) fn check(self, method: &str) -> Result<(), Status> {
        match self {
            Self::Full => Ok(()),
            Self::ReadOnly(uid) => Err(Status::permission_denied(format!(
                "{method} is for root; user {uid} may read only"
            ))),
        }
    }

    /// Returns a pod as the caller may see it. Only root sees commands and arguments, in which a
    /// secret may have replaced `$(NAME)`.
    pub(super) fn shown_pod(self, mut pod: Pod) -> Pod {
        if self != Self::Full {
            for unit in &mut pod.units {
                (unit.command, unit.args) = (Vec::new(), Vec::new());
            }
        }
        pod
    }

    /// Returns a cell as the caller may see it. Only root reads its console, which is a log.
    pub(super) fn shown_cell(self, mut cell: Cell) -> Cell {
        if self != Self::Full {
            cell.console = String::new();
        }
        cell
    }
}

#[cfg(test)]
mod tests {
    use kiyot_proto::admin::Unit;

    use super::*;

    #[test]
    fn reader_sees_neither_arguments_nor_consoles() {
        let unit = Unit {
            name: "main".to_owned(),
            command: vec!["sh".to_owned()],
            args: vec!["--password=sesame".to_owned()],
            ..Default::default()
        };
        let pod = Pod { units: vec![unit], ..Default::default() };
        let cell =
            Cell { id: "cell-a".to_owned(), console: "sesame".to_owned(), ..Default::default() };
        let reader = Access::ReadOnly(1000);
        let seen = (reader.shown_pod(pod.clone()), reader.shown_cell(cell.clone()));
        assert!(!format!("{seen:?}").contains("sesame"), "{seen:?}");
        assert_eq!((seen.0.units[0].name.as_str(), seen.1.id.as_str()), ("main", "cell-a"));
        assert_eq!(Access::Full.shown_pod(pod.clone()), pod);
        assert_eq!(Access::Full.shown_cell(cell.clone()), cell);
    }

    #[test]
    fn only_root_and_the_own_user_have_full_access() {
        let own = rustix::process::geteuid().as_raw();
        assert_eq!((Access::of(0), Access::of(own)), (Access::Full, Access::Full));
        let other = own + 1000;
        let refused = Access::of(other).check("EndCell").unwrap_err();
        assert_eq!(refused.code(), tonic::Code::PermissionDenied);
        assert!(refused.message().contains(&format!("user {other}")), "{}", refused.message());
    }
}
