//! The network of the VPC: source/destination checks, security groups, routes, ARP.

use kiyot_testcloud::{Cloud, Instance};
use kiyot_testkit::output;

use crate::instances::{launch_with, wait_for_console};

/// Script of an instance that serves its name on TCP ports 7000 and 7001.
const SERVE: &str = "for port in 7000 7001; do while :; do \
                     echo from-$(hostname) | busybox nc -l -p $port; done & done; \
                     echo serves; wait";

/// Launches an instance that serves, in the subnet with this number.
async fn server(cloud: &Cloud, subnet: usize, more: &[(&str, &str)]) -> Instance {
    let id = launch_with(cloud, subnet, SERVE, more).await;
    wait_for_console(cloud, &id, "serves").await;
    cloud.instance(&id).unwrap()
}

/// Returns whether a program of an instance succeeds.
fn succeeds(of: &Instance, words: &[&str]) -> bool {
    output("ip", &[&["netns", "exec", &of.id], words].concat()).is_ok()
}

/// Returns whether an instance reaches a TCP port.
fn reaches(from: &Instance, address: &str, port: &str) -> bool {
    succeeds(from, &["busybox", "timeout", "2", "busybox", "nc", "-w", "1", address, port])
}

fn pings(from: &Instance, source: &str, address: &str) -> bool {
    succeeds(from, &["busybox", "ping", "-c", "1", "-W", "1", "-I", source, address])
}

fn ip(of: &Instance, arguments: &[&str]) {
    output("ip", &[&["-n", &of.id], arguments].concat()).unwrap();
}

async fn call(cloud: &Cloud, action: &str, parameters: &[(&str, &str)]) {
    let reply = cloud.call(action, parameters).await.unwrap();
    assert_eq!(reply.status, 200, "{action}: {}", reply.body);
}

/// Adds a permission to the security group of cells.
pub(crate) async fn admit(cloud: &Cloud, peer: (&str, &str), protocol: &str, port: &str) {
    let parameters = [
        ("GroupId", cloud.setup().security_group.as_str()),
        ("IpPermissions.1.IpProtocol", protocol),
        ("IpPermissions.1.FromPort", port),
        ("IpPermissions.1.ToPort", port),
        peer,
    ];
    call(cloud, "AuthorizeSecurityGroupIngress", &parameters).await;
}

async fn turn_check_off(cloud: &Cloud, instance: &str) {
    let off = [("InstanceId", instance), ("SourceDestCheck.Value", "false")];
    call(cloud, "ModifyInstanceAttribute", &off).await;
}

#[tokio::test]
async fn security_group_admits_by_port_and_group_and_answers_pass() {
    let cloud = Cloud::start_with_instances().await;
    let group = cloud.setup().security_group.clone();
    let (one, other) = (server(&cloud, 0, &[]).await, server(&cloud, 1, &[]).await);
    let of_node = ("NetworkInterface.1.SecurityGroupId.1", cloud.setup().node_group.as_str());
    let beside = server(&cloud, 1, &[of_node]).await;
    assert!(!reaches(&one, &other.address, "7000"), "cells admit no cell");
    assert!(reaches(&beside, &other.address, "7000"), "cells admit the node's group");
    assert!(!reaches(&other, &beside.address, "7000"), "the node admits the gateway's port alone");
    admit(&cloud, ("IpPermissions.1.Groups.1.GroupId", &group), "tcp", "7000").await;
    assert!(reaches(&one, &other.address, "7000"));
    assert!(!reaches(&one, &other.address, "7001"), "another port");
    assert!(!pings(&one, &one.address, &other.address), "another protocol");
}

