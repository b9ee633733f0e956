//! Container logs: sizes, reads from a position, and trimming.
//!
//! A log is never truncated at its beginning: trimming punches a hole, so that positions stay
//! valid.

mod retention;
mod watch;

use std::{collections::BTreeMap, path::Path, sync::Arc};

use bytes::Bytes;
use futures::{Stream, TryStreamExt, stream};
use kiyot_proto::cell::{LogPart, ReadLogRequest, TrimLogRequest};
use rustix::{
    fd::OwnedFd,
    fs::{FallocateFlags, SeekFrom, fallocate, seek},
    io::Errno,
};
use tokio::task::spawn_blocking;
use tonic::Status;

pub use retention::enforce_retention;
pub use watch::follow;

use super::files::{self, FileError, Files, RelPath};
use crate::dirs::LOG_DIR;

/// Depth of the directories below [`LOG_DIR`] that are searched.
const MAX_DEPTH: usize = 4;
/// Upper bound on reported logs.
const MAX_LOGS: usize = 1024;
/// Upper bound on one read, in bytes.
const READ_CHUNK_BYTES: usize = 64 * 1024;
/// Granularity of holes, in bytes: the block size of common file systems.
const BLOCK_BYTES: u64 = 4096;

/// Returns the logs by their path below `pod_dir`, with their sizes in bytes.
pub fn sizes(pod_dir: &Path) -> BTreeMap<String, u64> {
    let mut sizes = BTreeMap::new();
    collect(&pod_dir.join(LOG_DIR), LOG_DIR, 0, &mut sizes);
    sizes
}

fn collect(dir: &Path, name: &str, depth: usize, sizes: &mut BTreeMap<String, u64>) {
    let Ok(entries) = std::fs::read_dir(dir) else { return };
    for entry in entries.flatten() {
        // The daemon creates only names in UTF-8.
        let Some(name) = entry.file_name().to_str().map(|file| format!("{name}/{file}")) else {
            continue;
        };
        let Ok(metadata) = entry.metadata() else { continue };
        if metadata.is_dir() && depth < MAX_DEPTH {
            collect(&entry.path(), &name, depth + 1, sizes);
        } else if metadata.is_file() && sizes.len() < MAX_LOGS {
            sizes.insert(name, metadata.len());
        }
    }
}

/// Streams a log from a position to its end at the time of the call.
pub async fn read(
    files: Arc<Files>,
    request: ReadLogRequest,
) -> Result<impl Stream<Item = Result<LogPart, Status>> + Send + use<>, Status> {
    let (file, end) = blocking(move || {
        let (file, size) = open(&files, &request.path, request.position, false)?;
        Ok((Arc::new(file), size))
    })
    .await?;
    Ok(stream::try_unfold(request.position, move |position| {
        let file = Arc::clone(&file);
        async move {
            if position >= end {
                return Ok(None);
            }
            let part = blocking(move || {
                part(&file, position, end)
                    .map_err(|error| Status::internal(format!("cannot read log: {error}")))
            })
            .await?;
            let next = position + part.gap + part.content.len() as u64;
            Ok((next > position).then_some((part, next)))
        }
    })
    .into_stream())
}

/// Reads the next part of a log. A trimmed range, even one that is trimmed during the read, becomes
/// a gap that ends at the beginning of a line.
fn part(file: &OwnedFd, position: u64, end: u64) -> Result<LogPart, Errno> {
    let begins = first_data(file, position, end)?;
    if begins > position {
        return Ok(LogPart {
            content: Bytes::new(),
            gap: next_line(file, begins, end)? - position,
        });
    }
    let limit = (end - position).min(READ_CHUNK_BYTES as u64) as usize;
    let content = files::read_at(file, position, limit)?;
    // Logs are trimmed from their beginning: if any byte of the content was trimmed, so was the
    // first.
    if first_data(file, position, end)? > position {
        return part(file, position, end);
    }
    Ok(LogPart { content: Bytes::from(content), gap: 0 })
}

