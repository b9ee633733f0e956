//! `ExecSync`.

use std::time::{Duration, Instant};

use kiyot_proto::cri;
use tonic::Status;

use super::{CriService, request::Addressed};
use crate::backends::milpa::cell_client::{CellClient, time_left};

/// Time limit of a command in addition to its own timeout, so that the cell's status comes first.
const TIMEOUT_MARGIN: Duration = Duration::from_secs(10);
/// Time limit of a command without a timeout.
const MAX_DURATION: Duration = Duration::from_secs(4 * 60 * 60);

impl CriService {
    /// Runs a command in a container. Passes on the cell's DEADLINE_EXCEEDED, because the kubelet
    /// takes it for a probe's timeout.
    pub(super) async fn exec_sync(
        &self,
        request: cri::ExecSyncRequest,
        deadline: Option<Instant>,
    ) -> Result<cri::ExecSyncResponse, Status> {
        let (container, cell) = self.running_container(&request.container_id, deadline).await?;
        let timeout = match u64::try_from(request.timeout) {
            Ok(seconds) if seconds > 0 => {
                Duration::from_secs(seconds).saturating_add(TIMEOUT_MARGIN)
            }
            _ => MAX_DURATION,
        };
        let request = request.to(&container.cell_container);
        let response =
            CellClient::new(&cell).exec_sync(time_left(deadline, timeout), request).await;
        response.map_err(|failure| container.restored(&failure).into())
    }
}
