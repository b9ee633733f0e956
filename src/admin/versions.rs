//! The versions of the daemon, the node's kernel, the container runtimes and the agents, for the
//! support bundle.

use std::{path::Path, time::Duration};

use kiyot_proto::cri::{
    VersionRequest, VersionResponse, runtime_service_client::RuntimeServiceClient,
};
use tokio::time::timeout;
use tonic::Status;

use super::parts::Parts;
use crate::unix_channel;

/// Bounds the connection to a runtime and its answer.
const RUNTIME_TIMEOUT: Duration = Duration::from_secs(5);

/// Returns a line for each part, after the version of the daemon.
pub(super) async fn text(parts: &Parts) -> String {
    let mut text = format!("{:#?}\nkernel: {}\n", parts.version(), kernel());
    for runtime in &parts.runtimes {
        let version = match version_of(Path::new(&runtime.socket)).await {
            Ok(version) => format!(
                "{:?} {:?}, CRI {:?}",
                version.runtime_name, version.runtime_version, version.runtime_api_version
            ),
            Err(error) => format!("not read: {error}"),
        };
        text.push_str(&format!("runtime {}: {version}\n", runtime.name));
    }
    for (cell, build) in parts.milpas.iter().flat_map(|milpa| milpa.inventory().agents()) {
        let build = build.map_or_else(|| "not connected".to_owned(), |build| format!("{build:?}"));
        text.push_str(&format!("agent of {cell}: {build}\n"));
    }
    text
}

/// Returns release and build of the node's kernel.
fn kernel() -> String {
    let version = std::fs::read_to_string("/proc/version");
    version.map_or_else(|error| format!("not read: {error}"), |text| text.trim().to_owned())
}

/// Returns a container runtime's response to Version.
async fn version_of(socket: &Path) -> Result<VersionResponse, String> {
    let channel = unix_channel::to(socket).map_err(|error| error.to_string())?;
    let mut runtime = RuntimeServiceClient::new(channel);
    let call = runtime.version(VersionRequest::default());
    let answered = timeout(RUNTIME_TIMEOUT, call).await;
    let answer = answered
        .map_err(|_| format!("no answer within {} s", RUNTIME_TIMEOUT.as_secs()))?
        .map_err(|status: Status| status.message().to_owned())?;
    Ok(answer.into_inner())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn runtime_that_is_down_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let error = version_of(&directory.path().join("absent.sock")).await.unwrap_err();
        assert!(!error.is_empty());
    }
}
