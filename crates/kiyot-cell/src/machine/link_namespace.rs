//! Network devices of the machine: the pod's, and the link's in a network namespace of its own,
//! which the pod doesn't see and can't cut.

use std::{
    fs::{self, File},
    io,
    os::fd::AsFd,
    path::Path,
    thread,
};

use kiyot_link::{bootstrap::LinkDevice, mac_address::MacAddress};
use kiyot_linux::{
    link::{self, Link},
    netlink::route_socket,
};
use nix::sched::{CloneFlags, unshare};
use rustix::mount::mount_bind;

use super::wait;
use crate::{agent::network::POD_DEVICE, namespaces::LINK_NAMESPACE};

/// Name of the link's device.
const LINK_DEVICE: &str = "link";

/// A device can't be found or configured.
#[derive(Debug, thiserror::Error)]
#[error("cannot {doing} the network device with the address {mac}")]
pub struct DeviceError {
    doing: &'static str,
    mac: MacAddress,
    #[source]
    source: io::Error,
}

fn failed(doing: &'static str, mac: MacAddress) -> impl FnOnce(io::Error) -> DeviceError {
    move |source| DeviceError { doing, mac, source }
}

/// Gives the device with this hardware address the name of a pod's device.
pub(super) fn name_pod_device(mac: MacAddress) -> Result<(), DeviceError> {
    let socket = route_socket().map_err(failed("open netlink for", mac))?;
    let device = find(&socket, mac)?;
    if device.name == POD_DEVICE {
        return Ok(());
    }
    // The link's device may have this name.
    let links = link::list(&socket).map_err(failed("list devices for", mac))?;
    if let Some(other) = links.iter().find(|other| other.name == POD_DEVICE) {
        link::rename(&socket, other.index, LINK_DEVICE).map_err(failed("free the name of", mac))?;
    }
    link::rename(&socket, device.index, POD_DEVICE).map_err(failed("rename", mac))
}

/// Moves the link's device to a network namespace of its own, and sets it up.
pub(super) fn isolate(device: &LinkDevice) -> Result<(), DeviceError> {
    let mac = device.mac;
    let device = device.clone();
    // unshare(2) affects this thread only, which ends with the call.
    let isolating = thread::spawn(move || isolate_in_thread(&device));
    isolating
        .join()
        .unwrap_or_else(|_| Err(failed("isolate", mac)(io::Error::other("its thread panicked"))))
}

fn isolate_in_thread(device: &LinkDevice) -> Result<(), DeviceError> {
    let mac = device.mac;
    let outer = route_socket().map_err(failed("open netlink for", mac))?;
    let found = find(&outer, mac)?;
    unshare(CloneFlags::CLONE_NEWNET)
        .map_err(|error| failed("create a namespace for", mac)(error.into()))?;
    let namespace =
        File::open("/proc/thread-self/ns/net").map_err(failed("open the namespace of", mac))?;
    keep_namespace(Path::new(LINK_NAMESPACE)).map_err(failed("keep the namespace of", mac))?;
    link::move_to(&outer, found.index, namespace.as_fd()).map_err(failed("move", mac))?;
    let inner = route_socket().map_err(failed("open netlink for", mac))?;
    // The index may have changed.
    let moved = find(&inner, mac)?;
    link::set_address(&inner, moved.index, device.address, device.prefix_len, true)
        .map_err(failed("set the address of", mac))?;
    link::set_up(&inner, moved.index).map_err(failed("bring up", mac))
}

/// Keeps the namespace of the calling thread alive by a mount.
fn keep_namespace(path: &Path) -> io::Result<()> {
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    File::create(path)?;
    Ok(mount_bind("/proc/thread-self/ns/net", path)?)
}

/// Returns the device with a hardware address. Waits until the kernel has found it.
fn find(socket: impl AsFd, mac: MacAddress) -> Result<Link, DeviceError> {
    wait::until(|is_last| {
        let links = link::list(&socket).map_err(failed("find", mac))?;
        match links.iter().find(|link| link.mac == Some(mac.0)) {
            None if is_last => {
                let names: Vec<_> = links.iter().map(|link| link.name.as_str()).collect();
                let secs = wait::LIMIT.as_secs();
                let message = format!("not found after {secs} s; found: {names:?}");
                Err(failed("find", mac)(io::Error::other(message)))
            }
            found => Ok(found.cloned()),
        }
    })
}
