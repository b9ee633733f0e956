//! Dispatch of CRI methods.

use std::{future::Future, sync::Arc, time::Instant};

use bytes::Bytes;
use futures::{stream, stream::BoxStream};
use kiyot_engine::{OrderKey, request::RuleProviders};
use kiyot_proto::cri;
use prost::Message;
use tonic::Status;

use super::{CriService, run_sandbox::Launching};
use crate::backends::{
    Features, Method,
    milpa::policy::{self, Rules},
};

impl CriService {
    /// Answers a call from memory, without waiting; `None` if it needs [`Self::call`].
    pub fn snapshot(&self, method: Method, message: &[u8]) -> Option<Result<Bytes, Status>> {
        self.cached_response(method, message)
    }

    /// Returns the reason why the policy leaves the pod of an encoded `RunPodSandboxRequest` to the
    /// node, worded to follow "it".
    pub fn leaves_to_node(&self, message: &[u8]) -> Option<String> {
        // Without a policy that keeps pods local, nothing is decoded. An invalid request fails in
        // the call itself. The policy is the same for all providers.
        let rules = self.rules().into_iter().next()?;
        let request =
            rules.keeps_any_local().then(|| cri::RunPodSandboxRequest::decode(message).ok())??;
        let config = request.config.as_ref()?;
        policy::keeps_local(&rules, config).or_else(|| self.has_moved(config))
    }

    /// Returns the features that pods in cells may use, as far as they are known.
    pub fn features(&self) -> Features {
        Features {
            recursive_read_only_mounts: self.sync.features.recursive_read_only_mounts(),
            may_be_on_node: self.rules().first().is_some_and(Rules::keeps_any_local),
        }
    }

    /// Returns all later events of pods in cells, as encoded `ContainerEventResponse`s. The stream
    /// ends with an error when an event is lost.
    pub fn events(&self) -> BoxStream<'static, Result<Bytes, Status>> {
        Box::pin(stream::unfold(Some(self.pods.events()), |events| async {
            let mut events = events?;
            let next = events.next().await.map_err(Status::from);
            let more = next.is_ok().then_some(events);
            Some((next, more))
        }))
    }

    /// Returns the launch of a sandbox that is under way.
    pub(crate) fn launching(&self, key: &OrderKey) -> Option<Arc<Launching>> {
        self.launches.request(key)
    }

    /// Answers a call.
    pub async fn call(
        self: &Arc<Self>,
        method: Method,
        message: Bytes,
        deadline: Option<Instant>,
    ) -> Result<Bytes, Status> {
        if let Some(answer) = self.cached_response(method, &message) {
            return answer;
        }
        within(deadline, method, self.act(method, message, deadline)).await
    }

    /// Answers `RunPodSandbox` for a pod with a routing rule that restricts the providers of its
    /// cell.
    pub async fn run_by_rule(
        self: &Arc<Self>,
        message: &[u8],
        rule: RuleProviders,
        deadline: Option<Instant>,
    ) -> Result<Bytes, Status> {
        let run =
            typed(message, |request| Box::pin(self.run_sandbox(request, Some(rule), deadline)));
        within(deadline, Method::RunPodSandbox, run).await
    }

    /// Answers a call that the daemon itself makes.
    pub async fn call_with<A: Message + Default>(
        self: &Arc<Self>,
        method: Method,
        request: &impl Message,
        deadline: Option<Instant>,
    ) -> Result<A, Status> {
        let answer = self.call(method, request.encode_to_vec().into(), deadline).await?;
        A::decode(answer)
            .map_err(|error| Status::internal(format!("answer of {method:?}: {error}")))
    }

    async fn act(
        self: &Arc<Self>,
        method: Method,
        message: Bytes,
        deadline: Option<Instant>,
    ) -> Result<Bytes, Status> {
        match method {
            Method::RunPodSandbox => {
                typed(&message, |request| Box::pin(self.run_sandbox(request, None, deadline))).await
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
            _ => {
                self.wait_for_usage(method, &message).await;
                self.current_response(method, &message).unwrap_or_else(|| {
                    Err(Status::unimplemented(format!(
                        "{method} is not supported for pods in cells"
                    )))
                })
            }
        }
    }
}

/// Waits for an answer until the caller's deadline.
async fn within(
    deadline: Option<Instant>,
    method: Method,
    answer: impl Future<Output = Result<Bytes, Status>>,
) -> Result<Bytes, Status> {
    let Some(deadline) = deadline else { return answer.await };
    tokio::time::timeout_at(deadline.into(), answer).await.unwrap_or_else(|_| {
        Err(Status::deadline_exceeded(format!(
            "{method} of a pod in a cell takes longer than its caller waits"
        )))
    })
}

pub(super) fn decoded<Q: Message + Default>(message: &[u8]) -> Result<Q, Status> {
    Q::decode(message)
        .map_err(|error| Status::invalid_argument(format!("the request can't be decoded: {error}")))
}

async fn typed<Q: Message + Default, A: Message, W: Future<Output = Result<A, Status>>>(
    message: &[u8],
    verb: impl FnOnce(Q) -> W,
) -> Result<Bytes, Status> {
    Ok(verb(decoded(message)?).await?.encode_to_vec().into())
}
