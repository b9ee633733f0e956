//! Routes of the machine: the pod has the machine's network, so addresses are closed to it, and
//! some networks are reached through the node.
//!
//! The machine's own network service drops routes that it does not know, for example when an update
//! restarts systemd-networkd, so the routes are set again after each change.

use std::{fs, io, net::IpAddr, os::fd::OwnedFd, thread, time::Duration};

use kiyot_link::bootstrap::{GatewayAddress, Machine};
use kiyot_linux::{
    link::{self, Via},
    netlink::{route_changes, route_socket},
};
use rustix::{
    io::Errno,
    net::{RecvFlags, netdevice::name_to_index, recv},
};

use crate::agent::network;

/// Interval at which the routes are set without a message: the kernel sends no message for the
/// routes of a device that goes down.
const INTERVAL: Duration = Duration::from_secs(5);
/// Pause after a change, which bounds the cost of a pod that removes routes again and again.
const PAUSE: Duration = Duration::from_millis(50);
/// Upper bound on messages that are discarded at once.
const MAX_DISCARDED: usize = 4096;

/// A route that can't be set.
#[derive(Debug, thiserror::Error)]
pub enum RouteError {
    /// Netlink can't be opened.
    #[error("cannot open netlink")]
    Netlink(#[source] io::Error),
    /// The thread that keeps the routes can't be started.
    #[error("cannot start the thread of the routes")]
    Thread(#[source] io::Error),
    /// An address can't be closed to the pod.
    #[error("cannot close the address {0}")]
    Address(IpAddr, #[source] io::Error),
}

/// Sets the routes, and keeps them until the process ends.
pub(super) fn keep(machine: &Machine, gateway: &GatewayAddress) -> Result<(), RouteError> {
    let changes = route_changes(INTERVAL).map_err(RouteError::Netlink)?;
    let routes = Routes {
        closed: machine.closed_addresses.clone(),
        node_networks: machine.node_networks.clone(),
        node: match gateway {
            GatewayAddress::Tcp(gateway) => Some(gateway.ip()),
            _ => None,
        },
    };
    let unset = routes.set()?;
    report(&unset);
    thread::Builder::new()
        .name("routes".into())
        .spawn(move || routes.run(&changes, unset))
        .map_err(RouteError::Thread)?;
    Ok(())
}

struct Routes {
    closed: Vec<IpAddr>,
    node_networks: Vec<(IpAddr, u8)>,
    node: Option<IpAddr>,
}

impl Routes {
    /// Sets all routes, the closed addresses first. Returns an error line for each network that
    /// can't be reached through the node, for example on a machine outside the node's subnet.
    fn set(&self) -> Result<Vec<String>, RouteError> {
        let socket = route_socket().map_err(RouteError::Netlink)?;
        for address in &self.closed {
            match link::close_address(&socket, *address) {
                // A kernel without IPv6 can't reach an IPv6 address.
                Err(error) if address.is_ipv6() && has_no_family(&error) => {}
                closed => closed.map_err(|source| RouteError::Address(*address, source))?,
            }
        }
        let Some(node) = self.node else { return Ok(Vec::new()) };
        let table = fs::read_to_string(network::ROUTES).unwrap_or_default();
        let device = network::default_device(&table).unwrap_or(network::POD_DEVICE);
        let via = Via { gateway: Some(node), ..Via::default() };
        let set = |destination| {
            let index = name_to_index(&socket, device)?;
            link::set_route(&socket, index, destination, via)
        };
        let unset = |&(address, prefix_len): &(IpAddr, u8)| {
            let error = set((address, prefix_len)).err()?;
            Some(format!(
                "network not reachable by the node network={address}/{prefix_len} node={node} \
                 error=\"{error}\""
            ))
        };
        Ok(self.node_networks.iter().filter_map(unset).collect())
    }

    /// Sets the routes after each change, and at an interval. Reports the routes that can't be set
    /// whenever they differ from the last report.
    fn run(&self, changes: &OwnedFd, mut reported: Vec<String>) {
        loop {
            // Returns at a message, at an overflow of the socket's buffer, or after the interval.
            let _ = recv(changes, &mut [0_u8; 4096][..], RecvFlags::empty());
            thread::sleep(PAUSE);
            let unset = self.set().unwrap_or_else(|error| {
                vec![format!("routes not set, retrying error=\"{}\"", crate::with_sources(&error))]
            });
            if unset != reported {
                report(&unset);
                reported = unset;
            }
            // Discards the messages of the thread's own changes.
            for _ in 0..MAX_DISCARDED {
                if recv(changes, &mut [0_u8; 4096][..], RecvFlags::DONTWAIT).is_err() {
                    break;
                }
            }
        }
    }
}

fn report(unset: &[String]) {
    for line in unset {
        eprintln!("kiyot-cell: {line}");
    }
}

fn has_no_family(error: &io::Error) -> bool {
    let number = error.raw_os_error();
    [Errno::AFNOSUPPORT, Errno::OPNOTSUPP].iter().any(|errno| number == Some(errno.raw_os_error()))
}
