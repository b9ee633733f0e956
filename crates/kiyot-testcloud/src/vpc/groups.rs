//! Security groups and routes as moto's lists show them.

use std::collections::BTreeMap;

use super::rules::{Group, Peer, Permission, Route};
use crate::xml::Element;

/// Returns the security groups of a reply to DescribeSecurityGroups, by id.
pub(super) fn groups(root: &Element) -> BTreeMap<String, Group> {
    let groups = root.items("securityGroupInfo").iter();
    let group = |item: &Element| Group {
        ingress: permissions(item.items("ipPermissions")),
        egress: permissions(item.items("ipPermissionsEgress")),
    };
    groups.map(|item| (item.at("groupId").to_owned(), group(item))).collect()
}

fn permissions(items: &[Element]) -> Vec<Permission> {
    let of_item = |item: &Element| {
        let protocol = Some(item.at("ipProtocol")).filter(|&protocol| protocol != "-1");
        let has_ports = protocol.is_some_and(|protocol| matches!(protocol, "tcp" | "udp"));
        let port = |name| item.at(name).parse().ok().filter(|_| has_ports);
        let ports = port("fromPort").zip(port("toPort"));
        let networks = item.items("ipRanges").iter().map(|range| range.at("cidrIp"));
        let networks = networks.map(|network| Peer::Network(network.to_owned()));
        let groups = item.items("groups").iter().map(|pair| pair.at("groupId"));
        let groups = groups.map(|group| Peer::Group(group.to_owned()));
        let permission = |peer| Permission { protocol: protocol.map(str::to_owned), ports, peer };
        networks.chain(groups).map(permission).collect::<Vec<_>>()
    };
    items.iter().flat_map(of_item).collect()
}

/// Returns the routes to instances of a reply to DescribeRouteTables.
pub(super) fn routes(root: &Element) -> Vec<Route> {
    let routes = root.items("routeTableSet").iter().flat_map(|table| table.items("routeSet"));
    let routes = routes.map(|route| Route {
        network: route.at("destinationCidrBlock").to_owned(),
        instance: route.at("instanceId").to_owned(),
    });
    routes.filter(|route| !route.instance.is_empty()).collect()
}