#[tokio::test]
async fn source_and_destination_are_checked_until_the_check_is_off() {
    let cloud = Cloud::start_with_instances().await;
    let (client, router) = (server(&cloud, 0, &[]).await, server(&cloud, 0, &[]).await);
    let everywhere = ("IpPermissions.1.IpRanges.1.CidrIp", "0.0.0.0/0");
    admit(&cloud, everywhere, "icmp", "-1").await;
    assert!(pings(&client, &client.address, &router.address));

    // The client's packets have a foreign source, and the answers this destination.
    ip(&client, &["address", "add", "10.9.0.1/32", "dev", "lo"]);
    ip(&router, &["route", "add", "10.9.0.1", "via", &client.address]);
    assert!(!pings(&client, "10.9.0.1", &router.address));
    turn_check_off(&cloud, &client.id).await;
    assert!(pings(&client, "10.9.0.1", &router.address));
}

#[tokio::test]
async fn route_of_the_vpc_leads_to_an_instance_whose_check_is_off() {
    let cloud = Cloud::start_with_instances().await;
    let (client, router) = (server(&cloud, 1, &[]).await, server(&cloud, 0, &[]).await);
    let everywhere = ("IpPermissions.1.IpRanges.1.CidrIp", "0.0.0.0/0");
    admit(&cloud, everywhere, "icmp", "-1").await;
    ip(&router, &["address", "add", "10.8.1.1/32", "dev", "lo"]);
    let tables = cloud.call("DescribeRouteTables", &[]).await.unwrap().root();
    let mut tables = tables.items("routeTableSet").iter();
    let table = tables.find(|table| table.at("vpcId") == cloud.setup().vpc).unwrap();
    let route = [
        ("RouteTableId", table.at("routeTableId")),
        ("DestinationCidrBlock", "10.8.1.0/24"),
        ("InstanceId", &router.id),
    ];
    call(&cloud, "CreateRoute", &route).await;
    assert!(!pings(&client, &client.address, "10.8.1.1"));
    turn_check_off(&cloud, &router.id).await;
    assert!(pings(&client, &client.address, "10.8.1.1"));
    call(&cloud, "DeleteRoute", &route[..2]).await;
    assert!(!pings(&client, &client.address, "10.8.1.1"));
}

#[tokio::test]
async fn secondary_address_is_answered_by_the_vpc_and_gratuitous_arp_is_ignored() {
    let cloud = Cloud::start_with_instances().await;
    let count = ("NetworkInterface.1.SecondaryPrivateIpAddressCount", "1");
    let (client, pod) = (server(&cloud, 0, &[]).await, server(&cloud, 0, &[count]).await);
    let [second] = pod.secondary_addresses.as_slice() else { panic!("{pod:?}") };
    let described = cloud.call("DescribeInstances", &[("InstanceId.1", &pod.id)]).await.unwrap();
    let shown = described.root();
    let shown = shown.all("privateIpAddressesSet")[0].children.iter();
    let shown: Vec<_> =
        shown.map(|item| (item.at("privateIpAddress"), item.at("primary"))).collect();
    assert_eq!(shown, [(pod.address.as_str(), "true"), (second.as_str(), "false")]);
    let everywhere = ("IpPermissions.1.IpRanges.1.CidrIp", "0.0.0.0/0");
    admit(&cloud, everywhere, "icmp", "-1").await;
    // The instance answers no ARP for an address that its interface lacks.
    ip(&pod, &["address", "add", &format!("{second}/32"), "dev", "lo"]);
    let ignore = "echo 8 > /proc/sys/net/ipv4/conf/all/arp_ignore";
    assert!(succeeds(&pod, &["sh", "-c", ignore]));
    assert!(pings(&client, &client.address, second));
    assert!(pings(&pod, second, &client.address));

    // Another instance claims the address.
    ip(&client, &["neigh", "flush", "all"]);
    let thief = server(&cloud, 0, &[]).await;
    ip(&thief, &["address", "add", &format!("{second}/20"), "dev", "eth0"]);
    let claim = ["busybox", "arping", "-c", "2", "-U", "-I", "eth0", second];
    let _ = succeeds(&thief, &claim);
    assert!(pings(&client, &client.address, second));
    let neighbours = output("ip", &["-n", &client.id, "neigh", "show", second]).unwrap();
    assert!(neighbours.contains(&pod.mac), "{neighbours}");
}
