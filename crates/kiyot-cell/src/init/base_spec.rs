//! Base of the OCI specs of containers with resource limits (containerd's `base_runtime_spec`).

use kiyot_link::cri_settings::Rlimit;
use serde_json::{Value, json};

/// Capabilities of a container that adds and drops no capability.
const CAPABILITIES: [&str; 14] = [
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_FSETID",
    "CAP_FOWNER",
    "CAP_MKNOD",
    "CAP_NET_RAW",
    "CAP_SETGID",
    "CAP_SETUID",
    "CAP_SETFCAP",
    "CAP_SETPCAP",
    "CAP_NET_BIND_SERVICE",
    "CAP_SYS_CHROOT",
    "CAP_KILL",
    "CAP_AUDIT_WRITE",
];

/// Returns containerd's default spec (`ctr oci spec` of 1.6 to 2.x) with these limits. A base spec
/// replaces the whole default spec.
pub fn render(rlimits: &[Rlimit]) -> String {
    let tmpfs = ["nosuid", "strictatime", "mode=755", "size=65536k"];
    let pts = ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"];
    let shm = ["nosuid", "noexec", "nodev", "mode=1777", "size=65536k"];
    let namespaces = ["pid", "ipc", "uts", "mount", "network"].map(|kind| json!({ "type": kind }));
    json!({
        "ociVersion": "1.0.2",
        "process": {
            "user": { "uid": 0, "gid": 0 },
            "cwd": "/",
            "capabilities": {
                "bounding": CAPABILITIES, "effective": CAPABILITIES, "permitted": CAPABILITIES,
            },
            "rlimits": rlimits,
            "noNewPrivileges": true,
        },
        "root": { "path": "rootfs" },
        "mounts": [
            mount("/proc", "proc", "proc", &["nosuid", "noexec", "nodev"]),
            mount("/dev", "tmpfs", "tmpfs", &tmpfs),
            mount("/dev/pts", "devpts", "devpts", &pts),
            mount("/dev/shm", "tmpfs", "shm", &shm),
            mount("/dev/mqueue", "mqueue", "mqueue", &["nosuid", "noexec", "nodev"]),
            mount("/sys", "sysfs", "sysfs", &["nosuid", "noexec", "nodev", "ro"]),
            mount("/run", "tmpfs", "tmpfs", &tmpfs),
        ],
        "linux": {
            "resources": { "devices": [{ "allow": false, "access": "rwm" }] },
            "cgroupsPath": "/default",
            "namespaces": namespaces,
        },
    })
    .to_string()
}

fn mount(destination: &str, kind: &str, source: &str, options: &[&str]) -> Value {
    json!({ "destination": destination, "type": kind, "source": source, "options": options })
}
