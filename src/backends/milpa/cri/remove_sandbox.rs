//! `RemovePodSandbox`: stops a running sandbox first.

use std::{sync::Arc, time::Instant};

use kiyot_proto::cri;
use tonic::Status;

use super::{CriService, status_code};

impl CriService {
    /// Removes a sandbox and its containers.
    pub(super) async fn remove_pod_sandbox(
        &self,
        request: cri::RemovePodSandboxRequest,
        deadline: Option<Instant>,
    ) -> Result<cri::RemovePodSandboxResponse, Status> {
        let (sync, found) = (Arc::clone(&self.sync), self.pods.sandbox(&request.pod_sandbox_id));
        self.end_if_known("RemovePodSandbox", deadline, found, |sandbox| async move {
            sync.remove_sandbox(&sandbox.id).await.map_err(status_code::of_teardown)
        })
        .await
    }
}
