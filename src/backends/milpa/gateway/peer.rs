//! Who dials, as far as the kernel knows it before anything was said: enough to bound what one of
//! them may hold. (Root of a cell of namespaces can make network namespaces of its own, and so be
//! several: such a cell isolates no better than a container does.)

use std::{
    fs,
    net::IpAddr,
    path::{Path, PathBuf},
};

use tokio::net::UnixStream;

/// Whose a connection is.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum Peer {
    /// An address, of TCP.
    Address(IpAddr),
    /// A network namespace that is not the daemon's: a cell's, whichever of its processes dials. As
    /// `/proc/<pid>/ns/net` has it.
    Network(PathBuf),
    /// A process in the daemon's network namespace, by its number.
    Process(i32),
    /// One that can't be looked at: it has ended, or the daemon does not see its processes.
    Unseen,
}

impl Peer {
    /// Of a connection over a unix socket, by `SO_PEERCRED`.
    pub(super) fn of(stream: &UnixStream) -> Self {
        Self::of_process(Path::new("/proc"), stream.peer_cred().ok().and_then(|cred| cred.pid()))
    }

    /// Of a process. A number that is not seen from this PID namespace is 0.
    fn of_process(proc: &Path, pid: Option<i32>) -> Self {
        let network = |process: &str| fs::read_link(proc.join(process).join("ns/net")).ok();
        let Some((pid, of_peer)) =
            pid.filter(|pid| *pid > 0).and_then(|pid| Some((pid, network(&pid.to_string())?)))
        else {
            return Self::Unseen;
        };
        if network("self") == Some(of_peer.clone()) {
            Self::Process(pid)
        } else {
            Self::Network(of_peer)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// Verifies L14.
    #[test]
    fn processes_of_a_cell_are_one_peer_and_those_of_the_node_are_each_their_own() {
        let proc = tempfile::tempdir().unwrap();
        for (process, network) in [
            ("self", "net:[1]"),
            ("7", "net:[1]"),
            ("8", "net:[1]"),
            ("21", "net:[2]"),
            ("22", "net:[2]"),
            ("31", "net:[3]"),
        ] {
            let directory = proc.path().join(process).join("ns");
            fs::create_dir_all(&directory).unwrap();
            symlink(network, directory.join("net")).unwrap();
        }
        let of = |pid: i32| Peer::of_process(proc.path(), Some(pid));
        assert_eq!((of(7), of(8)), (Peer::Process(7), Peer::Process(8)));
        assert_eq!(
            (of(21), of(22)),
            (Peer::Network("net:[2]".into()), Peer::Network("net:[2]".into()))
        );
        assert_ne!(of(31), of(22));
        // Who has ended since, and who is not seen from here.
        assert_eq!(
            (of(9), of(0), Peer::of_process(proc.path(), None)),
            (Peer::Unseen, Peer::Unseen, Peer::Unseen)
        );
    }

    #[tokio::test]
    async fn the_kernel_knows_who_dials() {
        let (one, _other) = UnixStream::pair().unwrap();
        assert_eq!(Peer::of(&one), Peer::Process(i32::try_from(std::process::id()).unwrap()));
    }
}
