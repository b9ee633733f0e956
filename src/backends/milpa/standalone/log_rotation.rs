//! Rotation of the logs of standalone pods, as the kubelet does for its own
//! (`containerLogMaxSize`).

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use tonic::Status;

use super::runner::on_disk;

/// The size from which a log is rotated, in bytes.
const MAX_LOG_BYTES: u64 = 10 * 1024 * 1024;
/// The name of the rotated file has this added; an earlier one is replaced.
const ROTATED: &str = "1";

/// Moves a log that is too long aside and reopens it. After a failure it is moved back, as the
/// kubelet does: the writer goes on with it, and the next call tries again.
pub(super) async fn rotate(
    log: PathBuf,
    reopen: impl Future<Output = Result<(), Status>>,
) -> Result<(), Status> {
    let path = log.clone();
    if !on_disk(move || move_aside(&path)).await? {
        return Ok(());
    }
    let reopened = reopen.await;
    if reopened.is_err() {
        on_disk(move || move_back(&log)).await?;
    }
    reopened
}

/// Moves logs back that were moved aside but not reopened: the daemon has ended in between. `dir`
/// has the logs of all pods. A log that can't be moved back keeps no other from it.
pub(super) fn recover(dir: &Path) {
    let containers = entries(dir).into_iter().flat_map(|pod| entries(&pod));
    let files = containers.flat_map(|container| entries(&container));
    for rotated in files.filter(|file| file.extension().is_some_and(|it| it == ROTATED)) {
        let log = rotated.with_extension("");
        if let Err(error) = restore(&log) {
            let path = log.display();
            tracing::error!(%path, %error, "rotated log of a standalone pod not moved back");
        }
    }
}

/// Returns the paths in a directory; none of what is no directory.
fn entries(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).into_iter().flatten();
    entries.filter_map(|entry| Some(entry.ok()?.path())).collect()
}

/// Moves a log that is too long aside. Returns true if it did.
fn move_aside(log: &Path) -> io::Result<bool> {
    match fs::metadata(log) {
        Ok(metadata) if metadata.len() >= MAX_LOG_BYTES => {}
        Ok(_) => return Ok(false),
        // A call that was cancelled may not have reopened it.
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return restore(log).map(|()| false);
        }
        Err(error) => return Err(error),
    }
    fs::rename(log, log.with_added_extension(ROTATED))?;
    Ok(true)
}

/// Moves a log back if it is absent.
fn restore(log: &Path) -> io::Result<()> {
    if log.try_exists()? { Ok(()) } else { move_back(log) }
}

/// Moves a log back, also over a file that a failed reopening has made.
fn move_back(log: &Path) -> io::Result<()> {
    match fs::rename(log.with_added_extension(ROTATED), log) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
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
    use tonic::Code;

    use super::*;

    #[test]
    fn log_is_moved_aside_once_it_is_too_long() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("0.log");
        assert!(!move_aside(&log).unwrap(), "an absent log is not too long");
        fs::write(&log, "line\n").unwrap();
        assert!(!move_aside(&log).unwrap());
        fs::File::create(&log).unwrap().set_len(MAX_LOG_BYTES).unwrap();
        fs::write(dir.path().join("0.log.1"), "earlier").unwrap();
        assert!(move_aside(&log).unwrap());
        assert!(!log.exists());
        let rotated = fs::metadata(dir.path().join("0.log.1")).unwrap();
        assert_eq!(rotated.len(), MAX_LOG_BYTES, "the earlier file is replaced");
    }

    /// Verifies O48.
    #[tokio::test]
    async fn log_that_is_not_reopened_is_moved_back_and_rotated_later() {
        let dir = tempfile::tempdir().unwrap();
        let (log, rotated) = (dir.path().join("0.log"), dir.path().join("0.log.1"));
        fs::File::create(&log).unwrap().set_len(MAX_LOG_BYTES).unwrap();
        let length = |path: &Path| fs::metadata(path).map(|metadata| metadata.len()).ok();
        for writes in [false, true] {
            let failing = async {
                if writes {
                    fs::write(&log, "a part").unwrap();
                }
                Err(Status::internal("too many open files"))
            };
            assert_eq!(rotate(log.clone(), failing).await.unwrap_err().code(), Code::Internal);
            assert_eq!((length(&log), length(&rotated)), (Some(MAX_LOG_BYTES), None));
        }
        // A cancelled call.
        assert!(move_aside(&log).unwrap());
        let unexpected = async { panic!("reopened within the call that moves back") };
        rotate(log.clone(), unexpected).await.unwrap();
        assert_eq!((length(&log), length(&rotated)), (Some(MAX_LOG_BYTES), None));

        let reopening = async {
            fs::write(&log, "new").unwrap();
            Ok(())
        };
        rotate(log.clone(), reopening).await.unwrap();
        assert_eq!((length(&log), length(&rotated)), (Some(3), Some(MAX_LOG_BYTES)));
    }

    /// Verifies O48.
    #[test]
    fn start_moves_back_the_logs_that_were_not_reopened() {
        let dir = tempfile::tempdir().unwrap();
        recover(&dir.path().join("absent"));
        let container = dir.path().join("default_web_uid/main");
        fs::create_dir_all(&container).unwrap();
        fs::write(dir.path().join("file"), "").unwrap();
        for (name, text) in [("0.log.1", "cut"), ("1.log.1", "earlier"), ("1.log", "current")] {
            fs::write(container.join(name), text).unwrap();
        }
        recover(dir.path());
        let read = |name: &str| fs::read_to_string(container.join(name)).ok();
        let files = ["0.log", "0.log.1", "1.log", "1.log.1"].map(read);
        let files = files.each_ref().map(Option::as_deref);
        assert_eq!(files, [Some("cut"), None, Some("current"), Some("earlier")]);
    }
}
