//! Settings of the node's CRI plugin (containerd), from CRI's `Status`, that also hold for pods in
//! cells. Pure.

use std::{collections::BTreeMap, path::PathBuf};

use kiyot_link::cri_settings::{CriSettings, Rlimit};
use kiyot_proto::cri;
use serde::Deserialize;

/// Most bytes of a duration in Go's form.
const MAX_DURATION_BYTES: usize = 32;
/// Part of the names of pause images.
const PAUSE: &str = "pause";
/// Units of a duration in Go's form.
const UNITS: [&str; 7] = ["ns", "us", "µs", "ms", "s", "m", "h"];
/// Names of resource limits (setrlimit(2)), without their prefix. A spec has each once.
const RLIMITS: [&str; 16] = [
    "AS",
    "CORE",
    "CPU",
    "DATA",
    "FSIZE",
    "LOCKS",
    "MEMLOCK",
    "MSGQUEUE",
    "NICE",
    "NOFILE",
    "NPROC",
    "RSS",
    "RTPRIO",
    "RTTIME",
    "SIGPENDING",
    "STACK",
];

/// The node's settings for pods in cells.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeSettings {
    /// Settings for the containerd of a cell on the node.
    pub cri: CriSettings,
    /// Pods listen on ports below 1024 without a privilege (`enable_unprivileged_ports`).
    unprivileged_ports: bool,
    /// Pods send ICMP echo requests without a privilege (`enable_unprivileged_icmp`).
    unprivileged_icmp: bool,
}

/// The settings until the node's containerd discloses its own: the defaults of containerd 2.
impl Default for NodeSettings {
    fn default() -> Self {
        Self { cri: CriSettings::default(), unprivileged_ports: true, unprivileged_icmp: true }
    }
}

