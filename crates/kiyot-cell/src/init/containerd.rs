//! Configuration of the cell's containerd, in version 2, which containerd 1.6 reads and 2.x
//! migrates.

use std::{fmt::Write, path::Path};

use kiyot_link::bootstrap::CellFile;

use crate::dirs::CellDir;

/// Socket of containerd, on the cell's own /run.
pub const SOCKET: &str = "/run/containerd/containerd.sock";
/// containerd's `state` directory.
const STATE: &str = "/run/containerd";
/// Interval in seconds at which containerd measures writable layers. Together with the heartbeat
/// interval, the kubelet's numbers stay younger than 15 s.
const STATS_PERIOD_SECONDS: u32 = 8;
/// Plugins that would use resources of the host, or have no use in a cell. CRI needs services, not
/// their gRPC interfaces; the agent calls only the interfaces of content, events, images, leases
/// and snapshots. The time in which containerd orders its plugins grows faster than their number.
const DISABLED_PLUGINS: [&str; 15] = [
    "io.containerd.grpc.v1.containers",
    "io.containerd.grpc.v1.diff",
    "io.containerd.grpc.v1.healthcheck",
    "io.containerd.grpc.v1.namespaces",
    "io.containerd.grpc.v1.tasks",
    "io.containerd.grpc.v1.version",
    "io.containerd.internal.v1.restart",
    "io.containerd.monitor.v1.cgroups",
    "io.containerd.nri.v1.nri",
    "io.containerd.snapshotter.v1.aufs",
    "io.containerd.snapshotter.v1.btrfs",
    "io.containerd.snapshotter.v1.devmapper",
    "io.containerd.snapshotter.v1.zfs",
    "io.containerd.internal.v1.tracing",
    "io.containerd.tracing.processor.v1.otlp",
];

/// Plugin of containerd that creates the file systems of containers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Snapshotter {
    /// For a disk that can hold the upper layer of an overlay.
    Overlayfs,
    /// For other disks.
    Native,
}

impl Snapshotter {
    /// Returns the name in containerd's configuration.
    pub fn name(self) -> &'static str {
        match self {
            Self::Overlayfs => "overlayfs",
            Self::Native => "native",
        }
    }

    fn other(self) -> Self {
        match self {
            Self::Overlayfs => Self::Native,
            Self::Native => Self::Overlayfs,
        }
    }
}

/// Inputs of the configuration.
#[derive(Debug, Clone, Copy)]
pub struct Settings<'a> {
    /// Settings from the provider.
    pub file: &'a CellFile,
    /// Paths of the cell.
    pub dir: &'a CellDir,
    /// Port of the streaming server.
    pub stream_port: u16,
    /// The snapshotter that works on the cell's disk.
    pub snapshotter: Snapshotter,
}

impl Settings<'_> {
    /// Returns the content of containerd.toml.
    pub fn render(&self) -> String {
        let Self { file, dir, stream_port, snapshotter } = self;
        let unused = format!("io.containerd.snapshotter.v1.{}", snapshotter.other().name());
        let disabled = DISABLED_PLUGINS.into_iter().chain([unused.as_str()]).map(toml_string);
        let disabled = disabled.collect::<Vec<_>>().join(", ");
        let snapshotter = toml_string(snapshotter.name());
        let registry = file.registry_config_dir.as_ref().map(|dir| {
            format!(
                "[plugins.\"io.containerd.grpc.v1.cri\".registry]\n  config_path = {}\n",
                toml_path(dir)
            )
        });
        let cri = &file.cri;
        let drain = match &*cri.drain_exec_sync_io_timeout {
            "" => String::new(),
            timeout => format!("  drain_exec_sync_io_timeout = {}\n", toml_string(timeout)),
        };
        let base_spec = if cri.rlimits.is_empty() {
            String::new()
        } else {
            format!("  base_runtime_spec = {}\n", toml_path(&dir.base_spec()))
        };
        let mut toml = String::new();
        // Writing to a string does not fail.
        let _ = write!(
            toml,
            r#"version = 2
root = {root}
state = {state}
disabled_plugins = [{disabled}]

[grpc]
  address = {socket}

[debug]
  level = "warn"

# 0 is a fixed period of a second. Otherwise the period is 49 times the mean length of a collection:
# here, with metadata in memory, some milliseconds, for as long as the cell lives.
[plugins."io.containerd.gc.v1.scheduler"]
  pause_threshold = 0.0

[plugins."io.containerd.internal.v1.opt"]
  path = {opt}

[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = {pause}
  restrict_oom_score_adj = {restrict}
  stream_server_address = "127.0.0.1"
  stream_server_port = "{stream_port}"
  enable_tls_streaming = false
  max_container_log_line_size = {line_bytes}
  ignore_image_defined_volumes = {ignore_volumes}
  stats_collect_period = {STATS_PERIOD_SECONDS}
{drain}
# Without a conf_dir to watch, the CRI plugin of containerd 1.6 stops.
[plugins."io.containerd.grpc.v1.cri".cni]
  bin_dir = {no_cni}
  conf_dir = {no_cni}

[plugins."io.containerd.grpc.v1.cri".containerd]
  snapshotter = {snapshotter}
  default_runtime_name = "runc"
  discard_unpacked_layers = false

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
{base_spec}
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
  BinaryName = {runc}
  SystemdCgroup = false

{registry}"#,
            root = toml_path(&dir.containerd_root()),
            state = toml_string(STATE),
            socket = toml_string(SOCKET),
            opt = toml_path(&dir.containerd_opt()),
            pause = toml_string(&file.pause_image),
            restrict = file.restrict_oom_score_adj,
            line_bytes = cri.max_container_log_line_size,
            ignore_volumes = cri.ignore_image_defined_volumes,
            no_cni = toml_path(&dir.no_cni()),
            runc = toml_path(&file.runc),
            registry = registry.unwrap_or_default(),
        );
        toml
    }
}

