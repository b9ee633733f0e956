//! Removes the rules that an interrupted CNI plugin left.
//!
//! The plugins `bridge` and `ptp` masquerade with a chain for each container. DEL removes the chain
//! only while the link has addresses (containernetworking/plugins, `cmdDel`): after an ADD or DEL
//! was killed halfway, the chain stays.

use std::{fmt::Write as _, net::IpAddr, path::Path};

use ring::digest::{SHA512, digest};

use crate::network::rules::{Family, RuleError, remove_chain_of_plugin};

/// The prefix of the plugins' chains.
const PREFIX: &str = "CNI-";
/// The length of a chain name of the plugins, in bytes (`pkg/utils`, `maxChainLength`).
const NAME_BYTES: usize = 28;

/// Removes the masquerading chain of a container in the families of its addresses, or in all
/// families without addresses. Succeeds if the chain is absent.
pub(super) async fn remove(
    network: &str,
    container: &str,
    addresses: &[IpAddr],
    dir: &Path,
) -> Result<(), RuleError> {
    let chain = chain_name(network, container);
    for family in Family::ALL {
        if addresses.is_empty() || addresses.iter().any(|address| Family::of(address) == family) {
            remove_chain_of_plugin(family, &chain, dir).await?;
        }
    }
    Ok(())
}

/// Returns the name of the plugins' chain for a container in a network (`FormatChainName`).
fn chain_name(network: &str, container: &str) -> String {
    let hash = digest(&SHA512, format!("{network}{container}").as_bytes());
    let mut name = PREFIX.to_owned();
    for byte in hash.as_ref() {
        // Writing to a string does not fail.
        let _ = write!(name, "{byte:02x}");
    }
    name.truncate(NAME_BYTES);
    name
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chain_name_equals_the_plugins_name() {
        // containernetworking/plugins, pkg/utils/utils_test.go.
        assert_eq!(chain_name("test", "1234"), "CNI-2bbe0c48b91a7d1b8a6753a8");
    }
}
