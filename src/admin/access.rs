//! Rights of a caller, by the user of its process (`SO_PEERCRED`).

use tonic::Status;

/// The user id of root.
const ROOT: u32 = 0;

/// The rights of a caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Access {
    /// Everything: root, and the daemon's own user.
    Full,
    /// Methods that read, of this user: the mode of the socket has let its group in.
    ReadOnly(u32),
}

impl Access {
    /// Returns the rights of a user.
    pub(super) fn of(uid: u32) -> Self {
        if uid == ROOT || uid == rustix::process::geteuid().as_raw() {
            Self::Full
        } else {
            Self::ReadOnly(uid)
        }
    }

    /// Returns PERMISSION_DENIED if the caller may only read.
    pub(super) fn check(self, method: &str) -> Result<(), Status> {
        match self {
            Self::Full => Ok(()),
            Self::ReadOnly(uid) => Err(Status::permission_denied(format!(
                "{method} is for root; user {uid} may read only"
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
