//! Calls answered from the read model: lists, statuses and statistics.

use std::collections::HashMap;

use bytes::Bytes;
use kiyot_proto::cri;
use prost::Message;
use tonic::Status;

use super::{CriService, cell_info};
use crate::backends::{
    Method,
    milpa::pods::{filter, response},
};

impl CriService {
    /// Returns the response of a list, status or statistics call, unless it must wait for usage.
    pub(super) fn cached_response(
        &self,
        method: Method,
        message: &[u8],
    ) -> Option<Result<Bytes, Status>> {
        if self.awaits_usage(method, message) {
            None
        } else {
            self.current_response(method, message)
        }
    }

    /// Returns the response of a list, status or statistics call with the usage known now.
    pub(super) fn current_response(
        &self,
        method: Method,
        message: &[u8],
    ) -> Option<Result<Bytes, Status>> {
        let answer = match method {
            Method::ListPodSandbox => decoded(message, |request: cri::ListPodSandboxRequest| {
                let filter = filter::Sandboxes::of_list(request.filter);
                if let Ok(sandbox) = self.pods.sandbox(&filter.id) {
                    self.sync.set_owned(&sandbox.id);
                }
                Ok(self.pods.list_sandboxes(&filter))
            }),
            Method::ListContainers => decoded(message, |request: cri::ListContainersRequest| {
                Ok(self.pods.list_containers(&filter::Containers::of_list(request.filter)))
            }),
            Method::ListContainerStats => {
                decoded(message, |request: cri::ListContainerStatsRequest| {
                    Ok(self
                        .pods
                        .list_container_stats(&filter::Containers::of_stats(request.filter)))
                })
            }
            Method::ListPodSandboxStats => {
                decoded(message, |request: cri::ListPodSandboxStatsRequest| {
                    Ok(self.pods.list_sandbox_stats(&filter::Sandboxes::of_stats(request.filter)))
                })
            }
            Method::PodSandboxStatus => {
                decoded(message, |request| self.sandbox_status(request).map(encoded))
            }
            Method::ContainerStatus => {
                decoded(message, |request| self.container_status(request).map(encoded))
            }
            Method::ContainerStats => {
                decoded(message, |request| self.container_stats(request).map(encoded))
            }
            Method::PodSandboxStats => {
                decoded(message, |request| self.sandbox_stats(request).map(encoded))
            }
            _ => return None,
        };
        Some(answer)
    }

    fn sandbox_status(
        &self,
        request: cri::PodSandboxStatusRequest,
    ) -> Result<cri::PodSandboxStatusResponse, Status> {
        let sandbox = self.pods.sandbox(&request.pod_sandbox_id)?;
        self.sync.set_owned(&sandbox.id);
        let meta = sandbox.meta();
        let status = response::sandbox_status(&meta, sandbox.ready);
        let info = if request.verbose {
            let mut entries = serde_json::json!({
                "cell": meta.cell,
                "cellSandbox": meta.cell_sandbox,
                "addresses": meta.addresses,
                "ephemeralStorageBytes": sandbox.ephemeral_storage,
            });
            let account = self.cells.account(&sandbox.cell);
            if let (Some(account), Some(entries)) = (account, entries.as_object_mut()) {
                entries.extend(cell_info::entries(&account));
            }
            info(&entries)
        } else {
            HashMap::new()
        };
        Ok(cri::PodSandboxStatusResponse { status: Some(status), info, ..Default::default() })
    }

    fn container_status(
        &self,
        request: cri::ContainerStatusRequest,
    ) -> Result<cri::ContainerStatusResponse, Status> {
        let container = self.pods.container(&request.container_id)?;
        let info = if request.verbose {
            let meta = container.meta();
            info(&serde_json::json!({
                "sandboxID": meta.sandbox,
                "cell": container.cell.as_str(),
                "cellContainer": meta.cell_container,
                "cellLog": meta.cell_log,
            }))
        } else {
            HashMap::new()
        };
        Ok(cri::ContainerStatusResponse { status: Some(container.answer()), info })
    }

    fn container_stats(
        &self,
        request: cri::ContainerStatsRequest,
    ) -> Result<cri::ContainerStatsResponse, Status> {
        let container = self.pods.container(&request.container_id)?;
        Ok(cri::ContainerStatsResponse { stats: Some(self.pods.usage_of_container(&container)) })
    }

    fn sandbox_stats(
        &self,
        request: cri::PodSandboxStatsRequest,
    ) -> Result<cri::PodSandboxStatsResponse, Status> {
        let sandbox = self.pods.sandbox(&request.pod_sandbox_id)?;
        Ok(cri::PodSandboxStatsResponse { stats: Some(self.pods.usage_of_sandbox(&sandbox)) })
    }
}

/// Returns the `info` of a verbose response, for crictl.
fn info(value: &serde_json::Value) -> HashMap<String, String> {
    HashMap::from([("info".to_owned(), value.to_string())])
}

fn encoded(message: impl Message) -> Bytes {
    message.encode_to_vec().into()
}

fn decoded<Q: Message + Default>(
    message: &[u8],
    answer: impl FnOnce(Q) -> Result<Bytes, Status>,
) -> Result<Bytes, Status> {
    answer(super::dispatch::decoded(message)?)
}
