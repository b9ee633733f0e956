//! Volumes that are not the kubelet's own files: claims, plugins, images, projections.

use super::{PluginVolume, VolumeKind};
use crate::problems::{Field, Table};

/// Longest name of an image in a volume, in bytes: each mount repeats it.
const MAX_REFERENCE_BYTES: usize = 4096;
/// Plugin of almost all claims, and of the drivers that replaced those in the kubelet.
const CSI: &str = "kubernetes.io~csi";

/// Volume of a StatefulSet's claim.
pub(super) const CLAIM: PluginVolume =
    PluginVolume { source: "persistentVolumeClaim", plugin: CSI, read_only: false };

/// Keys of sources that a plugin mounts on the node, with the plugin's directory name.
const PLUGINS: [(&str, &str); 23] = [
    ("awsElasticBlockStore", CSI),
    ("azureDisk", CSI),
    ("azureFile", CSI),
    ("cephfs", "kubernetes.io~cephfs"),
    ("cinder", CSI),
    ("csi", CSI),
    ("ephemeral", CSI),
    ("fc", "kubernetes.io~fc"),
    ("flexVolume", "kubernetes.io~flexvolume"),
    ("flocker", "kubernetes.io~flocker"),
    ("gcePersistentDisk", CSI),
    ("gitRepo", "kubernetes.io~git-repo"),
    ("glusterfs", "kubernetes.io~glusterfs"),
    ("iscsi", "kubernetes.io~iscsi"),
    ("nfs", "kubernetes.io~nfs"),
    (CLAIM.source, CSI),
    ("photonPersistentDisk", "kubernetes.io~photon-pd"),
    ("portworxVolume", CSI),
    ("quobyte", "kubernetes.io~quobyte"),
    ("rbd", "kubernetes.io~rbd"),
    ("scaleIO", "kubernetes.io~scaleio"),
    ("storageos", "kubernetes.io~storageos"),
    ("vsphereVolume", CSI),
];

/// Counts these sources of a volume.
pub(super) fn count(table: &Table<'_>) -> usize {
    let keys = PLUGINS.iter().map(|(key, _)| *key).chain(["projected", "downwardAPI", "image"]);
    keys.filter(|key| table.has(key)).count()
}

/// Reads these sources.
pub(super) fn read(table: &mut Table<'_>) -> Vec<VolumeKind> {
    let mut kinds = Vec::new();
    for (source, plugin) in PLUGINS {
        // The plugin knows the other fields.
        let given = table.take(source).and_then(Field::table);
        kinds.extend(given.map(|mut given| {
            let read_only = given.take("readOnly").and_then(Field::flag).unwrap_or_default();
            VolumeKind::Plugin(PluginVolume { source, plugin, read_only })
        }));
    }
    kinds.extend(table.take("projected").map(|_| VolumeKind::Projected));
    kinds.extend(table.take("downwardAPI").map(|_| VolumeKind::DownwardApi));
    if let Some(mut image) = table.take("image").and_then(Field::table) {
        let is_short = |text: &str| (text.len() <= MAX_REFERENCE_BYTES).then(|| text.to_owned());
        let reference = image
            .take("reference")
            .and_then(|field| field.read("the name of an image, of at most 4096 bytes", is_short));
        image.take("pullPolicy");
        image.finish();
        kinds.push(VolumeKind::Image(reference.unwrap_or_default()));
    }
    kinds
}
