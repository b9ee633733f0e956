//! Frames that a guest sends, and the frames that leave its cell's network namespace.

use std::{
    collections::BTreeSet,
    net::{Ipv4Addr, Ipv6Addr},
    os::fd::OwnedFd,
    thread::{self, JoinHandle},
    time::Instant,
};

use rustix::net::{
    AddressFamily, RecvFlags, SocketFlags, SocketType, eth, recv, socket_with,
    sockopt::{Timeout, set_socket_timeout},
};

use super::bench::LIMIT;

/// Begins the name of a frame, which is at the frame's end.
const NAME: &[u8] = b"kiyot frame: ";
/// The headers of IPv6, by number.
const HOP_BY_HOP: u8 = 0;
const UDP: u8 = 17;
const IPV6: u8 = 41;
const ROUTING: u8 = 43;
const FRAGMENT: u8 = 44;
const ICMPV6: u8 = 58;
const DESTINATION_OPTIONS: u8 = 60;
/// Offset and flag of fragments: the only one, the first of several, and the last.
const ONLY: u16 = 0;
const FIRST: u16 = 1;
const LATER: u16 = 8 << 3;

/// Messages of ICMPv6, by type.
#[derive(Debug, Clone, Copy)]
enum Icmp {
    EchoRequest = 128,
    RouterAdvertisement = 134,
    NeighbourSolicitation = 135,
    NeighbourAdvertisement = 136,
    Redirect = 137,
}

/// Identity of a guest.
#[derive(Debug, Clone, Copy)]
pub(super) struct Identity {
    pub(super) mac: [u8; 6],
    pub(super) v4: Ipv4Addr,
    pub(super) v6: Ipv6Addr,
}

impl Identity {
    fn link_local(&self) -> Ipv6Addr {
        let [a, b, c, d, e, f] = self.mac;
        Ipv6Addr::from([0xfe, 0x80, 0, 0, 0, 0, 0, 0, a ^ 2, b, c, 0xff, 0xfe, d, e, f])
    }

    /// Returns frames by which the guest is its pod.
    pub(super) fn own(&self) -> Vec<(&'static str, Vec<u8>)> {
        let Self { mac, v4, v6 } = *self;
        let neighbour = |source, kind, target| frame(mac, icmp(source, kind, target));
        vec![
            ("IPv4", frame(mac, ipv4(v4))),
            ("ARP", frame(mac, arp(mac, v4))),
            ("UDP", frame(mac, ipv6(v6, UDP, &[0; 8]))),
            ("UDP of the link", frame(mac, ipv6(self.link_local(), UDP, &[0; 8]))),
            ("solicitation", neighbour(v6, Icmp::NeighbourSolicitation, OTHER)),
            ("advertisement", neighbour(v6, Icmp::NeighbourAdvertisement, v6)),
            (
                "duplicate address detection",
                neighbour(Ipv6Addr::UNSPECIFIED, Icmp::NeighbourSolicitation, v6),
            ),
            (
                "duplicate address detection on the link",
                neighbour(Ipv6Addr::UNSPECIFIED, Icmp::NeighbourSolicitation, self.link_local()),
            ),
            ("first fragment of UDP", frame(mac, fragment(v6, FIRST, UDP, &[0; 8]))),
            ("later fragment of UDP", frame(mac, fragment(v6, LATER, UDP, &[0; 8]))),
            (
                "first fragment of an echo",
                frame(mac, fragment(v6, FIRST, ICMPV6, &message(Icmp::EchoRequest, OTHER))),
            ),
            ("later fragment of an echo", frame(mac, fragment(v6, LATER, ICMPV6, &[136; 8]))),
        ]
    }

    /// Returns frames by which the guest claims to be another.
    pub(super) fn forged(&self) -> Vec<(&'static str, Vec<u8>)> {
        let Self { mac, v4, v6 } = *self;
        let [a, b, c, _] = v4.octets();
        let other_v4 = Ipv4Addr::new(a, b, c, 251);
        let own = |packet| frame(mac, packet);
        let advertises = Icmp::NeighbourAdvertisement;
        let mut tagged = own(ipv6(v6, UDP, &[0; 8]));
        tagged.splice(12..12, [0x81, 0, 0, 5]);
        vec![
            ("IPv4 of another", own(ipv4(other_v4))),
            ("ARP for another", own(arp(mac, other_v4))),
            ("ARP for another device", own(arp(OTHER_MAC, v4))),
            ("UDP of another", own(ipv6(OTHER, UDP, &[0; 8]))),
            ("UDP of another on the link", own(ipv6(OTHER_LINK_LOCAL, UDP, &[0; 8]))),
            ("UDP by another device", frame(OTHER_MAC, ipv6(v6, UDP, &[0; 8]))),
            ("advertisement for another", own(icmp(v6, advertises, OTHER))),
            ("advertisement of another", own(icmp(OTHER, advertises, OTHER))),
            ("advertisement of the link", own(icmp(self.link_local(), advertises, v6))),
            (
                "advertisement of nobody",
                own(icmp(Ipv6Addr::UNSPECIFIED, advertises, Ipv6Addr::UNSPECIFIED)),
            ),
            (
                "advertisement of a router",
                own(icmp(self.link_local(), Icmp::RouterAdvertisement, OTHER)),
            ),
            ("redirect", own(icmp(self.link_local(), Icmp::Redirect, OTHER))),
            (
                "duplicate address detection for another",
                own(icmp(Ipv6Addr::UNSPECIFIED, Icmp::NeighbourSolicitation, OTHER)),
            ),
            ("options of a hop", own(hidden(v6, HOP_BY_HOP))),
            ("routing header", own(hidden(v6, ROUTING))),
            ("options of a destination", own(hidden(v6, DESTINATION_OPTIONS))),
            ("packet in a packet", own(ipv6(v6, IPV6, &icmp(OTHER, advertises, OTHER).1))),
            (
                "advertisement in a fragment",
                own(fragment(v6, ONLY, ICMPV6, &message(advertises, OTHER))),
            ),
            (
                "advertisement of a router in fragments",
                own(fragment(v6, FIRST, ICMPV6, &message(Icmp::RouterAdvertisement, OTHER))),
            ),
            ("options in a fragment", own(fragment(v6, FIRST, DESTINATION_OPTIONS, &[0; 8]))),
            ("tag of a virtual LAN", tagged),
        ]
    }
}

