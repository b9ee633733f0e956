//! Blobs that are placed in containerd's content store as files.
//!
//! containerd accepts a blob whose file is in its store by digest and size, in one message
//! (`content_sharing_policy = "shared"`, the default). A stream needs four messages and six files,
//! most of the work for a manifest.

use std::{
    fs::{DirBuilder, File},
    io::{self, Write as _},
    os::{fd::AsRawFd as _, unix::fs::DirBuilderExt as _},
    path::Path,
};

use bytes::Bytes;
use kiyot_linux::tree::beneath;
use ring::digest::{SHA256, digest};
use rustix::{
    fs::{AtFlags, CWD, Mode, OFlags, linkat, open},
    io::Errno,
};
use tokio::task::spawn_blocking;

/// Largest blob that is placed as a file, in bytes: the whole blob is in memory.
pub(super) const MAX_BYTES: u64 = 1 << 20;

/// Writes the file of a blob below the directory of containerd's content store, under its digest.
/// containerd does not check it again.
pub(super) async fn place(store: &Path, blob: &str, content: Bytes) -> io::Result<()> {
    let hex = blob
        .strip_prefix("sha256:")
        .filter(|hex| *hex == hex::encode(digest(&SHA256, &content)))
        .ok_or_else(|| io::Error::other("not the SHA-256 digest of the content"))?
        .to_owned();
    let blobs = store.join("blobs/sha256");
    spawn_blocking(move || write(&blobs, &hex, &content)).await.map_err(io::Error::other)?
}

/// Writes a file that gets its name only when it is complete.
fn write(directory: &Path, name: &str, content: &[u8]) -> io::Result<()> {
    // The same mode as containerd's directories.
    DirBuilder::new().recursive(true).mode(0o755).create(directory)?;
    let flags = OFlags::WRONLY | OFlags::TMPFILE | OFlags::CLOEXEC;
    let mut file = File::from(open(directory, flags, Mode::from_raw_mode(0o444))?);
    file.write_all(content)?;
    let unnamed = format!("/proc/self/fd/{}", file.as_raw_fd());
    match linkat(CWD, unnamed, CWD, beneath(directory, name)?, AtFlags::SYMLINK_FOLLOW) {
        // An existing file of this digest is complete.
        Ok(()) | Err(Errno::EXIST) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt as _};

    use super::*;

    #[tokio::test]
    async fn blob_of_another_digest_is_not_placed() {
        let store = tempfile::tempdir().unwrap();
        let content = Bytes::from_static(b"content");
        let hex = hex::encode(digest(&SHA256, &content));
        let blob = format!("sha256:{hex}");
        for other in [&blob[7..], &format!("sha512:{hex}"), &format!("sha256:{}", "0".repeat(64))] {
            place(store.path(), other, content.clone()).await.unwrap_err();
        }
        assert_eq!(fs::read_dir(store.path()).unwrap().count(), 0);
        for _ in 0..2 {
            place(store.path(), &blob, content.clone()).await.unwrap();
        }
        let file = store.path().join("blobs/sha256").join(hex);
        assert_eq!(fs::read(&file).unwrap(), *content);
        assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o444);
    }
}
