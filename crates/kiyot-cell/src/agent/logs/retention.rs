//! Bounds the disk space of a log that the node doesn't fetch, or fetches more slowly than it
//! grows.

use std::{io, os::unix::fs::MetadataExt, path::Path, time::Duration};

use kiyot_linux::tree::beneath;
use rustix::fs::{CWD, FallocateFlags, Mode, OFlags, fallocate, openat};

use super::{BLOCK_BYTES, sizes};
use crate::dirs::LOG_DIR;

/// Disk space that a log may take, in bytes. The kubelet's default is 50 MiB for all logs of a
/// container (containerLogMaxSize times containerLogMaxFiles).
const MAX_LOG_BYTES_ON_DISK: u64 = 1 << 30;
/// Interval between checks.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);

/// Frees the oldest blocks of logs over the limit, periodically. Never returns.
pub async fn enforce_retention(pod_dir: std::path::PathBuf) {
    loop {
        tokio::time::sleep(CHECK_INTERVAL).await;
        let pod_dir = pod_dir.clone();
        // Fails only if the runtime ends.
        let _ =
            tokio::task::spawn_blocking(move || enforce_all(&pod_dir, MAX_LOG_BYTES_ON_DISK)).await;
    }
}

fn enforce_all(pod_dir: &Path, kept: u64) {
    for log in sizes(pod_dir).into_keys().filter(|log| log.starts_with(LOG_DIR)) {
        match beneath(pod_dir, &log).map_err(Into::into).and_then(|log| trim(&log, kept)) {
            Ok(0) => {}
            Ok(bytes) => tracing::warn!(
                log,
                bytes,
                "oldest part of a log dropped: not fetched as fast as it is written"
            ),
            // The log may have been removed.
            Err(error) => {
                tracing::debug!(log, %error, "log size not checked")
            }
        }
    }
}

/// Punches the oldest blocks out of a file that takes more than `kept` bytes on disk. Returns the
/// approximate number of freed bytes.
fn trim(file: &Path, kept: u64) -> io::Result<u64> {
    let file = openat(
        CWD,
        file,
        OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC,
        Mode::empty(),
    )?;
    let metadata = std::fs::File::from(file.try_clone()?).metadata()?;
    let on_disk = metadata.blocks().saturating_mul(512);
    if !metadata.is_file() || on_disk <= kept {
        return Ok(0);
    }
    let length = metadata.len().saturating_sub(kept) / BLOCK_BYTES * BLOCK_BYTES;
    if length > 0 {
        fallocate(&file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 0, length)?;
    }
    Ok(on_disk - kept)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::{super::tests::CAN_PUNCH_HOLES, *};

    /// Verifies D34.
    #[test]
    fn log_over_the_limit_loses_its_oldest_blocks() {
        let temp = tempfile::tempdir().unwrap();
        fs::create_dir_all(temp.path().join("logs/c")).unwrap();
        let (large, small) = (temp.path().join("logs/c/0.log"), temp.path().join("logs/c/1.log"));
        fs::write(&large, vec![b'x'; 1 << 20]).unwrap();
        fs::write(&small, vec![b'x'; 64 << 10]).unwrap();
        let before = fs::metadata(&large).unwrap().blocks() * 512;
        assert_eq!(
            trim(&large, 128 << 10).expect(CAN_PUNCH_HOLES),
            before - (128 << 10),
            "freed bytes"
        );
        fs::write(&large, vec![b'x'; 1 << 20]).unwrap();
        enforce_all(temp.path(), 128 << 10);
        let (content, metadata) = (fs::read(&large).unwrap(), fs::metadata(&large).unwrap());
        assert_eq!(
            (content.len(), content.iter().position(|byte| *byte != 0)),
            (1 << 20, Some((1 << 20) - (128 << 10)))
        );
        assert!(
            metadata.blocks() * 512 <= (128 << 10) + BLOCK_BYTES,
            "{} blocks",
            metadata.blocks()
        );
        assert!(fs::read(&small).unwrap().iter().all(|byte| *byte == b'x'));
    }
}
