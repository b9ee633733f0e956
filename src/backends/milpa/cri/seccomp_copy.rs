//! Copies of the node's seccomp profiles in cells.

use kiyot_proto::cell::{FileChange, MakeDir, Root, WriteFile, file_change::Change};
use ring::digest::{SHA256, digest};
use tonic::Status;

use crate::backends::milpa::{
    cell_client::{CALL_TIMEOUT, CellClient},
    cells::Cell,
    policy::seccomp,
};

/// Directory of seccomp profiles beneath the cell's directory for the pod.
const SECCOMP_DIR: &str = "seccomp";
/// Mode of that directory, which containers don't read.
const SECCOMP_DIR_MODE: u32 = 0o700;
/// Mode of a seccomp profile in it.
const PROFILE_MODE: u32 = 0o600;

/// Copies a seccomp profile of the node to the cell, and returns its path there; `None` without a
/// profile.
pub(super) async fn copy(
    cell: &Cell,
    pod_dir: &str,
    profile: Option<&str>,
) -> Result<Option<String>, Status> {
    let Some(path) = profile.map(str::to_owned) else { return Ok(None) };
    let read_path = path.clone();
    let read = tokio::task::spawn_blocking(move || seccomp::read(&read_path)).await;
    let read =
        read.map_err(|error| Status::internal(format!("the thread that reads {path}: {error}")))?;
    let content = read.map_err(|error| {
        Status::failed_precondition(format!("the seccomp profile {path:?} of the node: {error}"))
    })?;
    // Named by its content: repeated starts of a container share a copy.
    let file = format!("{SECCOMP_DIR}/{}.json", hex::encode(digest(&SHA256, &content)));
    let directory = FileChange {
        root: Root::Pod.into(),
        path: SECCOMP_DIR.to_owned(),
        change: Some(Change::MakeDir(MakeDir { mode: SECCOMP_DIR_MODE, ..Default::default() })),
    };
    let write = WriteFile { mode: PROFILE_MODE, content: content.into(), ..Default::default() };
    let profile = FileChange {
        root: Root::Pod.into(),
        path: file.clone(),
        change: Some(Change::WriteFile(write)),
    };
    CellClient::new(cell).change_files(CALL_TIMEOUT, vec![directory, profile]).await?;
    Ok(Some(format!("{}/{file}", pod_dir.trim_end_matches('/'))))
}
