//! Warnings about subnets and the gateway.

use std::{collections::BTreeMap, net::IpAddr};

use kiyot_config::MilpaBackend;
use kiyot_values::cidr::Cidr;

use crate::Subnet;

/// Returns the warnings about a configuration with these subnets. `used` has the subnet that
/// launches use in each zone.
pub(super) fn warnings(
    config: &MilpaBackend,
    subnets: &[Subnet],
    used: &BTreeMap<String, String>,
) -> Vec<String> {
    let mut warnings = Vec::new();
    let unused = subnets.iter().filter(|subnet| !used.values().any(|id| *id == subnet.id));
    warnings.extend(unused.map(|subnet| {
        let zone = &subnet.zone;
        let first = used.get(zone).map_or("another", String::as_str);
        format!("{} is never used: {first} is the first subnet of {zone}", subnet.id)
    }));
    let mut vpcs: Vec<&str> = subnets.iter().map(|subnet| subnet.vpc.as_str()).collect();
    vpcs.sort_unstable();
    vpcs.dedup();
    if vpcs.len() > 1 {
        warnings.push(format!("the subnets are in several VPCs: {}", vpcs.join(", ")));
    }
    let used: Vec<&Subnet> =
        subnets.iter().filter(|subnet| used.values().any(|id| *id == subnet.id)).collect();
    // Only IPv4 networks are compared, and the address behind a forwarder is unknown.
    let Some(gateway) = config.gateway.node_address().map(IpAddr::V4) else {
        return warnings;
    };
    let has_gateway = |subnet: &&Subnet| contains(subnet, gateway);
    if !subnets.iter().any(|subnet| has_gateway(&subnet)) {
        let networks: Vec<&str> = subnets.iter().map(|subnet| subnet.network.as_str()).collect();
        warnings.push(format!(
            "the gateway's address {gateway} is in no network of the subnets ({}): cells reach it \
             only if the VPC has a route, and security groups admit them",
            networks.join(", ")
        ));
    }
    let others: Vec<&str> =
        used.iter().filter(|it| !has_gateway(it)).map(|subnet| subnet.id.as_str()).collect();
    if !config.ec2.cluster_networks.is_empty() && !others.is_empty() {
        warnings.push(format!(
            "cells in {} don't reach cluster_networks (services, pods of the node): the node, \
             with the address {gateway}, is in another subnet",
            others.join(", ")
        ));
    }
    warnings
}

fn contains(subnet: &Subnet, address: IpAddr) -> bool {
    subnet.network.parse::<Cidr>().is_ok_and(|network| network.contains(address))
}

#[cfg(test)]
mod tests {
    use super::{super::by_zone, *};
    use kiyot_config::GatewayListen;

    fn subnet(id: &str, zone: &str, network: &str) -> Subnet {
        Subnet { id: id.into(), vpc: "vpc-1".into(), zone: zone.into(), network: network.into() }
    }

    fn config(gateway: &str, cluster_networks: &[&str]) -> MilpaBackend {
        let mut config = MilpaBackend {
            gateway: GatewayListen {
                listen: Some(gateway.parse().unwrap()),
                ..GatewayListen::default()
            },
            ..MilpaBackend::default()
        };
        config.ec2.cluster_networks =
            cluster_networks.iter().map(|text| text.parse().unwrap()).collect();
        config
    }

    fn warned(config: &MilpaBackend, subnets: &[Subnet]) -> String {
        let ids: Vec<String> = subnets.iter().map(|subnet| subnet.id.clone()).collect();
        warnings(config, subnets, &by_zone(&ids, subnets)).join("\n")
    }

    #[test]
    fn node_in_the_only_subnet_causes_no_warning() {
        let subnets = [subnet("subnet-a", "a", "10.0.0.0/24")];
        assert_eq!(warned(&config("10.0.0.5:7700", &["10.96.0.0/12"]), &subnets), "");
    }

    #[test]
    fn other_subnets_do_not_reach_cluster_networks() {
        let subnets =
            [subnet("subnet-a", "a", "10.0.0.0/24"), subnet("subnet-b", "b", "10.0.1.0/24")];
        let text = warned(&config("10.0.0.5:7700", &["10.96.0.0/12"]), &subnets);
        assert!(text.starts_with("cells in subnet-b don't reach cluster_networks"), "{text}");
        assert_eq!(warned(&config("10.0.0.5:7700", &[]), &subnets), "");
    }

    #[test]
    fn gateway_outside_the_subnets_is_named() {
        let subnets = [subnet("subnet-a", "a", "10.0.0.0/24")];
        let text = warned(&config("192.168.0.5:7700", &[]), &subnets);
        assert!(text.contains("192.168.0.5 is in no network of the subnets (10.0.0.0/24)"));
        // Behind a forwarder the node's address is unknown.
        let mut forwarded = config("192.168.0.5:7700", &["10.96.0.0/12"]);
        forwarded.gateway.advertise =
            Some(kiyot_config::Advertise::Endpoint("1.2.3.4:80".parse().unwrap()));
        assert_eq!(warned(&forwarded, &subnets), "");
    }

    #[test]
    fn second_subnet_of_a_zone_and_second_vpc_are_named() {
        let other = Subnet { vpc: "vpc-2".into(), ..subnet("subnet-b", "a", "10.1.0.0/24") };
        let subnets = [subnet("subnet-a", "a", "10.0.0.0/24"), other];
        let text = warned(&config("10.0.0.5:7700", &[]), &subnets);
        assert!(text.contains("subnet-b is never used: subnet-a is the first subnet of a"));
        assert!(text.contains("several VPCs: vpc-1, vpc-2"), "{text}");
    }
}
