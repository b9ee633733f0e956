//! The network of a virtual machine's pod. The machine's device is joined with the device of the
//! cell's network namespace, so that the guest has the pod's place.
//!
//! Traffic control redirects frames. All frames go to the guest. From the guest, only frames with
//! the pod's hardware address and a pod address are redirected. Other frames reach the stack of the
//! namespace, which drops everything but the link's connections (`kiyot-cell launch-vm`).

use std::{
    ffi::OsStr,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    ops::Range,
    path::Path,
};

use kiyot_engine::provider::{ErrorClass, PodNetwork, ProviderError};
use kiyot_link::{mac_address::MacAddress, vm_file::POD_TAP};

use crate::{
    DEVICE, Home,
    qemu::{
        command::{self, CommandError},
        routes::{self, Device},
    },
    resolv_conf::ResolvConf,
};

/// The device file of tap devices.
pub(super) const TUN: &str = "/dev/net/tun";

/// The options of `ip` for the address families, with the destination of default routes.
const FAMILIES: [(&str, IpAddr); 2] =
    [("-4", IpAddr::V4(Ipv4Addr::UNSPECIFIED)), ("-6", IpAddr::V6(Ipv6Addr::UNSPECIFIED))];

/// Joins the device of a machine with the pod's, and returns the network for the machine's agent.
/// May be repeated.
pub(super) async fn join(home: &Home, addresses: &[IpAddr]) -> Result<PodNetwork, ProviderError> {
    let failed = |error: CommandError| ProviderError::transient(joining(home), error);
    let mut network = read(home, addresses).await?;
    let lines = redirections(network.mac, addresses);
    if tc(home, &lines).await.is_err() {
        // A daemon that was killed here may have left a part of the redirections.
        for device in [DEVICE, POD_TAP] {
            let _absent = tc(home, &format!("qdisc del dev {device} ingress\n")).await;
        }
        tc(home, &lines).await.map_err(failed)?;
    }
    let mtu = network.mtu.to_string();
    let namespace = home.netns_name();
    command::ip(Some(&namespace), &[&["link", "set", POD_TAP, "mtu", &mtu, "up"]], home.dir())
        .await
        .map_err(failed)?;
    let resolv_conf = ResolvConf::of_node();
    (network.name_servers, network.search) = (resolv_conf.servers, resolv_conf.searches);
    Ok(network)
}

fn joining(home: &Home) -> String {
    format!("join {} with the network of its pod", home.cell())
}

/// Reads the pod's device in the cell's network namespace.
async fn read(home: &Home, addresses: &[IpAddr]) -> Result<PodNetwork, ProviderError> {
    let namespace = home.netns_name();
    let ip = async |arguments: &[&str]| {
        let arguments = [&["-n", &namespace, "-j"], arguments].concat();
        command::output_of("ip", &arguments, Some(home.dir()))
            .await
            .map_err(|error| ProviderError::transient(joining(home), error))
    };
    let invalid = |error| ProviderError::new(ErrorClass::Transient, joining(home), error);
    let device = ip(&["address", "show", "dev", DEVICE]).await?;
    let device = Device::parse(&device).map_err(invalid)?;
    let (mut found, mut neighbours) = (Vec::new(), Vec::new());
    for (option, any) in FAMILIES {
        if any.is_ipv6() && !addresses.iter().any(IpAddr::is_ipv6) {
            continue;
        }
        let listed = ip(&[option, "route", "show", "dev", DEVICE]).await?;
        found.extend(routes::parse(&listed, any).map_err(invalid)?);
        let listed = ip(&[option, "neigh", "show", "dev", DEVICE, "nud", "permanent"]).await?;
        neighbours.extend(routes::parse_neighbours(&listed).map_err(invalid)?);
    }
    device.network(addresses, found, neighbours).map_err(invalid)
}

/// Runs `tc` in the cell's network namespace, up to the first error.
async fn tc(home: &Home, lines: &str) -> Result<(), CommandError> {
    let namespace = home.netns_name();
    let arguments = ["-n", &namespace, "-batch", "-"].map(OsStr::new);
    let (program, dir) = (Path::new("tc"), Some(home.dir()));
    let ended = command::run(program, &arguments, dir, &[], lines.as_bytes()).await?;
    if ended.status.success() {
        return Ok(());
    }
    let program = format!("tc {}", lines.trim().replace('\n', "; tc "));
    Err(CommandError::Refused { program, status: ended.status, said: ended.stderr })
}

