//! Fuzz targets of the provider's own files and of the node's files that the provider reads.

use std::{
    net::IpAddr,
    path::{Component, Path},
};

use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;

use super::{Network, plugin_type, result};
use crate::{
    cgroup,
    instance::InstanceRecord,
    network::{DEVICE, Plan},
};

/// Reads an instance's files and the node's files. A value that can be read is the same after it is
/// written and read again.
///
/// # Panics
/// If a property does not hold.
pub fn files(bytes: &[u8]) {
    kept::<InstanceRecord>(bytes);
    kept::<Plan>(bytes);
    cni(bytes);
    mounts(bytes);
}

fn kept<T: Serialize + DeserializeOwned>(bytes: &[u8]) {
    let Ok(read) = serde_json::from_slice::<T>(bytes) else { return };
    let written = |value: &T| {
        serde_json::to_vec_pretty(value).unwrap_or_else(|error| panic!("can't be written: {error}"))
    };
    let first = written(&read);
    let again = serde_json::from_slice::<T>(&first)
        .unwrap_or_else(|error| panic!("a written value can't be read: {error}"));
    assert_eq!(String::from_utf8_lossy(&written(&again)), String::from_utf8_lossy(&first));
}

/// Reads `/proc/self/mountinfo` and lines of `/proc/<pid>/cgroup`. The cgroup of each process is in
/// a mounted hierarchy.
fn mounts(bytes: &[u8]) {
    let hierarchies = cgroup::parse_hierarchies(bytes);
    for dir in cgroup::container_dirs(&hierarchies, bytes) {
        assert!(
            hierarchies.iter().any(|hierarchy| dir.starts_with(&hierarchy.mount)),
            "{}",
            dir.display()
        );
        assert!(dir.components().all(|part| part != Component::ParentDir), "{}", dir.display());
    }
}

/// Reads a configuration and a plugin's answer. A configuration is the same after it is written and
/// read again. An answer has 1 to 16 addresses, IPv4 first, and subnets that `iptables` accepts. A
/// refusal has a text.
fn cni(bytes: &[u8]) {
    for name in ["a.conflist", "a.conf"] {
        let Ok(Some(network)) =
            Network::parse(Path::new(name), bytes, &["/no/such/directory".into()])
        else {
            continue;
        };
        assert!(!network.name.is_empty() && !network.plugins.is_empty());
        assert!(network.plugins.iter().all(|plugin| !plugin_type(plugin).is_empty()));
        assert!(network.check().is_err(), "a plugin is only found in the directories");
        let again =
            serde_json::to_vec(&network).and_then(|kept| serde_json::from_slice::<Network>(&kept));
        assert_eq!(again.ok().as_ref(), Some(&network));
    }
    if let Ok(answer) = serde_json::from_slice::<Value>(bytes)
        && let Ok(addresses) = result::addresses(&answer, DEVICE)
    {
        assert!((1..=16).contains(&addresses.len()));
        assert!(addresses.is_sorted_by_key(IpAddr::is_ipv6), "{addresses:?}");
        for subnet in result::subnets(&answer) {
            let taken = subnet.split_once('/').is_some_and(|(address, bits)| {
                let most = address
                    .parse::<IpAddr>()
                    .map_or(0, |address| if address.is_ipv4() { 32 } else { 128 });
                most > 0
                    && bits.bytes().all(|byte| byte.is_ascii_digit())
                    && bits.parse::<u8>().is_ok_and(|bits| bits <= most)
            });
            assert!(taken, "{subnet:?}");
        }
    }
    if let Some(words) = result::refusal(bytes) {
        assert!(!words.is_empty() && words.chars().count() <= 2000);
    }
}
