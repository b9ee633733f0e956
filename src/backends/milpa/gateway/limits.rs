//! Limits of the gateway's connections.

use std::{ops::RangeInclusive, time::Duration};

use super::ca;

/// The limits of a gateway. Admitted connections are limited by the cells that have a link: two per
/// cell.
#[derive(Debug, Clone)]
pub struct Limits {
    /// The most connections that are not admitted yet, or enrol: on the socket, and over TCP.
    pub unauthenticated: usize,
    /// The most such connections per peer: an IPv4 address or an IPv6 network; on the socket, a
    /// network namespace other than the daemon's (a cell's), or a process in the daemon's.
    pub unauthenticated_per_peer: usize,
    /// The first bits of an IPv6 address by which peers differ.
    pub ipv6_peer_bits: u8,
    /// The time for which such a connection still counts after it has ended or was admitted. Bounds
    /// a peer's handshakes per second.
    pub cooldown: Duration,
    /// The timeout of the TLS handshake, and of the agent's reply to Hello.
    pub handshake: Duration,
    /// The timeout of a connection for enrolment.
    pub enrolment: Duration,
    /// The idle timeout of a bulk connection: at first, and at most for periodic calls.
    pub bulk_idle: RangeInclusive<Duration>,
    /// The lifetime of a cell's certificate.
    pub certificate: Duration,
    /// The bytes that a pod may use of its cell's disk, sent to agents; 0: no limit.
    pub ephemeral_storage: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            unauthenticated: 512,
            unauthenticated_per_peer: 16,
            ipv6_peer_bits: 64,
            cooldown: Duration::from_millis(100),
            handshake: Duration::from_secs(5),
            enrolment: Duration::from_secs(30),
            // Longer than the time for which an agent ignores requests for a connection that it has
            // just dialled (`FRESH` of kiyot-cell).
            bulk_idle: Duration::from_secs(6)..=Duration::from_secs(60),
            certificate: ca::CELL_CERTIFICATE_LIFETIME,
            ephemeral_storage: 0,
        }
    }
}
