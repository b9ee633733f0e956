//! Proxies for the pulls of a machine of the cell's own: variables of its containerd's environment.
//!
//! containerd reads the variables once, so it is restarted when they change. No container runs yet.

use std::{
    collections::HashMap,
    fmt::Write as _,
    fs, io,
    os::unix::net::UnixStream,
    path::Path,
    sync::{Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use kiyot_link::{
    bind_limits::{MAX_PROXY_BYTES, PROXY_VARIABLES, is_proxy_value},
    private_file,
};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    net::sockopt::socket_peercred,
    process::{PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};
use tonic::Status;

use crate::init::{containerd, services::CONTAINERD_ENVIRONMENT};

/// Longest wait for a containerd that is starting.
const START_TIMEOUT: Duration = Duration::from_secs(20);
/// Delay between connection attempts.
const CONNECT_RETRY_DELAY: Duration = Duration::from_millis(20);
/// Longest wait for the end of containerd.
const END_TIMEOUT: Duration = Duration::from_secs(5);

/// Replaces the proxies, and ends containerd if they have changed: init starts it again. Blocking.
pub fn replace(owns_machine: bool, proxies: &HashMap<String, String>) -> Result<(), Status> {
    if proxies.is_empty() {
        return Ok(());
    }
    if !owns_machine {
        return Err(Status::failed_precondition(
            "proxies: can't be set, the cell uses those of its node",
        ));
    }
    let content = render(proxies)?;
    let failed = |error: io::Error| Status::internal(format!("cannot set the proxies: {error}"));
    let end = || end_containerd(Path::new(containerd::SOCKET));
    change(Path::new(CONTAINERD_ENVIRONMENT), &content, end).map_err(failed)
}

/// Writes the file and ends containerd, unless the file has this content. A repeated call waits for
/// a running call, whose caller may have been cancelled.
fn change(path: &Path, content: &str, end: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
    static CHANGES: Mutex<()> = Mutex::new(());
    let _alone = CHANGES.lock().unwrap_or_else(PoisonError::into_inner);
    if !write(path, content)? {
        return Ok(());
    }
    end().inspect_err(|_| {
        // Otherwise the next call would skip the restart.
        let _ = fs::remove_file(path);
    })
}

/// Returns the lines of the variables, in order.
fn render(proxies: &HashMap<String, String>) -> Result<String, Status> {
    let mut names: Vec<_> = proxies.keys().collect();
    names.sort();
    let mut lines = String::new();
    for name in names {
        if !PROXY_VARIABLES.contains(&name.as_str()) {
            return Err(Status::invalid_argument(format!(
                "variable of a proxy {name:?}: unknown; allowed: {}",
                PROXY_VARIABLES.join(", ")
            )));
        }
        let value = &proxies[name];
        if !is_proxy_value(value) {
            return Err(Status::invalid_argument(format!(
                "variable of a proxy {name}: invalid value of {} bytes; allowed: at most \
                 {MAX_PROXY_BYTES}, without control characters",
                value.len()
            )));
        }
        // Writing to a string does not fail.
        let _ = writeln!(lines, "{name}={value}");
    }
    Ok(lines)
}

/// Writes the file. Returns whether its content has changed.
fn write(path: &Path, content: &str) -> io::Result<bool> {
    if fs::read(path).is_ok_and(|written| written == content.as_bytes()) {
        return Ok(false);
    }
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    private_file::write(path, content.as_bytes())?;
    Ok(true)
}

/// Ends the process that listens on a socket, and waits for its end. Waits for a starting process
/// too, because it has already read its environment.
fn end_containerd(socket: &Path) -> io::Result<()> {
    let deadline = Instant::now() + START_TIMEOUT;
    let stream = loop {
        match UnixStream::connect(socket) {
            Ok(stream) => break stream,
            Err(error) if Instant::now() >= deadline => return Err(error),
            Err(_) => thread::sleep(CONNECT_RETRY_DELAY),
        }
    };
    let peer = socket_peercred(&stream)?.pid;
    let handle = pidfd_open(peer, PidfdFlags::empty())?;
    // No container runs yet, and a starting containerd does not end by SIGTERM.
    pidfd_send_signal(&handle, Signal::KILL)?;
    let timeout = Timespec::try_from(END_TIMEOUT).map_err(io::Error::other)?;
    if poll(&mut [PollFd::new(&handle, PollFlags::IN)], Some(&timeout))? == 0 {
        return Err(io::Error::other("containerd did not end"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::{
        atomic::{AtomicBool, Ordering},
        mpsc,
    };

    use tonic::Code;

    use super::*;

    fn proxies(entries: &[(&str, &str)]) -> HashMap<String, String> {
        entries.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn file_is_written_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("kiyot/environment");
        let two = proxies(&[("NO_PROXY", "10.0.0.0/8,.local"), ("HTTP_PROXY", "http://p:1")]);
        let lines = render(&two).unwrap();
        assert_eq!(lines, "HTTP_PROXY=http://p:1\nNO_PROXY=10.0.0.0/8,.local\n");
        assert!(write(&path, &lines).unwrap() && !write(&path, &lines).unwrap());
        assert!(write(&path, "").unwrap());
    }

    #[test]
    fn containerd_is_ended_again_only_after_a_failure() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("environment");
        let failed = || Err(io::Error::other("containerd did not end"));
        assert!(change(&path, "A=1\n", failed).is_err());
        let mut ended = 0;
        for _ in 0..2 {
            let end = || {
                ended += 1;
                Ok(())
            };
            change(&path, "A=1\n", end).unwrap();
        }
        assert_eq!(ended, 1);
    }

    #[test]
    fn repeated_change_waits_for_the_running_change() {
        /// Time within which a call that does not wait returns.
        const NO_WAIT: Duration = Duration::from_millis(200);
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("environment");
        let (begun, running) = mpsc::channel();
        let (returned, second) = mpsc::channel();
        let has_ended = AtomicBool::new(false);
        let (path, has_ended) = (&path, &has_ended);
        thread::scope(|scope| {
            scope.spawn(move || {
                let end = || {
                    begun.send(()).unwrap();
                    let returned = second.recv_timeout(NO_WAIT).is_ok();
                    has_ended.store(!returned, Ordering::SeqCst);
                    Ok(())
                };
                change(path, "A=1\n", end).unwrap();
            });
            running.recv().unwrap();
            change(path, "A=1\n", || Ok(())).unwrap();
            // The receiver is dropped once the first call has returned.
            let _ = returned.send(());
            assert!(has_ended.load(Ordering::SeqCst), "containerd ends before the call returns");
        });
    }

    #[test]
    fn other_variables_and_lines_are_refused_without_their_value() {
        for (name, value) in [
            ("PATH", "secret"),
            ("HTTP_PROXY", "secret\nPATH=/x"),
            ("HTTP_PROXY", &"secret".repeat(MAX_PROXY_BYTES)),
        ] {
            let status = replace(true, &proxies(&[(name, value)])).unwrap_err();
            assert_eq!(status.code(), Code::InvalidArgument);
            assert!(status.message().contains(name) && !status.message().contains("secret"));
        }
        let status = replace(false, &proxies(&[("HTTP_PROXY", "p")])).unwrap_err();
        assert_eq!(status.code(), Code::FailedPrecondition);
        assert!(replace(false, &HashMap::new()).is_ok());
    }
}