/// Returns a TOML basic string.
fn toml_string(value: &str) -> String {
    let mut quoted = String::from("\"");
    for character in value.chars() {
        match character {
            '"' | '\\' => quoted.extend(['\\', character]),
            control if control.is_control() => {
                let _ = write!(quoted, "\\u{:04X}", u32::from(control));
            }
            plain => quoted.push(plain),
        }
    }
    quoted.push('"');
    quoted
}

fn toml_path(value: &Path) -> String {
    toml_string(&value.to_string_lossy())
}

#[cfg(test)]
mod tests {
    use kiyot_link::{
        bootstrap::{Bootstrap, GatewayAddress},
        cri_settings::{CriSettings, Rlimit},
    };

    use super::*;

    fn file() -> CellFile {
        let gateway = GatewayAddress::Unix("/gateway.sock".into());
        CellFile {
            bootstrap: Bootstrap {
                cell: "c".into(),
                gateway,
                ca_sha256: String::new(),
                token: "secret-token".into(),
                orphan_timeout_secs: 1,
                agent: None,
            },
            containerd: "containerd".into(),
            runc: "/usr/sbin/runc".into(),
            pause_image: "registry.example/pause:1".into(),
            registry_config_dir: Some("/etc/certs \"d\"".into()),
            restrict_oom_score_adj: true,
            cri: CriSettings::default(),
            machine: None,
        }
    }

    #[test]
    fn configuration_has_the_settings_and_no_secret() {
        let temp = tempfile::tempdir().unwrap();
        let dir = CellDir::open(temp.path()).unwrap();
        let toml = Settings {
            file: &file(),
            dir: &dir,
            stream_port: 4321,
            snapshotter: Snapshotter::Overlayfs,
        }
        .render();
        for line in [
            "version = 2",
            "sandbox_image = \"registry.example/pause:1\"",
            "stream_server_port = \"4321\"",
            "restrict_oom_score_adj = true",
            "snapshotter = \"overlayfs\"",
            "\"io.containerd.snapshotter.v1.native\"]",
            "config_path = \"/etc/certs \\\"d\\\"\"",
            "BinaryName = \"/usr/sbin/runc\"",
            "pause_threshold = 0.0",
            "max_container_log_line_size = 16384",
            "ignore_image_defined_volumes = false",
        ] {
            assert!(toml.contains(line), "{line} is missing in\n{toml}");
        }
        assert!(!toml.contains("secret-token"));
        assert!(!toml.contains("base_runtime_spec") && !toml.contains("drain_exec"), "{toml}");
        let native = Settings {
            file: &CellFile { registry_config_dir: None, ..file() },
            dir: &dir,
            stream_port: 1,
            snapshotter: Snapshotter::Native,
        }
        .render();
        assert!(native.contains("snapshotter = \"native\"") && !native.contains("config_path"));
    }

    /// Verifies U27.
    #[test]
    fn configuration_has_the_settings_of_the_node() {
        let temp = tempfile::tempdir().unwrap();
        let dir = CellDir::open(temp.path()).unwrap();
        let cri = CriSettings {
            max_container_log_line_size: -1,
            drain_exec_sync_io_timeout: "5s".into(),
            ignore_image_defined_volumes: true,
            rlimits: vec![Rlimit { name: "RLIMIT_NOFILE".into(), hard: 2048, soft: 1024 }],
        };
        let toml = Settings {
            file: &CellFile { cri: cri.clone(), ..file() },
            dir: &dir,
            stream_port: 1,
            snapshotter: Snapshotter::Overlayfs,
        }
        .render();
        for line in [
            "max_container_log_line_size = -1",
            "drain_exec_sync_io_timeout = \"5s\"",
            "ignore_image_defined_volumes = true",
            &format!("base_runtime_spec = {}", toml_path(&dir.base_spec())),
        ] {
            assert!(toml.contains(line), "{line} is missing in\n{toml}");
        }
        let base = super::super::base_spec::render(&cri.rlimits);
        let limits = r#""rlimits":[{"hard":2048,"soft":1024,"type":"RLIMIT_NOFILE"}]"#;
        assert!(base.contains(limits), "{base}");
    }

    #[test]
    fn toml_string_is_escaped() {
        assert_eq!(toml_string("a\"b\\c\n\u{7f}"), "\"a\\\"b\\\\c\\u000A\\u007F\"");
    }
}
