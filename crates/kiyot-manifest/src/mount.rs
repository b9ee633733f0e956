//! Mounts of volumes in a container.

use k8s_openapi::api::core::v1 as api;
use kiyot_proto::cri::MountPropagation::{
    self, PropagationBidirectional, PropagationHostToContainer, PropagationPrivate,
};

use super::{metadata::dns_name, place::Place};

/// Mount of a volume in a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VolumeMount {
    /// Name of the volume.
    pub name: String,
    /// Path in the container.
    pub mount_path: String,
    /// `subPath` or `subPathExpr`
    pub sub_path: Option<String>,
    /// `readOnly`
    pub read_only: bool,
    /// True for `recursiveReadOnly: Enabled`.
    pub recursive_read_only: bool,
    /// `mountPropagation`
    pub propagation: MountPropagation,
}

impl VolumeMount {
    pub(super) fn read(at: Place<'_>, mount: api::VolumeMount) -> Option<Self> {
        let inner = |text: &str| {
            let fits = !text.starts_with('/') && text.split('/').all(|part| part != "..");
            fits.then(|| text.to_owned())
        };
        let fields =
            [at.take("subPath", mount.sub_path), at.take("subPathExpr", mount.sub_path_expr)];
        let sub_path = fields
            .into_iter()
            .flatten()
            .find_map(|field| field.read("a relative path without \"..\"", inner));
        let ways = [
            ("None", PropagationPrivate),
            ("HostToContainer", PropagationHostToContainer),
            ("Bidirectional", PropagationBidirectional),
        ];
        let recursion = [("Disabled", false), ("IfPossible", false), ("Enabled", true)];
        Some(Self {
            name: at.need("name", Some(mount.name), "a volume's name").and_then(dns_name)?,
            mount_path: at
                .need("mountPath", Some(mount.mount_path), "a path in the container")?
                .text()?,
            sub_path,
            read_only: mount.read_only.unwrap_or_default(),
            recursive_read_only: at
                .take("recursiveReadOnly", mount.recursive_read_only)
                .and_then(|field| field.choice(&recursion))
                .unwrap_or_default(),
            propagation: at
                .take("mountPropagation", mount.mount_propagation)
                .and_then(|field| field.choice(&ways))
                .unwrap_or(PropagationPrivate),
        })
    }
}

/// Checks a block volume as a device of a container.
pub(super) fn check_device(at: Place<'_>, device: api::VolumeDevice) -> Option<api::VolumeDevice> {
    at.need("name", Some(device.name.as_str()), "a volume's name").and_then(dns_name)?;
    at.need("devicePath", Some(device.device_path.as_str()), "a path in the container")?;
    Some(device)
}
