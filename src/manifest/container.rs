//! Containers of a pod.

use std::collections::HashMap;

use super::{
    ContainerSecurity, Resources, VolumeDevice, VolumeMount, env, expand::expanded_bytes,
    metadata::dns_name,
};
use crate::problems::Field;

/// Fields that the kubelet implements by other calls.
const NOT_IN_THE_REQUEST: [&str; 2] = ["lifecycle", "restartPolicyRules"];

/// Fields that the kubelet or the API server implements alone.
const NOT_THE_RUNTIMES: [&str; 4] =
    ["livenessProbe", "readinessProbe", "startupProbe", "resizePolicy"];

const TERMINATION_MESSAGE_PATH: &str = "/dev/termination-log";
const TERMINATION_MESSAGE_POLICY: &str = "File";

/// Container.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Container {
    /// Name in the pod.
    pub name: String,
    /// Image, as the user names it.
    pub image: String,
    /// Command, instead of the image's entry point.
    pub command: Vec<String>,
    /// Arguments, instead of the image's.
    pub args: Vec<String>,
    /// Working directory.
    pub working_dir: String,
    /// Variables, in order; they may refer to earlier variables. A later variable of the same
    /// name wins.
    pub env: Vec<(String, String)>,
    /// Names of variables that the kubelet reads from files of volumes, with `optional`.
    pub env_in_files: Vec<(String, bool)>,
    /// Requests and limits.
    pub resources: Resources,
    /// Mounted volumes.
    pub mounts: Vec<VolumeMount>,
    /// Block volumes.
    pub devices: Vec<VolumeDevice>,
    /// `securityContext`
    pub security: ContainerSecurity,
    /// Ports.
    pub ports: Vec<Port>,
    /// `stdin`
    pub stdin: bool,
    /// `stdinOnce`
    pub stdin_once: bool,
    /// `tty`
    pub tty: bool,
    /// `terminationMessagePath`
    pub termination_message_path: String,
    /// Set if `terminationMessagePolicy` falls back to the log.
    pub termination_message_policy: String,
    /// Set for a sidecar: its own `restartPolicy` is `Always`.
    pub always_restarts: bool,
}

/// Port of a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Port {
    /// Name.
    pub name: String,
    /// Number.
    pub container_port: u16,
    /// `hostPort`; 0 if absent.
    pub host_port: u16,
    /// `hostIP`
    pub host_ip: String,
    /// Protocol.
    pub protocol: kiyot_proto::cri::Protocol,
}

impl Container {
    pub(super) fn read(field: Field<'_>) -> Option<Self> {
        let mut table = field.table()?;
        let texts = |field: Option<Field<'_>>| field.map(Field::texts).unwrap_or_default();
        let flag = |field: Option<Field<'_>>| field.and_then(Field::flag).unwrap_or_default();
        let image =
            table.need("image", "the name of an image").and_then(Field::text).unwrap_or_default();
        let policies = [("Always", ()), ("IfNotPresent", ()), ("Never", ())];
        let env = env::read(&mut table);
        let _policy = table.take("imagePullPolicy").and_then(|field| field.choice(&policies));
        let container = Self {
            name: table.need("name", "a DNS name").and_then(dns_name).unwrap_or_default(),
            image,
            command: texts(table.take("command")),
            args: texts(table.take("args")),
            working_dir: table.take("workingDir").and_then(Field::text).unwrap_or_default(),
            env: env.values,
            env_in_files: env.in_files,
            resources: table
                .take("resources")
                .and_then(Field::table)
                .map(Resources::read)
                .unwrap_or_default(),
            mounts: table
                .take("volumeMounts")
                .map(Field::items)
                .unwrap_or_default()
                .into_iter()
                .filter_map(VolumeMount::read)
                .collect(),
            devices: table
                .take("volumeDevices")
                .map(|field| field.items().into_iter().filter_map(VolumeDevice::read).collect())
                .unwrap_or_default(),
            security: table
                .take("securityContext")
                .and_then(Field::table)
                .map(ContainerSecurity::read)
                .unwrap_or_default(),
            ports: table
                .take("ports")
                .map(|field| field.items().into_iter().filter_map(Port::read).collect())
                .unwrap_or_default(),
            stdin: flag(table.take("stdin")),
            stdin_once: flag(table.take("stdinOnce")),
            tty: flag(table.take("tty")),
            termination_message_path: table
                .take("terminationMessagePath")
                .and_then(Field::text)
                .unwrap_or_else(|| TERMINATION_MESSAGE_PATH.into()),
            termination_message_policy: table
                .take("terminationMessagePolicy")
                .and_then(|field| {
                    field.choice(&[
                        ("File", "File"),
                        ("FallbackToLogsOnError", "FallbackToLogsOnError"),
                    ])
                })
                .unwrap_or(TERMINATION_MESSAGE_POLICY)
                .to_owned(),
            always_restarts: table
                .take("restartPolicy")
                .and_then(|field| {
                    field.choice(&[("Always", true), ("OnFailure", false), ("Never", false)])
                })
                .unwrap_or_default(),
        };
        table.ignore(&NOT_IN_THE_REQUEST);
        table.ignore(&NOT_THE_RUNTIMES);
        table.finish();
        Some(container)
    }
}

impl Container {
    /// Returns the bytes of its variables, command and arguments once each `$(NAME)` is replaced.
    pub(super) fn expanded_bytes(&self) -> u64 {
        let mut variables: HashMap<&str, u64> = HashMap::new();
        let mut all: u64 = 0;
        for (name, value) in &self.env {
            let bytes = expanded_bytes(value, &variables);
            all = all.saturating_add(bytes).saturating_add(name.len() as u64);
            variables.insert(name, bytes);
        }
        let texts = self.command.iter().chain(&self.args);
        texts.fold(all, |all, text| all.saturating_add(expanded_bytes(text, &variables)))
    }
}

impl Port {
    fn read(field: Field<'_>) -> Option<Self> {
        use kiyot_proto::cri::Protocol::{Sctp, Tcp, Udp};
        let mut table = field.table()?;
        let port = Self {
            name: table.take("name").and_then(Field::text).unwrap_or_default(),
            container_port: table
                .need("containerPort", "a port")
                .and_then(|field| field.number(1..=u16::MAX))
                .unwrap_or_default(),
            host_port: table
                .take("hostPort")
                .and_then(|field| field.number(0..=u16::MAX))
                .unwrap_or_default(),
            host_ip: table.take("hostIP").and_then(Field::text).unwrap_or_default(),
            protocol: table
                .take("protocol")
                .and_then(|field| field.choice(&[("TCP", Tcp), ("UDP", Udp), ("SCTP", Sctp)]))
                .unwrap_or(Tcp),
        };
        table.finish();
        Some(port)
    }
}
