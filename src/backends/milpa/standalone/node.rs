//! The node of standalone pods, in the place of a kubelet's.

use std::path::Path;

use jiff::Timestamp;

use crate::{
    manifest::{Dns, Node},
    resolv_conf::ResolvConf,
};

/// The directory of logs.
pub(super) const LOGS: &str = "logs";

/// Returns the node's name servers and search domains.
pub(super) fn dns() -> Dns {
    let ResolvConf { servers, searches, options } = ResolvConf::of_node();
    Dns { servers: servers.iter().map(ToString::to_string).collect(), searches, options }
}

/// Returns the node for a pod that was created at a time.
pub(super) fn node(dir: &Path, dns: Dns, created_unix_nanos: i64) -> Node {
    let seen = Timestamp::from_nanosecond(created_unix_nanos.into()).unwrap_or_default();
    Node {
        kubelet_dir: dir.to_owned(),
        pod_logs_dir: dir.join(LOGS),
        dns,
        seen: seen.to_string(),
        ..Node::default()
    }
}
