//! Containers of a pod.

use std::collections::HashMap;

use k8s_openapi::api::core::v1::{self as api, ContainerPort, SecurityContext};
use kiyot_values::problems::Field;

use super::{
    Resources, VolumeMount,
    env::{self, EnvSource, SourceKind},
    expand::expanded_bytes,
    metadata::dns_name,
    mount,
    place::Place,
    security,
};

const TERMINATION_MESSAGE_PATH: &str = "/dev/termination-log";
const TERMINATION_MESSAGE_POLICY: &str = "File";

/// Container.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Container {
    /// Name in the pod.
    pub name: String,
    /// Image, by the user's name for it.
    pub image: String,
    /// Command that replaces the image's entry point.
    pub command: Vec<String>,
    /// Arguments that replace the image's.
    pub args: Vec<String>,
    /// Working directory.
    pub working_dir: String,
    /// Variables, in order; they may refer to earlier variables. A later variable of the same
    /// name wins.
    pub env: Vec<(String, String)>,
    /// Variables of `env` whose values come from a source.
    pub env_sources: Vec<EnvSource>,
    /// Requests and limits.
    pub resources: Resources,
    /// Mounted volumes.
    pub mounts: Vec<VolumeMount>,
    /// Block volumes.
    pub devices: Vec<api::VolumeDevice>,
    /// `securityContext`
    pub security: SecurityContext,
    /// Ports.
    pub ports: Vec<ContainerPort>,
    /// `stdin`
    pub stdin: bool,
    /// `stdinOnce`
    pub stdin_once: bool,
    /// `tty`
    pub tty: bool,
    /// `terminationMessagePath`
    pub termination_message_path: String,
    /// `terminationMessagePolicy`
    pub termination_message_policy: String,
    /// True for a sidecar, an init container with `restartPolicy: Always`.
    pub always_restarts: bool,
}

impl Container {
    /// Returns whether the kubelet reads variables from files in volumes.
    pub fn has_env_in_files(&self) -> bool {
        self.env_sources.iter().any(|it| matches!(it.kind, SourceKind::File { .. }))
    }

    pub(super) fn read(at: Place<'_>, container: api::Container) -> Option<Self> {
        let policies = [("Always", ()), ("IfNotPresent", ()), ("Never", ())];
        let policy = at.take("imagePullPolicy", container.image_pull_policy);
        let _policy = policy.and_then(|field| field.choice(&policies));
        let message_policies =
            [("File", "File"), ("FallbackToLogsOnError", "FallbackToLogsOnError")];
        let restarts = [("Always", true), ("OnFailure", false), ("Never", false)];
        let text = |field: Option<Field<'_>>| field.and_then(Field::text).unwrap_or_default();
        let security = container.security_context.unwrap_or_default();
        security::check_container(&at.of("securityContext"), &security);
        Some(Self {
            image: text(at.need("image", container.image, "the name of an image")),
            name: at
                .need("name", Some(container.name), "a DNS name")
                .and_then(dns_name)
                .unwrap_or_default(),
            command: container.command.unwrap_or_default(),
            args: container.args.unwrap_or_default(),
            working_dir: container.working_dir.unwrap_or_default(),
            env_sources: env::sources(container.env.as_deref().unwrap_or_default()),
            env: at.items("env", container.env, |at, variable| env::read(at, &variable)),
            resources: Resources::read(
                &at.of("resources"),
                container.resources.unwrap_or_default(),
            ),
            mounts: at.items("volumeMounts", container.volume_mounts, VolumeMount::read),
            devices: at.items("volumeDevices", container.volume_devices, mount::check_device),
            security,
            ports: at.items("ports", container.ports, check_port),
            stdin: container.stdin.unwrap_or_default(),
            stdin_once: container.stdin_once.unwrap_or_default(),
            tty: container.tty.unwrap_or_default(),
            termination_message_path: container
                .termination_message_path
                .filter(|path| !path.is_empty())
                .unwrap_or_else(|| TERMINATION_MESSAGE_PATH.into()),
            termination_message_policy: at
                .take("terminationMessagePolicy", container.termination_message_policy)
                .and_then(|field| field.choice(&message_policies))
                .unwrap_or(TERMINATION_MESSAGE_POLICY)
                .to_owned(),
            always_restarts: at
                .take("restartPolicy", container.restart_policy)
                .and_then(|field| field.choice(&restarts))
                .unwrap_or_default(),
        })
    }
}

impl Container {
    /// Returns the size in bytes of its variables, command and arguments after each `$(NAME)` is
    /// replaced.
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

fn check_port(at: Place<'_>, port: ContainerPort) -> Option<ContainerPort> {
    at.take("containerPort", Some(port.container_port))
        .and_then(|field| field.number(1..=u16::MAX));
    at.take("hostPort", port.host_port).and_then(|field| field.number(0..=u16::MAX));
    let protocols = [("TCP", ()), ("UDP", ()), ("SCTP", ())];
    at.take("protocol", port.protocol.as_deref()).and_then(|field| field.choice(&protocols));
    Some(port)
}
