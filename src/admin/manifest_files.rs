//! The files of manifests in requests.

use kiyot_proto::admin::ManifestFile;

use crate::manifest::File;

/// Returns the files of a request.
pub(super) fn of(files: Vec<ManifestFile>) -> Vec<File> {
    let file = |ManifestFile { name, text }| File { name, text };
    files.into_iter().map(file).collect()
}
