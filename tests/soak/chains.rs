//! Firewall chains of CNI plugins, and the sandboxes that own them.
//!
//! The plugin `bridge` removes the chain of a sandbox only while the link has addresses. A plugin
//! that was killed halfway therefore leaves its chain. Kiyot removes the chains of cells itself.
//! containerd does not: when the daemon is killed, containerd cancels the forwarded call and kills
//! the plugin.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
};

use kiyot_testkit::Node;
use ring::digest::{SHA512, digest};

/// The first plugin of each network.
const FIRST_PLUGIN: &str = "bridge";
/// The prefixes of chain names: `bridge`, `portmap`, and `portmap` of earlier versions.
const PREFIXES: [&str; 3] = ["CNI-", "CNI-DN-", "CNI-SN-"];
/// The length of a chain name, in bytes (containernetworking/plugins, `maxChainLength`).
const NAME_BYTES: usize = 28;
/// The prefix of the ids of sandboxes in cells.
const CELL_PREFIX: &str = "milpa";

/// Records the ids of all sandboxes that get a network, by containerd or by kiyot.
#[derive(Debug)]
pub(crate) struct NetworkRecorder {
    network: String,
    ids: PathBuf,
}

/// The sandboxes that had a network, by the names of their chains.
#[derive(Debug, Default)]
pub(crate) struct ChainOwners(BTreeMap<String, String>);

/// The owner of a chain.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Owner<'a> {
    /// A sandbox in a cell.
    Cell(&'a str),
    /// A sandbox of the node's containerd.
    Node(&'a str),
}

impl NetworkRecorder {
    /// Makes the node's containerd run plugins that record their sandbox. [`Self::directory`] has
    /// the same plugins for kiyot.
    pub(crate) async fn start(node: &Node) -> Self {
        let directory = Self::directory(node);
        let (plugins, own) = (Node::cni_plugins(), directory.join("bin"));
        let ids = directory.join("ids");
        fs::create_dir(&own).unwrap();
        for plugin in fs::read_dir(&plugins).unwrap() {
            let plugin = plugin.unwrap();
            symlink(plugin.path(), own.join(plugin.file_name())).unwrap();
        }
        let first = own.join(FIRST_PLUGIN);
        fs::remove_file(&first).unwrap();
        let script = format!(
            "#!/bin/sh\necho \"$CNI_CONTAINERID\" >> {}\nexec {}\n",
            ids.display(),
            plugins.join(FIRST_PLUGIN).display()
        );
        fs::write(&first, script).unwrap();
        fs::set_permissions(&first, fs::Permissions::from_mode(0o755)).unwrap();
        let file = node.directory().join("containerd.toml");
        let configuration = fs::read_to_string(&file).unwrap();
        let of = |path: &Path| format!("bin_dir = \"{}\"", path.display());
        assert!(configuration.contains(&of(&plugins)), "{configuration}");
        fs::write(&file, configuration.replace(&of(&plugins), &of(&own))).unwrap();
        node.restart_containerd().await;
        Self { network: node.name(), ids }
    }

    /// Returns the directory of the network's configuration and of the recording plugins.
    pub(crate) fn directory(node: &Node) -> PathBuf {
        node.directory().join("cni")
    }

    /// Returns the owners of all recorded chains.
    pub(crate) fn owners(&self) -> ChainOwners {
        let ids = fs::read_to_string(&self.ids).unwrap_or_default();
        ChainOwners::of(&self.network, ids.lines().filter(|id| !id.is_empty()))
    }
}

impl ChainOwners {
    /// Returns the owners of all chains that these sandboxes may have in a network.
    pub(crate) fn of<'a>(network: &str, sandboxes: impl Iterator<Item = &'a str>) -> Self {
        let named = sandboxes
            .flat_map(|id| PREFIXES.map(|prefix| (chain_name(prefix, network, id), id.to_owned())));
        Self(named.collect())
    }

    /// Returns the chain that a line names, with its owner.
    pub(crate) fn owner_in<'a>(&'a self, line: &'a str) -> Option<(&'a str, Owner<'a>)> {
        let chain = line.split([' ', ':']).find(|word| self.0.contains_key(*word))?;
        let id = self.0[chain].as_str();
        let is_cell = id.starts_with(CELL_PREFIX);
        Some((chain, if is_cell { Owner::Cell(id) } else { Owner::Node(id) }))
    }
}

/// Returns the name of a sandbox's chain (containernetworking/plugins,
/// `MustFormatChainNameWithPrefix`).
fn chain_name(prefix: &str, network: &str, sandbox: &str) -> String {
    let hash = digest(&SHA512, format!("{network}{sandbox}").as_bytes());
    let mut name = format!("{prefix}{}", hex::encode(hash));
    name.truncate(NAME_BYTES);
    name
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chain_name_equals_the_name_from_the_plugins() {
        // containernetworking/plugins, pkg/utils/utils_test.go.
        assert_eq!(chain_name("CNI-", "test", "1234"), "CNI-2bbe0c48b91a7d1b8a6753a8");
        assert_eq!(chain_name("CNI-DN-", "test", "1234"), "CNI-DN-2bbe0c48b91a7d1b8a675");
    }

    #[test]
    fn owner_of_a_chain_is_found_in_rules_and_in_empty_chains() {
        let owners = ChainOwners::of("test", ["1234", "milpa1"].into_iter());
        let chain = "CNI-2bbe0c48b91a7d1b8a6753a8";
        for line in [
            format!("+ rule nat :{chain} -"),
            format!("+ rule nat -A {chain} -d 10.88.0.0/24 -j ACCEPT"),
            format!("+ rule nat -A POSTROUTING -s 10.88.0.5/32 -j {chain}"),
        ] {
            assert_eq!(owners.owner_in(&line), Some((chain, Owner::Node("1234"))), "{line}");
        }
        let of_cell = format!("+ rule nat :{} -", chain_name("CNI-DN-", "test", "milpa1"));
        assert!(matches!(owners.owner_in(&of_cell), Some((_, Owner::Cell("milpa1")))));
        assert_eq!(owners.owner_in("+ rule nat :CNI-HOSTPORT-DNAT -"), None);
    }
}
