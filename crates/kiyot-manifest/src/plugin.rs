//! Volumes that are not the kubelet's own files: claims, plugins, images, projections.

use k8s_openapi::api::core::v1 as api;

use super::{PluginVolume, VolumeKind, place::Place};

/// Longest name of an image in a volume, in bytes: each mount repeats it.
const MAX_REFERENCE_BYTES: usize = 4096;
/// Plugin of almost all claims, and of the drivers that replaced the kubelet's own.
const CSI: &str = "kubernetes.io~csi";

/// Volume of a StatefulSet's claim.
pub(super) const CLAIM: PluginVolume =
    PluginVolume { source: "persistentVolumeClaim", plugin: CSI, read_only: false };

/// Returns the sources that a plugin mounts on the node, with the plugin's directory name.
pub(super) fn read(volume: api::Volume) -> impl Iterator<Item = VolumeKind> {
    let sources = [
        (
            "awsElasticBlockStore",
            CSI,
            volume.aws_elastic_block_store.map(|source| source.read_only),
        ),
        ("azureDisk", CSI, volume.azure_disk.map(|source| source.read_only)),
        ("azureFile", CSI, volume.azure_file.map(|source| source.read_only)),
        ("cephfs", "kubernetes.io~cephfs", volume.cephfs.map(|source| source.read_only)),
        ("cinder", CSI, volume.cinder.map(|source| source.read_only)),
        ("csi", CSI, volume.csi.map(|source| source.read_only)),
        ("ephemeral", CSI, volume.ephemeral.map(|_| None)),
        ("fc", "kubernetes.io~fc", volume.fc.map(|source| source.read_only)),
        (
            "flexVolume",
            "kubernetes.io~flexvolume",
            volume.flex_volume.map(|source| source.read_only),
        ),
        ("flocker", "kubernetes.io~flocker", volume.flocker.map(|_| None)),
        ("gcePersistentDisk", CSI, volume.gce_persistent_disk.map(|source| source.read_only)),
        ("gitRepo", "kubernetes.io~git-repo", volume.git_repo.map(|_| None)),
        ("glusterfs", "kubernetes.io~glusterfs", volume.glusterfs.map(|source| source.read_only)),
        ("iscsi", "kubernetes.io~iscsi", volume.iscsi.map(|source| source.read_only)),
        ("nfs", "kubernetes.io~nfs", volume.nfs.map(|source| source.read_only)),
        (CLAIM.source, CSI, volume.persistent_volume_claim.map(|source| source.read_only)),
        (
            "photonPersistentDisk",
            "kubernetes.io~photon-pd",
            volume.photon_persistent_disk.map(|_| None),
        ),
        ("portworxVolume", CSI, volume.portworx_volume.map(|source| source.read_only)),
        ("quobyte", "kubernetes.io~quobyte", volume.quobyte.map(|source| source.read_only)),
        ("rbd", "kubernetes.io~rbd", volume.rbd.map(|source| source.read_only)),
        ("scaleIO", "kubernetes.io~scaleio", volume.scale_io.map(|source| source.read_only)),
        ("storageos", "kubernetes.io~storageos", volume.storageos.map(|source| source.read_only)),
        ("vsphereVolume", CSI, volume.vsphere_volume.map(|_| None)),
    ];
    sources.into_iter().filter_map(|(source, plugin, read_only)| {
        let read_only = read_only?.unwrap_or_default();
        Some(VolumeKind::Plugin(PluginVolume { source, plugin, read_only }))
    })
}

/// Reads the volume of an image.
pub(super) fn image(at: &Place<'_>, image: api::ImageVolumeSource) -> VolumeKind {
    let is_short = |text: &str| (text.len() <= MAX_REFERENCE_BYTES).then(|| text.to_owned());
    let reference = at
        .take("reference", image.reference)
        .and_then(|field| field.read("the name of an image, of at most 4096 bytes", is_short));
    VolumeKind::Image(reference.unwrap_or_default())
}
