//! The images of every node, imported once per process.

use std::path::{Path, PathBuf};

use tokio::sync::OnceCell;

use super::{BUSYBOX_IMAGE, Node, PAUSE_IMAGE, ROOT};
use crate::{command, image::ImageSpec};

/// Memory file system, which ends with the process's namespaces.
const MEMORY: &str = "/run";

/// Returns a containerd root directory with the images [`PAUSE_IMAGE`] and [`BUSYBOX_IMAGE`]. A
/// copy costs a tenth of the imports.
pub(super) async fn root() -> &'static Path {
    static ROOT: OnceCell<PathBuf> = OnceCell::const_new();
    ROOT.get_or_init(import).await
}

async fn import() -> PathBuf {
    let node = Node::start_on(None, true, false).await;
    node.image(PAUSE_IMAGE, &ImageSpec::pause()).await;
    let shell = ImageSpec { cmd: vec!["sh".to_owned()], ..ImageSpec::default() };
    node.image(BUSYBOX_IMAGE, &shell).await;
    node.kill_containerd();
    let kept = tempfile::Builder::new()
        .prefix("containerd")
        .tempdir_in(MEMORY)
        .expect("a temporary directory can be made")
        .keep()
        .join(ROOT);
    copy(&node.directory().join(ROOT), &kept);
    kept
}

/// Copies a directory with owners, modes and links.
pub(super) fn copy(from: &Path, to: &Path) {
    command::run("cp", &["-a", &from.display().to_string(), &to.display().to_string()]);
}
