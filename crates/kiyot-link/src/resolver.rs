//! Addresses and limits of the DNS forwarder between a cell and the node.
//!
//! Some name servers can be reached from the node alone. The agent listens for a pod's queries to
//! them on link-local addresses in the cell, and the daemon asks the servers. The limits are the
//! same on both sides.

use std::{net::Ipv4Addr, time::Duration};

/// The most forwarded name servers of a pod. glibc and musl use three.
pub const MAX_SERVERS: usize = 8;
/// The prefix length of the network of the forwarder's addresses.
pub const PREFIX_LEN: u8 = 28;
/// The cell's own address in that network.
pub const CELL_ADDRESS: Ipv4Addr = Ipv4Addr::new(169, 254, 253, 62);
/// The longest message over UDP: the size that EDNS clients usually announce.
pub const MAX_UDP_MESSAGE_BYTES: usize = 4096;
/// The length of the DNS header, which is the shortest message.
pub const DNS_HEADER_BYTES: usize = 12;
/// The time that a query over UDP may take, from the pod and back, and that a TCP connection may
/// take until it is established.
pub const QUERY_TIMEOUT: Duration = Duration::from_secs(5);
/// The most unanswered queries over UDP of a cell.
pub const MAX_UDP_QUERIES: usize = 128;
/// The most TCP connections of a cell's pod.
pub const MAX_TCP_CONNECTIONS: usize = 32;
/// The time that a TCP connection may carry nothing in either direction: the idle timeout of most
/// name servers.
pub const TCP_IDLE_TIMEOUT: Duration = Duration::from_secs(30);

/// Returns the address in the cell of the name server with this index. Link-local, so that it lies
/// in no pod network, and apart from the addresses that are in use for node-local DNS elsewhere.
pub fn address(index: usize) -> Option<Ipv4Addr> {
    let offset = u8::try_from(index).ok().filter(|_| index < MAX_SERVERS)?;
    Some(Ipv4Addr::new(169, 254, 253, 53 + offset))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn server_addresses_are_in_the_cells_network_and_differ_from_its_own() {
        let network = |address: Ipv4Addr| u32::from(address) >> (32 - PREFIX_LEN);
        for index in 0..MAX_SERVERS {
            let address = address(index).unwrap();
            assert!(
                address != CELL_ADDRESS
                    && network(address) == network(CELL_ADDRESS)
                    && u32::from(address) % 16 != 15,
                "{address}"
            );
        }
        assert_eq!(address(MAX_SERVERS), None);
    }
}
