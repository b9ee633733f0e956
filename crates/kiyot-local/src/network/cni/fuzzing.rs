//! Fuzz targets of the node's CNI configuration and of the results of plugins.

use std::{net::IpAddr, path::Path};

use serde_json::Value;

use crate::network::{
    DEVICE,
    cni::{Network, plugin_type, result},
};

/// Reads a configuration and what a plugin answers. A configuration comes back as it was from where
/// it is kept; addresses are some, not many, and those of IPv4 first; subnets are such as
/// `iptables` takes; a refusal says something.
///
/// # Panics
/// If not.
pub fn cni(bytes: &[u8]) {
    for name in ["a.conflist", "a.conf"] {
        let Ok(Some(network)) =
            Network::parse(Path::new(name), bytes, &["/no/such/directory".into()])
        else {
            continue;
        };
        assert!(!network.name.is_empty() && !network.plugins.is_empty());
        assert!(network.plugins.iter().all(|plugin| !plugin_type(plugin).is_empty()));
        assert!(network.check().is_err(), "no plugin is anywhere but in the directories");
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