/// Returns the first position from here on that is not in a hole.
fn first_data(file: &OwnedFd, position: u64, end: u64) -> Result<u64, Errno> {
    match seek(file, SeekFrom::Data(position)) {
        Ok(data) => Ok(data.clamp(position, end)),
        // Only a hole follows this position.
        Err(Errno::NXIO) => Ok(end),
        // The file system has no holes.
        Err(Errno::INVAL) => Ok(position),
        Err(error) => Err(error),
    }
}

/// Returns the beginning of the next line after a position, or `end`.
fn next_line(file: &OwnedFd, mut position: u64, end: u64) -> Result<u64, Errno> {
    while position < end {
        let content =
            files::read_at(file, position, (end - position).min(READ_CHUNK_BYTES as u64) as usize)?;
        if content.is_empty() {
            break;
        }
        if let Some(at) = content.iter().position(|byte| *byte == b'\n') {
            return Ok(position + at as u64 + 1);
        }
        position += content.len() as u64;
    }
    Ok(end)
}

/// Frees the disk space of all whole blocks before a position.
pub async fn trim(files: Arc<Files>, request: TrimLogRequest) -> Result<(), Status> {
    blocking(move || {
        let (file, _) = open(&files, &request.path, request.position, true)?;
        let Some(length) = punchable(request.position) else { return Ok(()) };
        fallocate(&file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 0, length).map_err(
            |error| Status::internal(format!("cannot trim log {:?}: {error}", request.path)),
        )
    })
    .await
}

/// Returns the length of the hole before a position, in bytes; `None` if it is less than a block.
fn punchable(position: u64) -> Option<u64> {
    Some(position / BLOCK_BYTES * BLOCK_BYTES).filter(|length| *length > 0)
}

