//! `[backends.NAME.netns]`: cells made of namespaces of this node.

use std::path::PathBuf;

use super::{Cidr, read};
use crate::problems::{Problem, Table};

const CNI_CONF_DIR: &str = "/etc/cni/net.d";
const CNI_BIN_DIRS: [&str; 2] = ["/opt/cni/bin", "/usr/lib/cni"];
const BRIDGE: &str = "kiyot0";
/// Longest name of a network device, in bytes: Linux's `IFNAMSIZ` without the NUL.
const BRIDGE_BYTES: usize = 15;
const SUBNET: Cidr = Cidr::v4([10, 200, 0, 0], 16);
/// Range of a subnet's prefix, in bits: at least the bridge and one cell.
const SUBNET_BITS: std::ops::RangeInclusive<u8> = 8..=30;
const CONTAINERD: &str = "containerd";
const RUNC: &str = "runc";

/// Cells made of namespaces of this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Netns {
    /// Program `kiyot-cell`. By default the one beside kiyot, otherwise
    /// `/usr/libexec/kiyot/kiyot-cell`.
    pub cell_binary: Option<PathBuf>,
    /// Directory of the node's CNI configuration. Without a configuration cells get addresses of
    /// `subnet` on `bridge`.
    pub cni_conf_dir: PathBuf,
    /// Directories of CNI plugins; the first with a plugin wins.
    pub cni_bin_dirs: Vec<PathBuf>,
    /// Bridge made without a CNI configuration.
    pub bridge: String,
    /// IPv4 addresses of cells without a CNI configuration.
    pub subnet: Cidr,
    /// Program containerd of cells: a name on PATH or a path.
    pub containerd: PathBuf,
    /// Program runc of cells: a name on PATH or a path.
    pub runc: PathBuf,
    /// containerd's `restrict_oom_score_adj` in cells, for nodes where containerd may not lower an
    /// OOM score.
    pub restrict_oom_score_adj: bool,
}

impl Default for Netns {
    fn default() -> Self {
        Self {
            cell_binary: None,
            cni_conf_dir: CNI_CONF_DIR.into(),
            cni_bin_dirs: CNI_BIN_DIRS.map(PathBuf::from).into(),
            bridge: BRIDGE.into(),
            subnet: SUBNET,
            containerd: CONTAINERD.into(),
            runc: RUNC.into(),
            restrict_oom_score_adj: false,
        }
    }
}

impl Netns {
    pub(super) fn read(mut table: Table<'_>) -> Self {
        let mut netns = Self::default();
        table.set("cell_binary", &mut netns.cell_binary, |field| read::path(field).map(Some));
        table.set("cni_conf_dir", &mut netns.cni_conf_dir, read::path);
        table.set("cni_bin_dirs", &mut netns.cni_bin_dirs, |field| {
            Some(field.items().into_iter().filter_map(read::path).collect())
        });
        table.set("bridge", &mut netns.bridge, |field| {
            field.read(
                &format!(
                    "the name of a network device: at most {BRIDGE_BYTES} letters, digits and \
                     -_., and neither - nor . first"
                ),
                |text| is_device(text).then(|| text.to_owned()),
            )
        });
        table.set("subnet", &mut netns.subnet, |field| {
            field.parsed("an IPv4 network such as \"10.200.0.0/16\", without host bits")
        });
        if !netns.subnet.address.is_ipv4() || !SUBNET_BITS.contains(&netns.subnet.prefix) {
            let rule = format!(
                "is invalid; allowed: an IPv4 network with a prefix from /{} to /{}",
                SUBNET_BITS.start(),
                SUBNET_BITS.end()
            );
            table.report().add(Problem::with_value(
                table.path_of("subnet"),
                format!("\"{}\"", netns.subnet),
                rule,
            ));
        }
        table.set("containerd", &mut netns.containerd, read::program);
        table.set("runc", &mut netns.runc, read::program);
        table
            .set("restrict_oom_score_adj", &mut netns.restrict_oom_score_adj, |field| field.flag());
        table.finish();
        netns
    }
}

/// Returns whether a name is one of a network device. Linux takes more, but commands would read a
/// "-" before it as an option, and iptables a "+" behind it as any device that begins so.
fn is_device(name: &str) -> bool {
    (1..=BRIDGE_BYTES).contains(&name.len())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
        && !name.starts_with(['-', '.'])
}