/// Returns the commands of `tc` that redirect frames between both devices.
fn redirections(mac: MacAddress, addresses: &[IpAddr]) -> String {
    let mut rules = Rules::default();
    rules.line(format!("qdisc add dev {DEVICE} ingress"));
    rules.line(format!("qdisc add dev {POD_TAP} ingress"));
    rules.line(format!(
        "filter add dev {DEVICE} parent ffff: protocol all prio 1 u32 match u8 0 0 {}",
        redirect(POD_TAP)
    ));
    let has_v6 = addresses.iter().any(IpAddr::is_ipv6);
    for address in addresses {
        match address {
            IpAddr::V4(address) => rules.allow_v4(mac, *address),
            IpAddr::V6(address) => rules.allow_v6(mac, *address),
        }
    }
    if has_v6 {
        rules.allow_v6(mac, link_local(mac));
    }
    rules.0
}

fn redirect(to: &str) -> String {
    format!("action mirred egress redirect dev {to}")
}

/// Commands of `tc` for frames from the guest. The first matching filter redirects a frame. Filters
/// of a protocol have the same priority, and priorities differ by protocol.
#[derive(Default)]
struct Rules(String);

impl Rules {
    fn line(&mut self, line: String) {
        self.0.push_str(&line);
        self.0.push('\n');
    }

    /// Redirects the guest's frames with these matches to the network.
    fn allow(&mut self, protocol: &str, prio: u8, mac: MacAddress, matches: &str) {
        self.line(format!(
            "filter add dev {POD_TAP} parent ffff: protocol {protocol} prio {prio} u32 match ether \
             src {mac} {matches} {}",
            redirect(DEVICE)
        ));
    }

    /// Allows packets from an address, and ARP messages that announce it (RFC 826). Offset 0 has
    /// the kinds and lengths of addresses, offset 8 the sender's hardware address, and offset 14
    /// the sender's address. A match has four bytes, at a multiple of four.
    fn allow_v4(&mut self, mac: MacAddress, address: Ipv4Addr) {
        self.allow("ip", 2, mac, &format!("match ip src {address}/32"));
        let [m0, m1, m2, m3, m4, m5] = mac.0;
        let [a0, a1, a2, a3] = address.octets();
        let words = [
            (0, u32::from_be_bytes([0, 1, 8, 0]), u32::MAX),
            (4, u32::from_be_bytes([6, 4, 0, 0]), 0xffff_0000),
            (8, u32::from_be_bytes([m0, m1, m2, m3]), u32::MAX),
            (12, u32::from_be_bytes([m4, m5, a0, a1]), u32::MAX),
            (16, u32::from_be_bytes([a2, a3, 0, 0]), 0xffff_0000),
        ];
        let matches =
            words.map(|(at, value, mask)| format!("match u32 {value:#010x} {mask:#010x} at {at}"));
        self.allow("arp", 3, mac, &matches.join(" "));
    }

    /// Allows packets from an address whose first header is TCP, UDP, SCTP, a fragment, or ICMPv6.
    /// ICMPv6 messages of a router are not allowed, and a neighbour advertisement must announce
    /// this address. Extension headers are not allowed, because messages could hide behind them.
    fn allow_v6(&mut self, mac: MacAddress, address: Ipv6Addr) {
        let from = format!("match ip6 src {address}/128");
        for header in TRANSPORTS {
            self.allow("ipv6", 4, mac, &format!("{from} {}", next_header(header)));
        }
        // Errors and echoes: types 1 to 4, 128 and 129. Solicitations: 133 of routers, 135 of
        // neighbours. Advertisements: 136.
        for kind in [1, 2, 3, 4, 128, 129, 133, 135] {
            let matches = format!("{from} {} {}", next_header(ICMPV6), icmp_type(kind));
            self.allow("ipv6", 4, mac, &matches);
        }
        let target = words_at(48, address.octets());
        let matches = format!("{from} {} {} {target}", next_header(ICMPV6), icmp_type(136));
        self.allow("ipv6", 4, mac, &matches);
        self.allow_fragments(mac, &from);
        self.allow_duplicate_address_detection(mac, address);
    }

    /// Allows fragments (RFC 8200, 4.5) of TCP, UDP and SCTP packets, and of echoes, the only
    /// ICMPv6 messages that need them. The first fragment, with offset 0, has the ICMPv6 type. For
    /// later fragments there is a filter for each bit of the offset.
    fn allow_fragments(&mut self, mac: MacAddress, from: &str) {
        const FRAGMENT: u8 = 44;
        const ECHOES: [u8; 2] = [128, 129];
        const OFFSET_BITS: Range<u32> = 3..16;
        let fragment = |header: u8| {
            let within = format!("match u32 {:#010x} 0xff000000 at 40", u32::from(header) << 24);
            format!("{from} {} {within}", next_header(FRAGMENT))
        };
        for header in TRANSPORTS {
            self.allow("ipv6", 4, mac, &fragment(header));
        }
        for kind in ECHOES {
            let first = format!(
                "match u32 0x00000000 0x0000fff8 at 40 match u32 {:#010x} 0xff000000 at 48",
                u32::from(kind) << 24
            );
            self.allow("ipv6", 4, mac, &format!("{} {first}", fragment(ICMPV6)));
        }
        for bit in OFFSET_BITS {
            let later = format!("match u32 {0:#010x} {0:#010x} at 40", 1_u32 << bit);
            self.allow("ipv6", 4, mac, &format!("{} {later}", fragment(ICMPV6)));
        }
    }

