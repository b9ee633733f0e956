//! `ReopenContainerLog`: the kubelet has moved the log file, and the next line goes to a new file.

use std::{sync::Arc, time::Instant};

use kiyot_proto::cri;
use tonic::Status;

use super::{CriService, status_code};

impl CriService {
    pub(super) async fn reopen_log(
        &self,
        request: cri::ReopenContainerLogRequest,
        deadline: Option<Instant>,
    ) -> Result<cri::ReopenContainerLogResponse, Status> {
        let container = self.pods.container(&request.container_id)?;
        if container.state() != cri::ContainerState::ContainerRunning {
            return Err(Status::failed_precondition("container is not running"));
        }
        if container.meta().cell_log.is_empty() {
            return Ok(cri::ReopenContainerLogResponse {});
        }
        let sync = Arc::clone(&self.sync);
        let reopened = async move {
            sync.container_logs.reopen(&container).await.map_err(status_code::of_reopen)
        };
        self.detached("ReopenContainerLog", deadline, reopened).await?;
        Ok(cri::ReopenContainerLogResponse {})
    }
}
