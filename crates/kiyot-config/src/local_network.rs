//! The network of cells on this node, in the tables of the providers that make them.

use std::path::PathBuf;

use kiyot_values::cidr::Cidr;
use kiyot_values::problems::{Problem, Table};

use super::read;

const CNI_CONF_DIR: &str = "/etc/cni/net.d";
const CNI_BIN_DIRS: [&str; 2] = ["/opt/cni/bin", "/usr/lib/cni"];
const BRIDGE: &str = "kiyot0";
/// Longest name of a network device, in bytes: Linux's `IFNAMSIZ` without the NUL.
const BRIDGE_BYTES: usize = 15;
const SUBNET: Cidr = Cidr::v4([10, 200, 0, 0], 16);
/// Range of a subnet's prefix, in bits: at least the bridge and one cell.
const SUBNET_BITS: std::ops::RangeInclusive<u8> = 8..=30;

/// The network of cells on this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocalNetwork {
    /// Directory of the node's CNI configuration. Without a configuration cells get addresses of
    /// `subnet` on `bridge`.
    pub cni_conf_dir: PathBuf,
    /// Directories of CNI plugins; the first with a plugin wins.
    pub cni_bin_dirs: Vec<PathBuf>,
    /// Bridge made without a CNI configuration.
    pub bridge: String,
    /// IPv4 addresses of cells without a CNI configuration.
    pub subnet: Cidr,
}

impl Default for LocalNetwork {
    fn default() -> Self {
        Self {
            cni_conf_dir: CNI_CONF_DIR.into(),
            cni_bin_dirs: CNI_BIN_DIRS.map(PathBuf::from).into(),
            bridge: BRIDGE.into(),
            subnet: SUBNET,
        }
    }
}

impl LocalNetwork {
    /// Reads the keys of the network from a provider's table.
    pub(super) fn read(table: &mut Table<'_>) -> Self {
        let mut network = Self::default();
        table.set("cni_conf_dir", &mut network.cni_conf_dir, read::path);
        table.set("cni_bin_dirs", &mut network.cni_bin_dirs, |field| {
            Some(field.items().into_iter().filter_map(read::path).collect())
        });
        table.set("bridge", &mut network.bridge, |field| {
            field.read(
                &format!(
                    "the name of a network device: at most {BRIDGE_BYTES} letters, digits and \
                     -_., and neither - nor . first"
                ),
                |text| is_device(text).then(|| text.to_owned()),
            )
        });
        table.set("subnet", &mut network.subnet, |field| {
            field.parsed("an IPv4 network such as \"10.200.0.0/16\", without host bits")
        });
        if !network.subnet.address.is_ipv4() || !SUBNET_BITS.contains(&network.subnet.prefix) {
            let rule = format!(
                "is invalid; allowed: an IPv4 network with a prefix from /{} to /{}",
                SUBNET_BITS.start(),
                SUBNET_BITS.end()
            );
            table.report().add(Problem::with_value(
                table.path_of("subnet"),
                format!("\"{}\"", network.subnet),
                rule,
            ));
        }
        network
    }
}

/// Returns whether a name is valid for a network device. Linux accepts more, but commands read a
/// "-" at the start as an option, and iptables a "+" at the end as any device with this prefix.
fn is_device(name: &str) -> bool {
    (1..=BRIDGE_BYTES).contains(&name.len())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
        && !name.starts_with(['-', '.'])
}