const OTHER: Ipv6Addr = Ipv6Addr::new(0xfd00, 0x5e, 0, 0, 0, 0, 0, 0x251);
const OTHER_LINK_LOCAL: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0x251);
const OTHER_MAC: [u8; 6] = [2, 0, 0x5e, 0, 0x53, 0x99];

/// A packet with its Ethernet type.
type Packet = (u16, Vec<u8>);

/// Returns a frame to all.
fn frame(source: [u8; 6], (kind, packet): Packet) -> Vec<u8> {
    [&[0xff; 6][..], &source, &kind.to_be_bytes(), &packet].concat()
}

fn ipv4(source: Ipv4Addr) -> Packet {
    let head = [0x45, 0, 0, 28, 0, 0, 0, 0, 64, UDP, 0, 0];
    (0x0800, [&head[..], &source.octets(), &[255; 4], &[0; 8]].concat())
}

/// Returns an ARP message for an address (RFC 826).
fn arp(mac: [u8; 6], address: Ipv4Addr) -> Packet {
    let head = [0, 1, 8, 0, 6, 4, 0, 2];
    let address = address.octets();
    (0x0806, [&head[..], &mac, &address, &mac, &address].concat())
}

fn ipv6(source: Ipv6Addr, header: u8, rest: &[u8]) -> Packet {
    let length = u16::try_from(rest.len()).unwrap().to_be_bytes();
    let all_nodes = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1).octets();
    let head = [&[0x60, 0, 0, 0], &length[..], &[header, 255]].concat();
    (0x86dd, [&head[..], &source.octets(), &all_nodes, rest].concat())
}

fn icmp(source: Ipv6Addr, kind: Icmp, target: Ipv6Addr) -> Packet {
    ipv6(source, ICMPV6, &message(kind, target))
}

fn message(kind: Icmp, target: Ipv6Addr) -> Vec<u8> {
    [&[kind as u8, 0, 0, 0, 0x20, 0, 0, 0][..], &target.octets()].concat()
}

/// Returns an advertisement for another address behind an extension header.
fn hidden(source: Ipv6Addr, header: u8) -> Packet {
    let options = [ICMPV6, 0, 1, 4, 0, 0, 0, 0];
    let message = message(Icmp::NeighbourAdvertisement, OTHER);
    ipv6(source, header, &[&options[..], &message].concat())
}

/// Returns a fragment of a packet whose first header is of this kind.
fn fragment(source: Ipv6Addr, place: u16, header: u8, rest: &[u8]) -> Packet {
    let head = [&[header, 0][..], &place.to_be_bytes(), &[0, 0, 0, 7]].concat();
    ipv6(source, FRAGMENT, &[&head, rest].concat())
}

/// Returns a frame with its name behind the packet, in the digits that [`SENDER`] reads.
pub(super) fn named((name, frame): &(&'static str, Vec<u8>)) -> String {
    hex::encode([frame, NAME, name.as_bytes()].concat())
}

/// The program that sends frames by a device, each given in hexadecimal digits. It runs on one
/// processor, which keeps the frames in order.
pub(super) const SENDER: &str = "
import os, socket, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
device = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
device.bind((sys.argv[1], 0))
for frame in sys.argv[2:]:
    device.send(bytes.fromhex(frame))
";

/// Receives the frames of all devices of this network namespace.
pub(super) struct Receiver(JoinHandle<BTreeSet<String>>);

impl Receiver {
    /// Receives until these frames have arrived.
    pub(super) fn start(expected: BTreeSet<String>) -> Self {
        let socket = socket_with(
            AddressFamily::PACKET,
            SocketType::RAW,
            SocketFlags::CLOEXEC,
            Some(eth::ALL),
        )
        .unwrap();
        set_socket_timeout(&socket, Timeout::Recv, Some(LIMIT)).unwrap();
        Self(thread::spawn(move || receive(&socket, &expected)))
    }

    /// Returns the names of the frames.
    pub(super) fn names(self) -> BTreeSet<String> {
        self.0.join().unwrap()
    }
}

fn receive(socket: &OwnedFd, expected: &BTreeSet<String>) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    let mut buffer = vec![0; 1 << 16];
    let began = Instant::now();
    while !names.is_superset(expected) {
        assert!(began.elapsed() < LIMIT, "only these frames arrived: {names:#?}");
        let (_, length) = recv(socket, &mut buffer, RecvFlags::empty())
            .unwrap_or_else(|error| panic!("{error}; only these frames arrived: {names:#?}"));
        let frame = &buffer[..length];
        if let Some(at) = frame.windows(NAME.len()).position(|part| part == NAME) {
            names.insert(String::from_utf8_lossy(&frame[at + NAME.len()..]).into_owned());
        }
    }
    names
}
