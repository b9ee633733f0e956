//! An operator's programs beside a measurement.

use std::{
    os::unix::process::CommandExt,
    path::Path,
    process::{Child, Command, Stdio},
};

use kiyot_testkit::{Kiyot, command::PATH};
use rustix::process::{Pid, Signal, kill_process_group};

/// Programs that run until this is dropped, each with its children.
#[derive(Debug)]
pub(crate) struct Beside(Vec<Child>);

impl Beside {
    /// Starts shell scripts. In them `milpactl` is the program of this build, with the daemon's
    /// socket.
    pub(crate) fn start(scripts: &[&str], kiyot: &Kiyot<'_>, program: &Path) -> Self {
        let milpactl = program.with_file_name("milpactl");
        assert!(milpactl.exists(), "{} is missing", milpactl.display());
        let admin = kiyot.socket().with_file_name("admin.sock");
        let path = format!("{}:{}", milpactl.parent().unwrap().display(), PATH);
        let start = |script: &&str| {
            Command::new("sh")
                .args(["-c", script])
                .env("PATH", &path)
                .env("MILPACTL_SOCKET", &admin)
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .process_group(0)
                .spawn()
                .expect("a shell starts")
        };
        Self(scripts.iter().map(start).collect())
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ended = kill_process_group(Pid::from_child(child), Signal::KILL);
            let _ = child.wait();
        }
    }
}
