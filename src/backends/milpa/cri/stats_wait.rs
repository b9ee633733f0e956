//! The wait for usage after a start of the daemon, while recovered cells dial. Without their pods
//! in a list, a kubelet would see the pods use nothing.

use std::time::Instant;

use kiyot_proto::cri;
use prost::Message;

use super::CriService;
use crate::backends::{Method, milpa::pods::filter};

impl CriService {
    /// Returns whether a call has to wait for usage.
    pub(super) fn awaits_usage(&self, method: Method, message: &[u8]) -> bool {
        Instant::now() < self.usage_deadline && self.lacks_usage(method, message)
    }

    /// Waits for the usage that a call lists, until the end of the wait for recovered pods.
    pub(super) async fn wait_for_usage(&self, method: Method, message: &[u8]) {
        let left = self.usage_deadline.saturating_duration_since(Instant::now());
        self.pods.wait(left, |_| (!self.lacks_usage(method, message)).then_some(())).await;
    }

    fn lacks_usage(&self, method: Method, message: &[u8]) -> bool {
        match method {
            Method::ListContainerStats => {
                decoded(message, |request: cri::ListContainerStatsRequest| {
                    self.pods.awaits_container_stats(&filter::Containers::of_stats(request.filter))
                })
            }
            Method::ListPodSandboxMetrics => {
                self.pods.awaits_sandbox_stats(&filter::Sandboxes::default())
            }
            Method::ListPodSandboxStats => {
                decoded(message, |request: cri::ListPodSandboxStatsRequest| {
                    self.pods.awaits_sandbox_stats(&filter::Sandboxes::of_stats(request.filter))
                })
            }
            Method::ContainerStats => decoded(message, |request: cri::ContainerStatsRequest| {
                self.pods.awaits_container_stats(&filter::Containers {
                    id: request.container_id,
                    ..Default::default()
                })
            }),
            Method::PodSandboxStats => decoded(message, |request: cri::PodSandboxStatsRequest| {
                self.pods.awaits_sandbox_stats(&filter::Sandboxes {
                    id: request.pod_sandbox_id,
                    ..Default::default()
                })
            }),
            _ => false,
        }
    }
}

/// Decodes a request. An invalid request does not wait: its response is the error.
fn decoded<Q: Message + Default>(message: &[u8], lacks: impl FnOnce(Q) -> bool) -> bool {
    Q::decode(message).is_ok_and(lacks)
}
