//! Usage after a start of the daemon: the cells of before are just calling home. A kubelet that
//! read a list without their pods would see them use nothing, so who asks waits for them.

use std::time::Instant;

use kiyot_proto::cri;
use prost::Message;

use super::{Verbs, filter};
use crate::backends::Method;

impl Verbs {
    /// Whether a call asks for usage that is still to come.
    pub(super) fn awaits_usage(&self, method: Method, message: &[u8]) -> bool {
        Instant::now() < self.returned_by && self.lacks_usage(method, message)
    }

    /// Waits until the usage that a call asks for has come, or its time is over.
    pub(super) async fn await_usage(&self, method: Method, message: &[u8]) {
        let left = self.returned_by.saturating_duration_since(Instant::now());
        self.view.wait(left, |_| (!self.lacks_usage(method, message)).then_some(())).await;
    }

    fn lacks_usage(&self, method: Method, message: &[u8]) -> bool {
        match method {
            Method::ListContainerStats => {
                decoded(message, |request: cri::ListContainerStatsRequest| {
                    self.view.awaits_container_stats(&filter::Containers::of_stats(request.filter))
                })
            }
            Method::ListPodSandboxMetrics => {
                self.view.awaits_sandbox_stats(&filter::Sandboxes::default())
            }
            Method::ListPodSandboxStats => {
                decoded(message, |request: cri::ListPodSandboxStatsRequest| {
                    self.view.awaits_sandbox_stats(&filter::Sandboxes::of_stats(request.filter))
                })
            }
            Method::ContainerStats => decoded(message, |request: cri::ContainerStatsRequest| {
                self.view.awaits_container_stats(&filter::Containers {
                    id: request.container_id,
                    ..Default::default()
                })
            }),
            Method::PodSandboxStats => decoded(message, |request: cri::PodSandboxStatsRequest| {
                self.view.awaits_sandbox_stats(&filter::Sandboxes {
                    id: request.pod_sandbox_id,
                    ..Default::default()
                })
            }),
            _ => false,
        }
    }
}

/// What can't be decoded is answered so at once.
fn decoded<Q: Message + Default>(message: &[u8], lacks: impl FnOnce(Q) -> bool) -> bool {
    Q::decode(message).is_ok_and(lacks)
}
