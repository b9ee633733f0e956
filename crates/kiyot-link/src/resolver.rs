//! Addresses and limits of the DNS forwarder between a cell and the node.
//!
//! Only the node can reach some name servers. The agent listens in the cell, on link-local
//! addresses, for the pod's queries to these servers, and the daemon asks them. Both sides have the
//! same limits.

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
/// The time limit of a query over UDP, from the pod and back, and of establishing a TCP connection.
pub const QUERY_TIMEOUT: Duration = Duration::from_secs(5);
/// The most unanswered queries over UDP of a cell.
pub const MAX_UDP_QUERIES: usize = 128;
/// The most TCP connections of a cell's pod.
pub const MAX_TCP_CONNECTIONS: usize = 32;
/// The longest time for which a TCP connection may carry nothing in either direction: the idle
/// timeout of most name servers.
pub const TCP_IDLE_TIMEOUT: Duration = Duration::from_secs(30);

/// Returns the cell's address for the name server with this index. Link-local addresses are in no
/// pod network, and these are not the addresses that node-local DNS uses elsewhere.
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
