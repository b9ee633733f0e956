//! Calls that are answered at once, from memory.

use std::{collections::HashMap, time::Instant};

use bytes::Bytes;
use kiyot_proto::cri;
use prost::Message;
use tonic::Status;

use super::{Verbs, filter};
use crate::backends::Method;

impl Verbs {
    /// The answer, if this call is one of these and all of it is known.
    pub(super) fn answer_at_once(
        &self,
        method: Method,
        message: &[u8],
    ) -> Option<Result<Bytes, Status>> {
        if self.awaits_usage(method, message) { None } else { self.answer_as_is(method, message) }
    }

    /// The answer of what is known now, if this call is one of these.
    pub(super) fn answer_as_is(
        &self,
        method: Method,
        message: &[u8],
    ) -> Option<Result<Bytes, Status>> {
        let answer = match method {
            Method::ListPodSandbox => decoded(message, |request: cri::ListPodSandboxRequest| {
                let filter = filter::Sandboxes::of_list(request.filter);
                if let Ok(sandbox) = self.view.sandbox(&filter.id) {
                    self.claim(&sandbox.id);
                }
                Ok(self.view.list_sandboxes(&filter))
            }),
            Method::ListContainers => decoded(message, |request: cri::ListContainersRequest| {
                Ok(self.view.list_containers(&filter::Containers::of_list(request.filter)))
            }),
            Method::ListContainerStats => {
                decoded(message, |request: cri::ListContainerStatsRequest| {
                    Ok(self.view.list_container_stats(
                        &filter::Containers::of_stats(request.filter),
                        Instant::now(),
                    ))
                })
            }
            Method::ListPodSandboxStats => {
                decoded(message, |request: cri::ListPodSandboxStatsRequest| {
                    Ok(self.view.list_sandbox_stats(
                        &filter::Sandboxes::of_stats(request.filter),
                        Instant::now(),
                    ))
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
        let sandbox = self.view.sandbox(&request.pod_sandbox_id)?;
        self.claim(&sandbox.id);
        let meta = sandbox.meta();
        let status = super::restored::sandbox_status(&meta, sandbox.ready);
        let info = if request.verbose {
            info(
                &serde_json::json!({ "cell": meta.cell, "cellSandbox": meta.cell_sandbox, "addresses": meta.addresses, "ephemeralStorageBytes": sandbox.ephemeral_storage }),
            )
        } else {
            HashMap::new()
        };
        Ok(cri::PodSandboxStatusResponse { status: Some(status), info, ..Default::default() })
    }

    fn container_status(
        &self,
        request: cri::ContainerStatusRequest,
    ) -> Result<cri::ContainerStatusResponse, Status> {
        let container = self.view.container(&request.container_id)?;
        let info = if request.verbose {
            let meta = container.meta();
            info(&serde_json::json!({
                "sandboxID": meta.sandbox, "cell": container.cell.as_str(), "cellContainer": meta.cell_container, "cellLog": meta.cell_log,
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
        let container = self.view.container(&request.container_id)?;
        Ok(cri::ContainerStatsResponse {
            stats: Some(self.view.usage_of_container(&container, Instant::now())),
        })
    }

    fn sandbox_stats(
        &self,
        request: cri::PodSandboxStatsRequest,
    ) -> Result<cri::PodSandboxStatsResponse, Status> {
        let sandbox = self.view.sandbox(&request.pod_sandbox_id)?;
        Ok(cri::PodSandboxStatsResponse {
            stats: Some(self.view.usage_of_sandbox(&sandbox, Instant::now())),
        })
    }
}

/// As crictl shows it.
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
    answer(super::dispatch::request(message)?)
}