    /// Allows the solicitations by which a guest checks whether its address is taken (RFC 4862,
    /// 5.4.2). A solicitation for another address would claim that address.
    fn allow_duplicate_address_detection(&mut self, mac: MacAddress, address: Ipv6Addr) {
        let target = words_at(48, address.octets());
        let matches =
            format!("match ip6 src ::/128 {} {} {target}", next_header(ICMPV6), icmp_type(135));
        self.allow("ipv6", 4, mac, &matches);
    }
}

/// The numbers of the protocols TCP, UDP and SCTP.
const TRANSPORTS: [u8; 3] = [6, 17, 132];
/// The number of the protocol ICMPv6.
const ICMPV6: u8 = 58;

/// Returns a match of the next header in the IPv6 header.
fn next_header(kind: u8) -> String {
    format!("match u32 {:#010x} 0x0000ff00 at 4", u32::from(kind) << 8)
}

/// Returns a match of the type of an ICMPv6 message directly after the IPv6 header.
fn icmp_type(kind: u8) -> String {
    format!("match u32 {:#010x} 0xff000000 at 40", u32::from(kind) << 24)
}

/// Returns matches of 16 bytes at an offset.
fn words_at(offset: usize, bytes: [u8; 16]) -> String {
    let words = bytes.chunks(4).enumerate().map(|(index, word)| {
        let value = word.iter().fold(0, |value, byte| value << 8 | u32::from(*byte));
        format!("match u32 {value:#010x} 0xffffffff at {}", offset + 4 * index)
    });
    words.collect::<Vec<_>>().join(" ")
}

/// Returns the link-local address of a hardware address (RFC 4291, appendix A).
fn link_local(mac: MacAddress) -> Ipv6Addr {
    let [a, b, c, d, e, f] = mac.0;
    Ipv6Addr::from([0xfe, 0x80, 0, 0, 0, 0, 0, 0, a ^ 2, b, c, 0xff, 0xfe, d, e, f])
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAC: MacAddress = MacAddress([2, 0, 0x5e, 0, 0x53, 1]);

    #[test]
    fn guest_of_an_ipv4_pod_sends_only_from_its_address() {
        let lines = redirections(MAC, &["10.1.2.3".parse().unwrap()]);
        let from_guest: Vec<_> =
            lines.lines().filter(|line| line.contains("filter add dev tap-pod")).collect();
        assert_eq!(from_guest.len(), 2, "{lines}");
        for line in &from_guest {
            assert!(line.contains("match ether src 02:00:5e:00:53:01 "), "{line}");
            assert!(line.ends_with("action mirred egress redirect dev eth0"), "{line}");
        }
        assert!(from_guest[0].contains("protocol ip prio 2 u32"), "{lines}");
        assert!(from_guest[0].contains("match ip src 10.1.2.3/32"), "{lines}");
        let arp = "match u32 0x02005e00 0xffffffff at 8 match u32 0x53010a01 0xffffffff at 12 \
                   match u32 0x02030000 0xffff0000 at 16";
        assert!(from_guest[1].contains(arp), "{lines}");
    }

    #[test]
    fn guest_of_an_ipv6_pod_advertises_only_its_addresses() {
        let lines = redirections(MAC, &["fd00::7".parse().unwrap()]);
        let advertisements: Vec<_> =
            lines.lines().filter(|line| line.contains("0x88000000 0xff000000 at 40")).collect();
        let target = "match u32 0xfd000000 0xffffffff at 48 match u32 0x00000000 0xffffffff at 52 \
                      match u32 0x00000000 0xffffffff at 56 match u32 0x00000007 0xffffffff at 60";
        assert_eq!(advertisements.len(), 2, "{lines}");
        assert!(advertisements[0].contains(target), "{lines}");
        assert!(advertisements[1].contains("match ip6 src fe80::5eff:fe00:5301/128"), "{lines}");
        // Advertisements of a router (134) and redirects (137).
        assert!(!lines.contains("0x86000000") && !lines.contains("0x89000000"), "{lines}");
    }

    #[test]
    fn link_local_address_follows_from_the_hardware_address() {
        assert_eq!(link_local(MAC).to_string(), "fe80::5eff:fe00:5301");
    }
}
