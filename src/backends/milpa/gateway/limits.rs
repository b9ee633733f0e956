//! Limits of the gateway's connections.

use std::{ops::RangeInclusive, time::Duration};

use super::ca;

/// The limits of a gateway. Links limit admitted connections: each cell with a link has at most
/// two.
#[derive(Debug, Clone)]
pub struct Limits {
    /// The most connections that are not admitted yet or are enrolling, on the socket and over TCP
    /// separately.
    pub unauthenticated: usize,
    /// The most of these connections per peer. A peer is an IPv4 address or an IPv6 network over
    /// TCP; on the socket, a cell's network namespace, or a process in the daemon's.
    pub unauthenticated_per_peer: usize,
    /// The number of leading bits by which the IPv6 addresses of peers differ.
    pub ipv6_peer_bits: u8,
    /// The time for which a connection still counts as unauthenticated after it has ended or was
    /// admitted. Bounds a peer's handshakes per second.
    pub cooldown: Duration,
    /// The timeout of the TLS handshake, and of the agent's reply to Hello.
    pub handshake: Duration,
    /// The timeout of a connection for enrolment.
    pub enrolment: Duration,
    /// The idle timeout of a bulk connection: the initial value, and the maximum for periodic
    /// calls.
    pub bulk_idle: RangeInclusive<Duration>,
    /// The lifetime of a cell's certificate.
    pub certificate: Duration,
    /// The bytes of its cell's disk that a pod may use, sent to agents; 0: no limit.
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
            // Longer than the time for which an agent that has just dialled ignores requests for a
            // connection (`FRESH` of kiyot-cell).
            bulk_idle: Duration::from_secs(6)..=Duration::from_secs(60),
            certificate: ca::CELL_CERTIFICATE_LIFETIME,
            ephemeral_storage: 0,
        }
    }
}
