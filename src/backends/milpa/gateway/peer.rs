//! The identity of a peer before authentication, from the kernel, for limits per peer.
//!
//! Root in a netns cell can create further network namespaces and so appear as several peers: such
//! a cell isolates no better than a container.

use std::{
    fs,
    net::{IpAddr, Ipv6Addr},
    path::{Path, PathBuf},
};

use tokio::net::UnixStream;

/// The peer of a connection.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum Peer {
    /// An IP address, over TCP. An IPv6 address has only its leading bits, because a machine has
    /// all addresses of its network.
    Address(IpAddr),
    /// A network namespace other than the daemon's, in the form of the link `/proc/<pid>/ns/net`:
    /// all processes of a cell are the same peer.
    Network(PathBuf),
    /// A process in the daemon's network namespace, by PID.
    Process(i32),
    /// A process that has ended, or that the daemon's PID namespace does not contain.
    Unknown,
}

impl Peer {
    /// Returns the peer of a unix socket connection, by `SO_PEERCRED`.
    pub(super) fn of(stream: &UnixStream) -> Self {
        Self::of_process(Path::new("/proc"), stream.peer_cred().ok().and_then(|cred| cred.pid()))
    }

    /// Returns the peer of a TCP connection. IPv6 peers differ in the first `ipv6_peer_bits` bits.
    pub(super) fn at(address: IpAddr, ipv6_peer_bits: u8) -> Self {
        Self::Address(match address.to_canonical() {
            IpAddr::V6(address) => {
                let shift = 128_u32.saturating_sub(ipv6_peer_bits.into());
                let mask = u128::MAX.checked_shl(shift).unwrap_or(0);
                Ipv6Addr::from_bits(address.to_bits() & mask).into()
            }
            v4 => v4,
        })
    }

    /// Returns the peer of a process. The PID is 0 for a process outside of the daemon's PID
    /// namespace.
    fn of_process(proc: &Path, pid: Option<i32>) -> Self {
        let network = |process: &str| fs::read_link(proc.join(process).join("ns/net")).ok();
        let Some((pid, of_peer)) =
            pid.filter(|pid| *pid > 0).and_then(|pid| Some((pid, network(&pid.to_string())?)))
        else {
            return Self::Unknown;
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
    fn processes_of_a_cell_share_a_peer_and_processes_of_the_node_do_not() {
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
        // A process that has ended, and processes of other PID namespaces.
        assert_eq!(
            (of(9), of(0), Peer::of_process(proc.path(), None)),
            (Peer::Unknown, Peer::Unknown, Peer::Unknown)
        );
    }

    /// Verifies L21.
    #[test]
    fn addresses_of_an_ipv6_network_share_a_peer_and_ipv4_addresses_do_not() {
        let at = |address: &str, bits| Peer::at(address.parse().unwrap(), bits);
        assert_eq!(at("2001:db8::1", 64), at("2001:db8::ffff:2", 64));
        assert_ne!(at("2001:db8::1", 64), at("2001:db8:0:1::1", 64));
        assert_ne!(at("2001:db8::1", 128), at("2001:db8::2", 128));
        assert_eq!(at("2001:db8::1", 0), at("fd00::1", 0));
        assert_ne!(at("192.0.2.1", 64), at("192.0.2.2", 64));
        // A socket for both families reports an IPv4 address in this form.
        assert_eq!(at("::ffff:192.0.2.1", 64), at("192.0.2.1", 64));
    }

    #[tokio::test]
    async fn peer_of_a_socket_pair_is_this_process() {
        let (stream, _far) = UnixStream::pair().unwrap();
        assert_eq!(Peer::of(&stream), Peer::Process(i32::try_from(std::process::id()).unwrap()));
    }
}
