//! Counters of the pod's network interfaces.

use std::fs;

use super::resolver;

pub mod pod;

/// Interface counters of the cell's network namespace.
const NET_DEV: &str = "/proc/self/net/dev";
/// IPv4 routes of the cell's network namespace.
pub(crate) const ROUTES: &str = "/proc/self/net/route";
/// Name of a pod's device, by convention of the kubelet and CNI.
pub(crate) const POD_DEVICE: &str = "eth0";
/// Upper bound on reported interfaces.
const MAX_INTERFACES: usize = 64;

/// Counters of an interface in one direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Counters {
    /// Number of bytes.
    pub bytes: u64,
    /// Number of packets.
    pub packets: u64,
    /// Number of errors.
    pub errors: u64,
    /// Number of dropped packets.
    pub dropped: u64,
}

/// A network interface of the pod with its counters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Interface {
    /// Name of the interface.
    pub name: String,
    /// Received traffic.
    pub received: Counters,
    /// Sent traffic.
    pub sent: Counters,
}

/// Returns the pod's interfaces, the default interface first; empty if they can't be read.
pub fn interfaces() -> Vec<Interface> {
    // Reading files of procfs doesn't block.
    let routes = fs::read_to_string(ROUTES).unwrap_or_default();
    let default = default_device(&routes).unwrap_or(POD_DEVICE);
    fs::read_to_string(NET_DEV).map(|table| parse_net_dev(&table, default)).unwrap_or_default()
}

/// Returns the device of the default route. On a machine of the cell's own, the distribution names
/// the device, for example `ens5`.
pub(crate) fn default_device(routes: &str) -> Option<&str> {
    let mut rows = routes.lines().map(str::split_whitespace);
    rows.find_map(|mut row| {
        let (device, destination) = (row.next()?, row.next()?);
        // The mask, five columns further, distinguishes 0.0.0.0/0 from 0.0.0.0/8.
        let mask = row.nth(5)?;
        (destination == "00000000" && mask == "00000000").then_some(device)
    })
}

/// Parses `/proc/net/dev`, without the loopback and the link to the agent's DNS listeners.
fn parse_net_dev(table: &str, default: &str) -> Vec<Interface> {
    let of_pod =
        |interface: &Interface| interface.name != "lo" && interface.name != resolver::DEVICE;
    let mut interfaces: Vec<_> =
        table.lines().filter_map(interface).filter(of_pod).take(MAX_INTERFACES).collect();
    if let Some(default) = interfaces.iter().position(|interface| interface.name == default) {
        interfaces[..=default].rotate_right(1);
    }
    interfaces
}

/// Parses a line: the name, then eight counters of received traffic (bytes, packets, errors, drops
/// and four more), then eight of sent traffic.
fn interface(line: &str) -> Option<Interface> {
    let (name, counters) = line.split_once(':')?;
    let counters: Vec<u64> =
        counters.split_whitespace().map_while(|counter| counter.parse().ok()).collect();
    let counters_from = |first: usize| match *counters.get(first..first + 4)? {
        [bytes, packets, errors, dropped] => Some(Counters { bytes, packets, errors, dropped }),
        _ => None,
    };
    Some(Interface {
        name: name.trim().to_owned(),
        received: counters_from(0)?,
        sent: counters_from(8)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = r"Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo:     100       2    0    0    0     0          0         0      100       2    0    0    0     0       0          0
 net1:       7       1    0    0    0     0          0         0        8       1    0    0    0     0       0          0
kiyot-dns:   7       1    0    0    0     0          0         0        8       1    0    0    0     0       0          0
 net2:       9       1    0    0    0     0          0         0        9       1    0    0    0     0       0          0
  eth0:    1234      12    3    4    0     0          0         0     5678      34    5    6    0     0       0          0
";

    #[test]
    fn default_interface_comes_first() {
        let interfaces = parse_net_dev(TABLE, "eth0");
        assert_eq!(
            interfaces.iter().map(|interface| interface.name.as_str()).collect::<Vec<_>>(),
            ["eth0", "net1", "net2"]
        );
        let eth0 = &interfaces[0];
        assert_eq!(eth0.received, Counters { bytes: 1234, packets: 12, errors: 3, dropped: 4 });
        assert_eq!(eth0.sent, Counters { bytes: 5678, packets: 34, errors: 5, dropped: 6 });
        assert_eq!(parse_net_dev("", "eth0"), []);
    }

    #[test]
    fn default_device_is_of_the_default_route() {
        let head = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\n";
        let link = "ens5\t0000000A\t00000000\t0001\t0\t0\t0\t00F0FFFF\t0\t0\t0\n";
        let default = "ens5\t00000000\t0100000A\t0003\t0\t0\t100\t00000000\t0\t0\t0\n";
        assert_eq!(default_device(&format!("{head}{link}{default}")), Some("ens5"));
        assert_eq!(default_device(&format!("{head}{link}")), None);
    }

    proptest::proptest! {
        #[test]
        fn arbitrary_table_is_parsed_without_panic(table in "([a-z0-9: -]{0,20}\n?){0,8}") {
            let _ = parse_net_dev(&table, "eth0");
            let _ = default_device(&table);
        }
    }
}
