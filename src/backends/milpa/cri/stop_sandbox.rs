//! `StopPodSandbox`: OK when the cell has ended.

use std::{sync::Arc, time::Instant};

use kiyot_proto::cri;
use tonic::Status;

use super::{CriService, status_code};

impl CriService {
    pub(super) async fn stop_pod_sandbox(
        &self,
        request: cri::StopPodSandboxRequest,
        deadline: Option<Instant>,
    ) -> Result<cri::StopPodSandboxResponse, Status> {
        let (sync, found) = (Arc::clone(&self.sync), self.pods.sandbox(&request.pod_sandbox_id));
        self.end_if_known("StopPodSandbox", deadline, found, |sandbox| async move {
            sync.stop_sandbox(&sandbox.id).await.map_err(status_code::of_teardown)
        })
        .await
    }
}
