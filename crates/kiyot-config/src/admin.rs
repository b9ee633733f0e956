//! `[admin]`: socket of the admin API.

use std::path::{Path, PathBuf};

use kiyot_values::problems::Table;

use super::{Server, read};

/// File name of the socket, in the directory of the CRI socket.
const FILE: &str = "admin.sock";
/// Extension that the link's path gets for the path of the socket's directory.
const DIRECTORY_EXTENSION: &str = "d";
/// File name of the socket in its directory.
const SOCKET: &str = "socket";
/// Longest name of a group (`LOGIN_NAME_MAX` of Linux is 256 with the NUL).
const MAX_GROUP_BYTES: usize = 255;

/// Socket of the admin API, which milpactl calls.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Admin {
    /// Path that leads to the unix socket. By default beside the CRI socket; empty only until
    /// [`super::load`] sets it.
    pub listen: PathBuf,
    /// Group whose members may read; `None` for none.
    pub group: Option<String>,
}

impl Admin {
    pub(super) fn read(mut table: Table<'_>) -> Self {
        let mut admin = Self::default();
        table.set("listen", &mut admin.listen, read::socket);
        table.set("group", &mut admin.group, |field| {
            let allowed = format!("the name of a group, of at most {MAX_GROUP_BYTES} bytes");
            field.read(&allowed, |text| is_group_name(text).then(|| Some(text.to_owned())))
        });
        table.finish();
        admin
    }

    /// Returns the path of the socket. It has its own directory, because the group has no access to
    /// that of the CRI socket.
    pub fn socket(&self) -> PathBuf {
        self.listen.with_added_extension(DIRECTORY_EXTENSION).join(SOCKET)
    }

    /// Sets the default of `listen`.
    pub(super) fn complete(&mut self, server: &Server) {
        if self.listen.as_os_str().is_empty() {
            self.listen = server.listen.parent().unwrap_or_else(|| Path::new("/")).join(FILE);
        }
    }
}

fn is_group_name(text: &str) -> bool {
    let is_plain = |character: char| character.is_ascii_graphic() && !":,/".contains(character);
    !text.is_empty() && text.len() <= MAX_GROUP_BYTES && text.chars().all(is_plain)
}