fn open(files: &Files, path: &str, position: u64, write: bool) -> Result<(OwnedFd, u64), Status> {
    let path = RelPath::parse(path).map_err(FileError::Path)?;
    if !path.as_str().starts_with("logs/") {
        return Err(Status::invalid_argument(format!(
            "log {:?}: invalid path; allowed: paths below {LOG_DIR}/",
            path.as_str()
        )));
    }
    let file = files
        .open_pod_file(&path, write)?
        .ok_or_else(|| Status::not_found(format!("log {:?}: not found", path.as_str())))?;
    let size = files::length(&file).map_err(|error| {
        Status::from(FileError::Io { what: "stat", path: path.to_string(), source: error.into() })
    })?;
    if position > size {
        return Err(Status::out_of_range(format!(
            "log {:?}: position {position} is past the end at {size}",
            path.as_str()
        )));
    }
    Ok((file, size))
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Status> + Send + 'static,
) -> Result<T, Status> {
    spawn_blocking(work).await.map_err(|error| Status::internal(error.to_string()))?
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::MetadataExt};

    use proptest::prelude::*;
    use tempfile::TempDir;

    use super::*;

    /// The tests need a file system with holes.
    pub(super) const CAN_PUNCH_HOLES: &str =
        "the file system of TMPDIR must punch holes, as ext4, xfs, btrfs, overlayfs and tmpfs do";

    fn fixture(content: &[u8]) -> (TempDir, Arc<Files>) {
        let temp = tempfile::tempdir().unwrap();
        fs::create_dir_all(temp.path().join("logs/c")).unwrap();
        fs::write(temp.path().join("logs/c/0.log"), content).unwrap();
        fs::write(temp.path().join("other"), content).unwrap();
        // st_blocks counts allocated blocks, so the file must be on disk.
        fs::File::open(temp.path().join("logs/c/0.log")).unwrap().sync_all().unwrap();
        let files = Arc::new(Files::open(temp.path(), temp.path()).unwrap());
        (temp, files)
    }

    async fn all(files: &Arc<Files>, position: u64) -> Result<Vec<u8>, Status> {
        let parts: Vec<_> =
            read(Arc::clone(files), ReadLogRequest { path: "logs/c/0.log".into(), position })
                .await?
                .try_collect()
                .await?;
        assert!(parts.iter().all(|part| part.content.len() <= READ_CHUNK_BYTES));
        Ok(parts.content())
    }

    trait Content {
        fn content(self) -> Vec<u8>;
    }

    impl Content for Vec<LogPart> {
        fn content(self) -> Vec<u8> {
            self.into_iter().flat_map(|part| part.content).collect()
        }
    }

    #[tokio::test]
    async fn log_is_read_from_any_position() {
        let content: Vec<u8> = (0..200_000_u32).map(|n| n as u8).collect();
        let (_temp, files) = fixture(&content);
        for position in [0, 1, 65_536, 199_999, 200_000] {
            assert!(all(&files, position).await.unwrap() == content[position as usize..]);
        }
        assert_eq!(all(&files, 200_001).await.unwrap_err().code(), tonic::Code::OutOfRange);
    }

    #[tokio::test]
    async fn read_outside_of_logs_is_rejected() {
        let (_temp, files) = fixture(b"x");
        for (path, code) in [
            ("other", tonic::Code::InvalidArgument),
            ("logs/../other", tonic::Code::InvalidArgument),
            ("logs/absent", tonic::Code::NotFound),
            ("logs/c", tonic::Code::InvalidArgument),
        ] {
            let error = read(Arc::clone(&files), ReadLogRequest { path: path.into(), position: 0 })
                .await
                .err()
                .unwrap();
            assert_eq!(error.code(), code, "{path}: {error}");
        }
    }

    #[tokio::test]
    async fn trim_keeps_size_and_later_content() {
        let content = vec![b'x'; 100_000];
        let (temp, files) = fixture(&content);
        let before = fs::metadata(temp.path().join("logs/c/0.log")).unwrap().blocks();
        let request = |position| TrimLogRequest { path: "logs/c/0.log".into(), position };
        trim(Arc::clone(&files), request(90_001)).await.expect(CAN_PUNCH_HOLES);
        let after = fs::metadata(temp.path().join("logs/c/0.log")).unwrap();
        assert_eq!(after.len(), 100_000);
        // 21 whole blocks lie before the position; a file system may have larger blocks.
        assert!(after.blocks() < before, "{} blocks of {before}", after.blocks());
        assert_eq!(all(&files, 90_001).await.unwrap(), content[90_001..]);
        // 22 blocks are punched, and with them the beginning of the only line.
        let parts: Vec<_> =
            read(Arc::clone(&files), ReadLogRequest { path: "logs/c/0.log".into(), position: 10 })
                .await
                .unwrap()
                .try_collect()
                .await
                .unwrap();
        assert_eq!(parts, [LogPart { content: Bytes::new(), gap: 99_990 }]);
        assert_eq!(
            trim(files, request(100_001)).await.unwrap_err().code(),
            tonic::Code::OutOfRange
        );
    }

    /// Verifies D33.
    #[tokio::test]
    async fn read_after_trim_resumes_at_a_line() {
        let lines: Vec<u8> = (0..10_000).flat_map(|n| format!("line {n}\n").into_bytes()).collect();
        let (_temp, files) = fixture(&lines);
        let request = TrimLogRequest { path: "logs/c/0.log".into(), position: 50_000 };
        trim(Arc::clone(&files), request).await.expect(CAN_PUNCH_HOLES);
        let parts: Vec<_> =
            read(Arc::clone(&files), ReadLogRequest { path: "logs/c/0.log".into(), position: 7 })
                .await
                .unwrap()
                .try_collect()
                .await
                .unwrap();
        // 12 blocks are punched.
        let begins = 49_152 + lines[49_152..].iter().position(|byte| *byte == b'\n').unwrap() + 1;
        assert_eq!(parts[0], LogPart { content: Bytes::new(), gap: begins as u64 - 7 });
        assert_eq!(parts[1..].to_vec().content(), lines[begins..]);
    }

    #[test]
    fn sizes_cover_files_below_logs() {
        let (temp, _) = fixture(b"abc");
        assert_eq!(sizes(temp.path()), [("logs/c/0.log".to_owned(), 3)].into());
    }

    proptest! {
        #[test]
        fn hole_ends_before_the_position(position in 0_u64..u64::MAX) {
            match punchable(position) {
                Some(length) => {
                    prop_assert!(length <= position && position - length < BLOCK_BYTES);
                    prop_assert!(length % BLOCK_BYTES == 0);
                }
                None => prop_assert!(position < BLOCK_BYTES),
            }
        }
    }
}
