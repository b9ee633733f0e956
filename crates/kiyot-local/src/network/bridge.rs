//! The network of nodes without CNI configuration: a bridge, addresses reserved by files, and
//! masquerading.

use std::{
    fs::{self, File},
    io::{self, Write as _},
    net::Ipv4Addr,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use crate::{
    command::{CommandError, ip},
    instance::Home,
    network::{
        DEVICE, remove_if_there,
        rules::{Chain, Family, RuleError, Rules, words},
    },
};

/// The name prefix of an unfinished address file.
const DRAFT: &str = ".";

/// An error of the bridge.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BridgeError {
    #[error(transparent)]
    Command(#[from] CommandError),
    #[error(transparent)]
    Rule(#[from] RuleError),
    #[error("{0}")]
    File(PathBuf, #[source] io::Error),
    #[error("all addresses of {network}/{prefix} are taken")]
    Full { network: Ipv4Addr, prefix: u8 },
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Bridge {
    /// The name of the device.
    pub(crate) device: String,
    /// The lowest address of the network.
    pub(crate) network: Ipv4Addr,
    /// The length of the network's prefix, in bits.
    pub(crate) prefix: u8,
    /// The directory of the address files. Each is named by a reserved address and holds the cell's
    /// id.
    pub(crate) addresses: PathBuf,
}

impl Bridge {
    /// Connects a cell to the bridge, which the first cell creates. Returns the cell's address.
    pub(super) async fn attach(&self, home: &Home) -> Result<Ipv4Addr, BridgeError> {
        let dir = home.dir();
        // The address first, because the bridge exists while an address is reserved.
        let address = self.allocate(home.cell())?;
        self.raise(dir).await?;
        let (veth, netns) = (veth(home), home.netns_name());
        ip(
            None,
            &[
                &["link", "add", &veth, "type", "veth", "peer", "name", DEVICE, "netns", &netns],
                &["link", "set", &veth, "master", &self.device, "up"],
            ],
            dir,
        )
        .await?;
        let (own, gateway) = (format!("{address}/{}", self.prefix), self.gateway().to_string());
        ip(
            Some(&netns),
            &[
                &["address", "add", &own, "dev", DEVICE],
                &["link", "set", DEVICE, "up"],
                &["route", "add", "default", "via", &gateway],
            ],
            dir,
        )
        .await?;
        Ok(address)
    }

    /// Disconnects a cell from the bridge, which the last cell removes. May be repeated.
    pub(super) async fn detach(&self, home: &Home) -> Result<(), BridgeError> {
        let veth = veth(home);
        if exists(&veth).map_err(devices)? {
            ip(None, &[&["link", "delete", &veth]], home.dir()).await?;
        }
        let (own, others): (Vec<_>, Vec<_>) =
            self.taken()?.into_iter().partition(|(_, cell)| cell == home.cell());
        if others.is_empty() {
            self.raze(home.dir()).await?;
        }
        for path in own.into_iter().map(|(path, _)| path).chain([self.draft(home.cell())]) {
            remove_if_there(&path).map_err(|error| BridgeError::File(path, error))?;
        }
        // The bridge stays while other cells have addresses.
        let _ = fs::remove_dir(&self.addresses);
        Ok(())
    }

    fn gateway(&self) -> Ipv4Addr {
        Ipv4Addr::from_bits(self.network.to_bits() + 1)
    }

    pub(super) fn subnet(&self) -> String {
        format!("{}/{}", self.network, self.prefix)
    }

    fn chain(&self) -> String {
        format!("KIYOT-{}", self.device)
    }

    /// Creates the missing parts of the bridge.
    async fn raise(&self, dir: &Path) -> Result<(), BridgeError> {
        if !exists(&self.device).map_err(devices)? {
            ip(None, &[&["link", "add", &self.device, "type", "bridge"]], dir).await?;
        }
        let gateway = format!("{}/{}", self.gateway(), self.prefix);
        ip(
            None,
            &[
                &["address", "replace", &gateway, "dev", &self.device],
                &["link", "set", &self.device, "up"],
            ],
            dir,
        )
        .await?;
        let forward = Path::new("/proc/sys/net/ipv4/ip_forward");
        let file = |error| BridgeError::File(forward.to_owned(), error);
        if fs::read_to_string(forward).map_err(file)?.trim() != "1" {
            fs::write(forward, "1").map_err(file)?;
        }
        for rule in self.rules() {
            rule.ensure(Some(dir)).await?;
        }
        Ok(())
    }

    /// Removes the bridge and its rules. Succeeds if parts are absent.
    async fn raze(&self, dir: &Path) -> Result<(), BridgeError> {
        for rule in self.rules() {
            rule.remove(Some(dir)).await?;
        }
        if exists(&self.device).map_err(devices)? {
            ip(None, &[&["link", "delete", &self.device]], dir).await?;
        }
        Ok(())
    }

    /// Returns the rules, which masquerade traffic to other networks and forward traffic of the
    /// bridge whatever the policy is.
    fn rules(&self) -> [Rules; 2] {
        let (chain, subnet, device) = (self.chain(), self.subnet(), self.device.clone());
        [
            Rules {
                family: Family::V4,
                table: "nat",
                chains: vec![Chain {
                    jumps: vec![words(&format!(
                        "POSTROUTING -s {subnet} ! -d {subnet} -j {chain}"
                    ))],
                    content: vec![words(&format!("{chain} ! -o {device} -j MASQUERADE"))],
                    name: chain.clone(),
                }],
            },
            Rules {
                family: Family::V4,
                table: "filter",
                chains: vec![Chain {
                    jumps: vec![words(&format!("FORWARD -j {chain}"))],
                    content: vec![
                        words(&format!("{chain} -i {device} -j ACCEPT")),
                        words(&format!("{chain} -o {device} -j ACCEPT")),
                    ],
                    name: chain,
                }],
            },
        ]
    }

    /// Reserves the lowest free address for a cell. The network's, the bridge's and the broadcast
    /// address are never free.
    fn allocate(&self, cell: &str) -> Result<Ipv4Addr, BridgeError> {
        let failed = |path: &Path, error| BridgeError::File(path.to_owned(), error);
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&self.addresses)
            .map_err(|error| failed(&self.addresses, error))?;
        // Written under another name first, so that the file of an address is complete or absent.
        let draft = self.draft(cell);
        // Synced, because an address file that a power failure has emptied would never be released.
        let written = File::create(&draft)
            .and_then(|mut file| file.write_all(cell.as_bytes()).and_then(|()| file.sync_data()));
        written.map_err(|error| failed(&draft, error))?;
        let size = 1_u32.checked_shl(32 - u32::from(self.prefix)).unwrap_or(u32::MAX);
        let mut taken = None;
        for host in 2..size.saturating_sub(1) {
            let address = Ipv4Addr::from_bits(self.network.to_bits() + host);
            let path = self.addresses.join(address.to_string());
            match fs::hard_link(&draft, &path) {
                Ok(()) => {
                    taken = Some(address);
                    break;
                }
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(failed(&path, error)),
            }
        }
        remove_if_there(&draft).map_err(|error| failed(&draft, error))?;
        taken.ok_or(BridgeError::Full { network: self.network, prefix: self.prefix })
    }

    /// Returns the path of a cell's unfinished address file.
    fn draft(&self, cell: &str) -> PathBuf {
        self.addresses.join(format!("{DRAFT}{cell}"))
    }

    /// Returns the address files with their cells. Skips unfinished files, which a killed daemon or
    /// a full disk left.
    fn taken(&self) -> Result<Vec<(PathBuf, String)>, BridgeError> {
        let failed = |error| BridgeError::File(self.addresses.clone(), error);
        let entries = match fs::read_dir(&self.addresses) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(failed(error)),
        };
        let mut taken = Vec::new();
        for entry in entries {
            let entry = entry.map_err(failed)?;
            if entry.file_name().as_encoded_bytes().starts_with(DRAFT.as_bytes()) {
                continue;
            }
            let path = entry.path();
            let cell = fs::read_to_string(&path)
                .map_err(|error| BridgeError::File(path.clone(), error))?;
            taken.push((path, cell));
        }
        Ok(taken)
    }
}

fn devices(error: io::Error) -> BridgeError {
    BridgeError::File("/proc/thread-self/net/dev".into(), error)
}

/// Returns whether a network device exists. (`/sys` may show another network namespace.)
fn exists(device: &str) -> io::Result<bool> {
    let devices = fs::read_to_string("/proc/thread-self/net/dev")?;
    Ok(devices
        .lines()
        .any(|line| line.split_once(':').is_some_and(|(name, _)| name.trim() == device)))
}

/// Returns the name of a cell's link on the node: the random part of the cell's id, because a
/// device name has at most 15 bytes.
fn veth(home: &Home) -> String {
    format!("kv{}", home.cell().trim_start_matches("cell-"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bridge(dir: &Path, prefix: u8) -> Bridge {
        Bridge {
            device: "kiyot0".into(),
            network: Ipv4Addr::new(10, 9, 8, 0),
            prefix,
            addresses: dir.join("addresses"),
        }
    }

    #[test]
    fn released_address_is_reserved_again() {
        let dir = tempfile::tempdir().unwrap();
        let bridge = bridge(dir.path(), 29);
        let given: Vec<_> = (0..5)
            .map(|cell| bridge.allocate(&format!("cell-{cell}")).unwrap().to_string())
            .collect();
        assert_eq!(given, ["10.9.8.2", "10.9.8.3", "10.9.8.4", "10.9.8.5", "10.9.8.6"]);
        assert_eq!(
            bridge.allocate("one more").unwrap_err().to_string(),
            "all addresses of 10.9.8.0/29 are taken"
        );
        let (path, cell) = bridge
            .taken()
            .unwrap()
            .into_iter()
            .find(|(path, _)| path.ends_with("10.9.8.4"))
            .unwrap();
        assert_eq!(cell, "cell-2");
        fs::remove_file(path).unwrap();
        assert_eq!(bridge.allocate("one more").unwrap().to_string(), "10.9.8.4");
        assert_eq!(bridge.taken().unwrap().len(), 5, "no draft is left");
    }

    /// Verifies Y46.
    #[test]
    fn unfinished_address_file_is_skipped() {
        let dir = tempfile::tempdir().unwrap();
        let bridge = bridge(dir.path(), 29);
        bridge.allocate("cell-1").unwrap();
        // An empty file, as a killed daemon or a full disk leaves it.
        fs::write(bridge.draft("cell-2"), "").unwrap();
        let taken: Vec<_> = bridge.taken().unwrap().into_iter().map(|(_, cell)| cell).collect();
        assert_eq!(taken, ["cell-1"], "a file without a cell would keep the bridge for ever");
    }

    #[test]
    fn concurrent_reservations_get_distinct_addresses() {
        let dir = tempfile::tempdir().unwrap();
        let bridge = bridge(dir.path(), 24);
        let given = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8)
                .map(|thread| {
                    scope.spawn({
                        let bridge = &bridge;
                        move || {
                            (0..10)
                                .map(|n| bridge.allocate(&format!("{thread}-{n}")).unwrap())
                                .collect::<Vec<_>>()
                        }
                    })
                })
                .collect();
            threads
                .into_iter()
                .flat_map(|thread| thread.join().unwrap())
                .collect::<std::collections::BTreeSet<_>>()
        });
        assert_eq!(given.len(), 80);
    }

    #[test]
    fn existing_device_is_found_by_name() {
        assert!(exists("lo").unwrap());
        assert!(!exists("l").unwrap() && !exists("no-such-device").unwrap());
    }

    #[test]
    fn rules_have_the_bridge_and_its_network() {
        let bridge = bridge(Path::new("/x"), 24);
        assert_eq!(bridge.gateway().to_string(), "10.9.8.1");
        let [nat, filter] = bridge.rules();
        assert_eq!(
            nat.chains[0].jumps[0].join(" "),
            "POSTROUTING -s 10.9.8.0/24 ! -d 10.9.8.0/24 -j KIYOT-kiyot0"
        );
        assert_eq!(filter.chains[0].content.len(), 2);
    }
}