/// containerd's configuration (1.6 to 2.x, internal/cri/config).
#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Plugin {
    #[serde(rename = "maxContainerLogSize")]
    max_container_log_line_size: Option<i64>,
    #[serde(rename = "drainExecSyncIOTimeout")]
    drain_exec_sync_io_timeout: String,
    ignore_image_defined_volumes: bool,
    enable_unprivileged_ports: Option<bool>,
    #[serde(rename = "enableUnprivilegedICMP")]
    enable_unprivileged_icmp: Option<bool>,
    containerd: Containerd,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Containerd {
    default_runtime_name: String,
    runtimes: Option<BTreeMap<String, Runtime>>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Runtime {
    base_runtime_spec: PathBuf,
}

#[derive(Deserialize)]
struct Spec {
    process: Option<Process>,
}

#[derive(Deserialize)]
struct Process {
    rlimits: Option<Vec<Rlimit>>,
}

impl NodeSettings {
    /// Parses the JSON of the node's configuration. Absent settings have their defaults. Returns
    /// the settings without resource limits, and the path of the file with the limits.
    ///
    /// # Errors
    /// Line and column of the first setting with a wrong type.
    pub(super) fn parse(json: &str) -> Result<(Self, Option<PathBuf>), (usize, usize)> {
        let plugin: Plugin =
            serde_json::from_str(json).map_err(|error| (error.line(), error.column()))?;
        let default = Self::default();
        let drain = Some(plugin.drain_exec_sync_io_timeout).filter(|text| is_duration(text));
        let cri = CriSettings {
            max_container_log_line_size: plugin
                .max_container_log_line_size
                .unwrap_or(default.cri.max_container_log_line_size),
            drain_exec_sync_io_timeout: drain.unwrap_or_default(),
            ignore_image_defined_volumes: plugin.ignore_image_defined_volumes,
            rlimits: Vec::new(),
        };
        let settings = Self {
            cri,
            unprivileged_ports: plugin
                .enable_unprivileged_ports
                .unwrap_or(default.unprivileged_ports),
            unprivileged_icmp: plugin.enable_unprivileged_icmp.unwrap_or(default.unprivileged_icmp),
        };
        let Containerd { default_runtime_name, runtimes } = plugin.containerd;
        let runtime = runtimes.and_then(|mut runtimes| runtimes.remove(&default_runtime_name));
        let base = runtime.map(|runtime| runtime.base_runtime_spec);
        Ok((settings, base.filter(|path| !path.as_os_str().is_empty())))
    }

    /// Sets the resource limits of an OCI runtime spec.
    ///
    /// # Errors
    /// The reason why the spec has no usable limits.
    pub(super) fn set_rlimits(&mut self, spec: &[u8]) -> Result<(), String> {
        let spec: Spec = serde_json::from_slice(spec).map_err(|error| {
            format!("invalid JSON at line {}, column {}", error.line(), error.column())
        })?;
        let rlimits = spec.process.and_then(|process| process.rlimits).unwrap_or_default();
        let mut unseen = RLIMITS.to_vec();
        for Rlimit { name, hard, soft } in &rlimits {
            let known = unseen.iter().position(|known| name.strip_prefix("RLIMIT_") == Some(known));
            let Some(at) = known else {
                return Err("unknown or repeated resource limit; allowed: limits of \
                            setrlimit(2), each once"
                    .to_owned());
            };
            if soft > hard {
                return Err(format!(
                    "{name}: soft limit {soft}; allowed: at most {hard}, the hard"
                ));
            }
            unseen.remove(at);
        }
        self.cri.rlimits = rlimits;
        Ok(())
    }

    /// Returns the sysctls that containerd sets in a pod's own network namespace, but not in the
    /// host's.
    pub fn sysctls(&self) -> impl Iterator<Item = (&'static str, &'static str)> {
        let ports = ("net.ipv4.ip_unprivileged_port_start", "0");
        let icmp = ("net.ipv4.ping_group_range", "0 2147483647");
        let ports = self.unprivileged_ports.then_some(ports);
        ports.into_iter().chain(self.unprivileged_icmp.then_some(icmp))
    }
}

/// Returns the sandbox image in the JSON of the node's configuration (containerd 1.x).
pub(super) fn sandbox_image(json: &str) -> Option<String> {
    #[derive(Deserialize)]
    struct Images {
        #[serde(rename = "sandboxImage")]
        sandbox: String,
    }
    let Images { sandbox } = serde_json::from_str(json).ok()?;
    Some(sandbox).filter(|name| !name.is_empty())
}

/// Returns the pause image among the node's images. containerd 2 does not disclose its name but
/// pins it. Other software may pin further images.
pub(super) fn pinned_pause(images: &[cri::Image]) -> Option<String> {
    let is_pause = |name: &&String| {
        let last = name.rsplit('/').next().unwrap_or_default();
        last.split([':', '@']).next().is_some_and(|last| last.contains(PAUSE))
    };
    let pinned = images.iter().filter(|image| image.pinned);
    // Earlier versions may have left several; any of them will do.
    pinned.flat_map(|image| image.repo_tags.iter().find(is_pause)).min().cloned()
}

/// Returns whether a text is a duration in Go's form other than 0, such as "1m30s". With any other
/// text, the cell's containerd does not start.
fn is_duration(mut text: &str) -> bool {
    if text.len() > MAX_DURATION_BYTES {
        return false;
    }
    let mut is_positive = false;
    while !text.is_empty() {
        let after = text.trim_start_matches(|c: char| c.is_ascii_digit() || c == '.');
        let number = text[..text.len() - after.len()].parse::<f64>();
        let unit = UNITS.into_iter().find_map(|unit| after.strip_prefix(unit));
        let (Ok(number), Some(rest)) = (number, unit) else { return false };
        is_positive |= number > 0.0;
        text = rest;
    }
    is_positive
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Verifies U27.
    #[test]
    fn settings_of_the_node_are_parsed() {
        let json = r#"{"maxContainerLogSize": -1, "drainExecSyncIOTimeout": "1m30s",
            "ignoreImageDefinedVolumes": true, "enableUnprivilegedPorts": false,
            "enableUnprivilegedICMP": true, "containerd": {"defaultRuntimeName": "runc",
            "runtimes": {"kata": {"baseRuntimeSpec": "/other"},
            "runc": {"baseRuntimeSpec": "/etc/containerd/base.json"}}}, "registry": 7}"#;
        let (mut settings, base) = NodeSettings::parse(json).unwrap();
        assert_eq!(base, Some("/etc/containerd/base.json".into()));
        let spec =
            br#"{"process": {"rlimits": [{"type": "RLIMIT_NOFILE", "hard": 9, "soft": 8}]}}"#;
        settings.set_rlimits(spec).unwrap();
        let expected = CriSettings {
            max_container_log_line_size: -1,
            drain_exec_sync_io_timeout: "1m30s".into(),
            ignore_image_defined_volumes: true,
            rlimits: vec![Rlimit { name: "RLIMIT_NOFILE".into(), hard: 9, soft: 8 }],
        };
        assert_eq!(settings.cri, expected);
        let sysctls: Vec<_> = settings.sysctls().map(|(name, _)| name).collect();
        assert_eq!(sysctls, ["net.ipv4.ping_group_range"]);
    }

    #[test]
    fn absent_settings_and_unusable_durations_have_their_defaults() {
        for json in [
            "{}",
            r#"{"containerd": {"defaultRuntimeName": "runc", "runtimes": null}}"#,
            r#"{"drainExecSyncIOTimeout": "0s"}"#,
            r#"{"drainExecSyncIOTimeout": "soon"}"#,
            r#"{"drainExecSyncIOTimeout": "5"}"#,
        ] {
            assert_eq!(NodeSettings::parse(json), Ok((NodeSettings::default(), None)), "{json}");
        }
    }

    /// Verifies I29.
    #[test]
    fn pause_image_of_the_node_is_found_in_its_configuration_or_among_pinned_images() {
        let of_file = |image: &str| sandbox_image(&format!(r#"{{"sandboxImage": {image}}}"#));
        assert_eq!(of_file(r#""k8s.example/pause:3.8""#), Some("k8s.example/pause:3.8".into()));
        for image in [r#""""#, "7", "null"] {
            assert_eq!(of_file(image), None, "{image}");
        }
        assert_eq!((sandbox_image("{}"), sandbox_image("no JSON")), (None, None));

        let image = |name: &str, pinned| cri::Image {
            repo_tags: vec![name.to_owned()],
            pinned,
            ..Default::default()
        };
        let mut images = vec![
            image("k8s.example/pause:3.9", false),
            image("pause.example:5000/app:1", true),
            cri::Image { pinned: true, ..Default::default() },
        ];
        assert_eq!(pinned_pause(&images), None);
        images.push(image("k8s.example/mirrored-pause:3.10", true));
        assert_eq!(pinned_pause(&images), Some("k8s.example/mirrored-pause:3.10".into()));
    }

    #[test]
    fn base_spec_without_usable_limits_changes_nothing() {
        let with = |limits: &str| format!(r#"{{"process": {{"rlimits": [{limits}]}}}}"#);
        let limit =
            |name: &str, hard: u64| format!(r#"{{"type": "{name}", "hard": {hard}, "soft": 5}}"#);
        let twice = format!("{0}, {0}", limit("RLIMIT_CPU", 5));
        for spec in [
            "{".to_owned(),
            with(&limit("RLIMIT_MAGIC", 5)),
            with(&limit("NOFILE", 5)),
            with(&limit("RLIMIT_NOFILE", 4)),
            with(&twice),
        ] {
            let mut settings = NodeSettings::default();
            assert!(settings.set_rlimits(spec.as_bytes()).is_err(), "{spec}");
            assert_eq!(settings, NodeSettings::default());
        }
        let mut settings = NodeSettings::default();
        assert_eq!(settings.set_rlimits(b"{}"), Ok(()));
    }
}
