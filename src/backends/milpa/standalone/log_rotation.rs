//! Rotation of the logs of standalone pods, as the kubelet does for its own
//! (`containerLogMaxSize`).

use std::{fs, io, path::Path};

/// The size from which a log is rotated, in bytes.
const MAX_LOG_BYTES: u64 = 10 * 1024 * 1024;
/// The name of the rotated file has this added; an earlier one is replaced.
const ROTATED: &str = "1";

/// Moves a log that is too long aside. Returns true if it did: the log is to be reopened.
pub(super) fn rotate(log: &Path) -> io::Result<bool> {
    match fs::metadata(log) {
        Ok(metadata) if metadata.len() >= MAX_LOG_BYTES => {}
        Ok(_) => return Ok(false),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(error),
    }
    fs::rename(log, log.with_added_extension(ROTATED))?;
    Ok(true)
}

/// Removes the log of a container with its rotated file, and its termination message.
pub(super) fn remove(log: &Path, message: Option<&Path>) -> io::Result<()> {
    let rotated = log.with_added_extension(ROTATED);
    let logs = [log, &rotated].into_iter().filter(|path| !path.as_os_str().is_empty());
    for path in logs.chain(message) {
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_is_moved_aside_once_it_is_too_long() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("0.log");
        assert!(!rotate(&log).unwrap(), "an absent log is not too long");
        fs::write(&log, "line\n").unwrap();
        assert!(!rotate(&log).unwrap());
        fs::File::create(&log).unwrap().set_len(MAX_LOG_BYTES).unwrap();
        fs::write(dir.path().join("0.log.1"), "earlier").unwrap();
        assert!(rotate(&log).unwrap());
        assert!(!log.exists());
        let rotated = fs::metadata(dir.path().join("0.log.1")).unwrap();
        assert_eq!(rotated.len(), MAX_LOG_BYTES, "the earlier file is replaced");
    }
}
