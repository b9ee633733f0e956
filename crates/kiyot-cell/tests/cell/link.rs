//! Routes and neighbours of a device, as the agent of a machine sets them.

use std::{net::IpAddr, num::NonZeroU32, process::Command};

use kiyot_linux::{
    link::{self, Via},
    netlink::route_socket,
};
use rustix::net::netdevice::name_to_index;

/// The device of the test.
const DEVICE: &str = "routed";

fn ip(arguments: &str) -> String {
    let output = Command::new("ip").args(arguments.split(' ')).output().unwrap();
    assert!(output.status.success(), "ip {arguments}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Verifies V8.
#[test]
fn route_has_its_mtu_its_gateway_on_the_link_and_a_permanent_neighbour() {
    for command in [
        "link add routed type veth peer name peer",
        "link set peer up",
        "link set routed up",
        "address add 10.250.0.2/24 dev routed",
        "-6 address add fd00:250::2/64 dev routed nodad",
    ] {
        ip(command);
    }
    let socket = route_socket().unwrap();
    let index = name_to_index(&socket, DEVICE).unwrap();
    let mac = [2, 0, 0x5e, 0, 0x53, 9];
    for (option, gateway, destination) in
        [("-4", "169.254.1.1", ("10.251.0.0", 16)), ("-6", "fd00:252::1", ("fd00:251::", 48))]
    {
        let gateway: IpAddr = gateway.parse().unwrap();
        let network = (destination.0.parse().unwrap(), destination.1);
        let via = Via { gateway: Some(gateway), on_link: true, mtu: NonZeroU32::new(1400) };
        let refused = link::set_route(&socket, index, network, Via { on_link: false, ..via });
        assert!(refused.is_err(), "the gateway is on no known network");
        // A repeated Bind sets the same route and neighbour twice.
        for _ in 0..2 {
            link::set_route(&socket, index, network, via).unwrap();
            link::set_neighbour(&socket, index, gateway, mac).unwrap();
        }
        let routes = ip(&format!("{option} route show dev {DEVICE}"));
        let route = routes.lines().find(|line| line.starts_with(destination.0)).unwrap();
        for part in [format!("via {gateway}"), "onlink".into(), "mtu 1400".into()] {
            assert!(route.contains(&part), "{part}: {route}");
        }
        let neighbours = ip(&format!("{option} neigh show dev {DEVICE} nud permanent"));
        assert!(
            neighbours.contains(&format!("{gateway} lladdr 02:00:5e:00:53:09 PERMANENT")),
            "{neighbours}"
        );
    }
    ip(&format!("link delete {DEVICE}"));
}
