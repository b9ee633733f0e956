//! Name servers that only the node has, as a cell's pod knows them: where they are in the cell, and
//! how much of them there is.

use std::{net::Ipv4Addr, time::Duration};

/// The most of them in a pod's configuration. The C libraries look at three.
pub const MOST: usize = 8;
/// The length of the network's prefix that they are in.
pub const PREFIX: u8 = 28;
/// The cell's own address in that network.
pub const CELL: Ipv4Addr = Ipv4Addr::new(169, 254, 253, 62);
/// The largest message by UDP, in bytes: what EDNS asks for, as a rule.
pub const UDP_MESSAGE: usize = 4096;
/// The shortest message: the head of DNS, in bytes.
pub const HEAD: usize = 12;
/// How long a query by UDP may take, from the pod and back, and a connection until it is carried.
pub const DEADLINE: Duration = Duration::from_secs(5);
/// Queries by UDP of one cell that have no answer yet.
pub const UDP_QUERIES: usize = 128;
/// Connections of one cell's pod by TCP.
pub const TCP_CONNECTIONS: usize = 32;
/// How long a connection may carry nothing either way: as long as most name servers have patience.
pub const IDLE: Duration = Duration::from_secs(30);

/// Where in the cell the name server with this number is, from 0. Link-local, so that no pod
/// network has it, and none that is in use for this elsewhere.
pub fn address(number: usize) -> Option<Ipv4Addr> {
    let last = u8::try_from(number).ok().filter(|_| number < MOST)?;
    Some(Ipv4Addr::new(169, 254, 253, 53 + last))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_are_in_one_network_with_the_cell_and_none_is_its_own() {
        let network = |address: Ipv4Addr| u32::from(address) >> (32 - PREFIX);
        for number in 0..MOST {
            let address = address(number).unwrap();
            assert!(
                address != CELL
                    && network(address) == network(CELL)
                    && u32::from(address) % 16 != 15,
                "{address}"
            );
        }
        assert_eq!(address(MOST), None);
    }
}
