//! Mounts of volumes in a container.

use kiyot_proto::cri::MountPropagation::{
    self, PropagationBidirectional, PropagationHostToContainer, PropagationPrivate,
};

use super::metadata::dns_name;
use crate::problems::Field;

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
    /// Set for `recursiveReadOnly: Enabled`.
    pub recursive_read_only: bool,
    /// `mountPropagation`
    pub propagation: MountPropagation,
}

/// Block volume as a device of a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VolumeDevice {
    /// Name of the volume.
    pub name: String,
    /// Path in the container.
    pub device_path: String,
}

impl VolumeMount {
    pub(super) fn read(field: Field<'_>) -> Option<Self> {
        let mut table = field.table()?;
        let name = table.need("name", "a volume's name").and_then(dns_name);
        let mount_path = table.need("mountPath", "a path in the container").and_then(Field::text);
        let inner = |text: &str| {
            let fits = !text.starts_with('/') && text.split('/').all(|part| part != "..");
            fits.then(|| text.to_owned())
        };
        let fields = [table.take("subPath"), table.take("subPathExpr")];
        let sub_path = fields
            .into_iter()
            .flatten()
            .filter_map(|field| field.read("a relative path without \"..\"", inner))
            .find(|path| !path.is_empty());
        let read_only = table.take("readOnly").and_then(Field::flag).unwrap_or_default();
        let recursive_read_only = table
            .take("recursiveReadOnly")
            .and_then(|field| {
                field.choice(&[("Disabled", false), ("IfPossible", false), ("Enabled", true)])
            })
            .unwrap_or_default();
        let ways = [
            ("None", PropagationPrivate),
            ("HostToContainer", PropagationHostToContainer),
            ("Bidirectional", PropagationBidirectional),
        ];
        let propagation = table
            .take("mountPropagation")
            .and_then(|field| field.choice(&ways))
            .unwrap_or(PropagationPrivate);
        table.take("bindMountOptions");
        table.finish();
        Some(Self {
            name: name?,
            mount_path: mount_path?,
            sub_path,
            read_only,
            recursive_read_only,
            propagation,
        })
    }
}

impl VolumeDevice {
    pub(super) fn read(field: Field<'_>) -> Option<Self> {
        let mut table = field.table()?;
        let name = table.need("name", "a volume's name").and_then(dns_name);
        let device_path = table.need("devicePath", "a path in the container").and_then(Field::text);
        table.finish();
        Some(Self { name: name?, device_path: device_path? })
    }
}
