//! Volumes, disks and files of pods in cells.

pub(crate) mod disks;
mod image_volumes;
pub(crate) mod node_mounts;
mod read_only;
mod storage_limit;
mod subpaths;
mod trees;
mod volume_contents;
mod volume_sources;
mod volume_updates;
mod volumes;
