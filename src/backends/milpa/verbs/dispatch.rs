//! Which method is which verb.

use std::{future::Future, sync::Arc, time::Instant};

use bytes::Bytes;
use futures::{stream, stream::BoxStream};
use kiyot_proto::cri;
use prost::Message;
use tonic::Status;

use super::{Verbs, policy};
use crate::backends::Method;

impl Verbs {
    /// Answers a call at once if that needs nothing but memory.
    pub fn snapshot(&self, method: Method, message: &[u8]) -> Option<Result<Bytes, Status>> {
        self.answer_at_once(method, message)
    }

    /// Why the pod of a `RunPodSandboxRequest` runs on the node though it is routed here, by the
    /// backend's policy.
    pub fn leaves_to_node(&self, message: &[u8]) -> Option<String> {
        // Without such a policy nothing need be decoded; what can't be decoded is for the call
        // itself to complain about.
        let rules = self.rules();
        let request =
            rules.keeps_any().then(|| cri::RunPodSandboxRequest::decode(message).ok())??;
        let config = request.config.as_ref()?;
        policy::keeps_local(&rules, config).or_else(|| self.has_moved(config))
    }

    /// Whether an image call is for a pod in a cell.
    pub fn claims_image(&self, method: Method, message: &[u8]) -> bool {
        self.is_for_a_cell(method, message)
    }

    /// An encoded `ImageStatusResponse` of what cells reported for a reference.
    pub fn reported_image(&self, reference: &str) -> Option<Bytes> {
        self.image_reported(reference)
    }

    /// Returns an encoded `ImageStatusResponse` for an `ImageStatus` with the annotations that pods
    /// in cells have but for the kubelet's own, if it is known which image they run.
    pub fn image_of_pods_like(&self, message: &[u8]) -> Option<Bytes> {
        self.image_run_by_pods_like(message)
    }

    /// What happens to pods in cells from now on: encoded `ContainerEventResponse`s, until one was
    /// lost, which an error says.
    pub fn events(&self) -> BoxStream<'static, Result<Bytes, Status>> {
        Box::pin(stream::unfold(Some(self.view.events()), |events| async {
            let mut events = events?;
            let next = events.next().await;
            let more = next.is_ok().then_some(events);
            Some((next, more))
        }))
    }

    /// Answers a call.
    pub async fn call(
        self: &Arc<Self>,
        method: Method,
        message: Bytes,
        deadline: Option<Instant>,
    ) -> Result<Bytes, Status> {
        if let Some(answer) = self.answer_at_once(method, &message) {
            return answer;
        }
        match deadline {
            None => self.act(method, message, None).await,
            Some(deadline) => {
                tokio::time::timeout_at(deadline.into(), self.act(method, message, Some(deadline)))
                    .await
                    .unwrap_or_else(|_| {
                        Err(Status::deadline_exceeded(format!(
                            "{method} of a pod in a cell takes longer than its caller waits"
                        )))
                    })
            }
        }
    }

    async fn act(
        self: &Arc<Self>,
        method: Method,
        message: Bytes,
        deadline: Option<Instant>,
    ) -> Result<Bytes, Status> {
        match method {
            Method::RunPodSandbox => {
                typed(&message, |request| Box::pin(self.run_sandbox(request, deadline))).await
            }
            Method::StopPodSandbox => {
                typed(&message, |request| self.stop_pod_sandbox(request, deadline)).await
            }
            Method::RemovePodSandbox => {
                typed(&message, |request| self.remove_pod_sandbox(request, deadline)).await
            }
            Method::CreateContainer => {
                typed(&message, |request| Box::pin(self.create_container(request, deadline))).await
            }
            Method::StartContainer => {
                typed(&message, |request| self.start_container(request, deadline)).await
            }
            Method::StopContainer => {
                typed(&message, |request| self.stop_container(request, deadline)).await
            }
            Method::RemoveContainer => {
                typed(&message, |request| self.remove_container(request, deadline)).await
            }
            Method::ReopenContainerLog => {
                typed(&message, |request| self.reopen_log(request, deadline)).await
            }
            Method::UpdateContainerResources => {
                typed(&message, |request| Box::pin(self.update_resources(request, deadline))).await
            }
            Method::ExecSync => {
                typed(&message, |request| Box::pin(self.exec_sync(request, deadline))).await
            }
            Method::Exec => typed(&message, |request| Box::pin(self.exec(request, deadline))).await,
            Method::Attach => {
                typed(&message, |request| Box::pin(self.attach(request, deadline))).await
            }
            Method::PortForward => {
                typed(&message, |request| Box::pin(self.port_forward(request, deadline))).await
            }
            Method::PullImage => {
                typed(&message, |request| Box::pin(self.pull_image(request, deadline))).await
            }
            Method::ImageStatus => {
                typed(&message, |request| Box::pin(self.image_status(request, deadline))).await
            }
            Method::ListPodSandboxMetrics => Ok(Box::pin(self.metrics(&message)).await),
            _ => {
                self.await_usage(method, &message).await;
                self.answer_as_is(method, &message).unwrap_or_else(|| {
                    Err(Status::unimplemented(format!("{method} is not there for pods in cells")))
                })
            }
        }
    }
}

/// Decodes a request.
pub(super) fn request<Q: Message + Default>(message: &[u8]) -> Result<Q, Status> {
    Q::decode(message)
        .map_err(|error| Status::invalid_argument(format!("the request can't be decoded: {error}")))
}

async fn typed<Q: Message + Default, A: Message, W: Future<Output = Result<A, Status>>>(
    message: &[u8],
    verb: impl FnOnce(Q) -> W,
) -> Result<Bytes, Status> {
    Ok(verb(request(message)?).await?.encode_to_vec().into())
}
