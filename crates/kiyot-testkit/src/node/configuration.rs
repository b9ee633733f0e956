//! Configuration files of a private containerd.

use std::{
    fs,
    path::{Path, PathBuf},
};

use serde_json::json;

use super::PAUSE_IMAGE;
use crate::kubelet::CgroupDriver;

/// Bit of CAP_SYS_RESOURCE in `CapEff`.
const CAP_SYS_RESOURCE: u64 = 1 << 24;

/// Writes all configuration files beneath a directory. `network` is the number of the node's
/// network, and `discards` sets `discard_unpacked_layers`.
pub(super) fn write(
    directory: &Path,
    name: &str,
    network: u8,
    discards: bool,
) -> std::io::Result<()> {
    for sub in ["cni/net.d", "cni/state", "certs.d", "kubelet/pods", "pods"] {
        fs::create_dir_all(directory.join(sub))?;
    }
    let subnet = format!("10.88.{network}.0/24");
    let conflist = json!({
        "cniVersion": "0.4.0", "name": name,
        "plugins": [
            {
                "type": "bridge", "bridge": name, "isGateway": true, "ipMasq": true,
                "hairpinMode": true,
                "ipam": {
                    "type": "host-local", "ranges": [[{ "subnet": subnet }]],
                    "routes": [{ "dst": "0.0.0.0/0" }], "dataDir": directory.join("cni/state"),
                },
            },
            { "type": "portmap", "capabilities": { "portMappings": true } },
        ],
    });
    fs::write(directory.join("cni/net.d/10-test.conflist"), serde_json::to_vec_pretty(&conflist)?)?;
    fs::write(directory.join("containerd.toml"), containerd(directory, discards))
}

fn containerd(directory: &Path, discards: bool) -> String {
    let (at, plugins, restricted) = (directory.display(), cni_plugins(), restricts_oom_score());
    format!(
        r#"version = 2
root = "{at}/root"
state = "{at}/state"

[grpc]
address = "{at}/containerd.sock"

[debug]
level = "info"

[plugins."io.containerd.internal.v1.opt"]
path = "{at}/opt"

[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{PAUSE_IMAGE}"
restrict_oom_score_adj = {restricted}
netns_mounts_under_state_dir = true
disable_tcp_service = true
stream_server_address = "127.0.0.1"
stream_server_port = "0"

[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{plugins}"
conf_dir = "{at}/cni/net.d"

[plugins."io.containerd.grpc.v1.cri".registry]
config_path = "{at}/certs.d"

[plugins."io.containerd.grpc.v1.cri".containerd]
discard_unpacked_layers = {discards}

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
SystemdCgroup = {systemd}
"#,
        plugins = plugins.display(),
        systemd = CgroupDriver::of_machine() == CgroupDriver::Systemd,
    )
}

/// Returns the directory of the CNI plugins: upstream's if it exists, otherwise Debian's.
pub(super) fn cni_plugins() -> PathBuf {
    let upstream = Path::new("/opt/cni/bin");
    if upstream.join("bridge").exists() {
        upstream.to_owned()
    } else {
        PathBuf::from("/usr/lib/cni")
    }
}

/// Returns whether CAP_SYS_RESOURCE is missing. Without it no process can lower an OOM score, and
/// runc fails if it tries.
pub(super) fn restricts_oom_score() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let effective = status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok());
    effective.unwrap_or(0) & CAP_SYS_RESOURCE == 0
}
