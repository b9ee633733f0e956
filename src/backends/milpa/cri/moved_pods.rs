//! Pods that move to the node.
//!
//! A sandbox request names no capabilities. So a pod has a cell before its container requests a
//! capability that reaches the node's kernel. Under the policy `keep-local` its cell then ends, and
//! the kubelet's next sandbox runs on the node.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use kiyot_proto::cri;
use tonic::Status;

use super::{CriService, status_code};
use crate::backends::milpa::{pods::Sandbox, policy};

/// Bounds the remembered pods, far above the pods of a node. A forgotten pod, also after a restart
/// of the daemon, starts in a cell and moves again.
const MAX_MOVED_PODS: usize = 4096;

/// Moved pods by uid, oldest first, with the reasons.
#[derive(Debug, Default)]
pub(super) struct MovedPods(Mutex<VecDeque<(String, String)>>);

impl MovedPods {
    fn lock(&self) -> MutexGuard<'_, VecDeque<(String, String)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn insert(&self, uid: &str, reason: String) {
        let mut pods = self.lock();
        pods.retain(|(known, _)| known != uid);
        if pods.len() == MAX_MOVED_PODS {
            pods.pop_front();
        }
        pods.push_back((uid.to_owned(), reason));
    }

    fn reason(&self, uid: &str) -> Option<String> {
        self.lock().iter().find(|(known, _)| known == uid).map(|(_, reason)| reason.clone())
    }
}

impl CriService {
    /// Returns the reason why the pod of a requested sandbox has moved to the node.
    pub(super) fn has_moved(&self, config: &cri::PodSandboxConfig) -> Option<String> {
        let uid = &config.metadata.as_ref()?.uid;
        let mut rules = self.rules().into_iter();
        let keeps_local = rules.any(|rules| policy::keeps_kernel_access_local(&rules));
        keeps_local.then(|| self.moved.reason(uid)).flatten()
    }

    /// Ends the cell of a sandbox, and returns the refusal of the container: the pod runs on the
    /// node from now on. Returns `None` if the pod does not move.
    ///
    /// A pod moves only while none of its containers runs: a container added by `kubectl debug`
    /// must not end the pod.
    pub(super) async fn move_to_node(
        self: &Arc<Self>,
        sandbox: &Sandbox,
        config: &cri::ContainerConfig,
        deadline: Option<Instant>,
    ) -> Option<Status> {
        let reason = policy::moves_to_node(&self.rules_of_cell(&sandbox.cell)?, config)?;
        let runs = self
            .pods
            .containers_of(&sandbox.id)
            .iter()
            .any(|container| container.state() == cri::ContainerState::ContainerRunning);
        if runs || !sandbox.ready || sandbox.uid.is_empty() {
            return None;
        }
        tracing::info!(sandbox = %sandbox.id, pod = %sandbox.pod, reason, "pod moves to the node");
        let (service, id, uid) = (Arc::clone(self), sandbox.id.clone(), sandbox.uid.to_string());
        let message = format!(
            "pod {} {reason}: its cell has ended, and its next sandbox runs on the node",
            sandbox.pod
        );
        // Remembered last: a pod must not run on the node before its cell has ended.
        let moved = self.detached("CreateContainer", deadline, async move {
            service.sync.stop_sandbox(&id).await.map_err(status_code::of_teardown)?;
            service.moved.insert(&uid, reason);
            Ok(())
        });
        Some(match moved.await {
            Ok(()) => Status::failed_precondition(message),
            Err(status) => status,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moved_pods_are_bounded_and_drop_the_oldest() {
        let pods = MovedPods::default();
        for number in 0..MAX_MOVED_PODS {
            pods.insert(&number.to_string(), "a".to_owned());
        }
        pods.insert("0", "b".to_owned());
        assert_eq!(pods.lock().len(), MAX_MOVED_PODS);
        pods.insert("one more", "c".to_owned());
        assert_eq!(pods.lock().len(), MAX_MOVED_PODS);
        assert_eq!(pods.reason("0").as_deref(), Some("b"));
        assert_eq!((pods.reason("1"), pods.reason("other")), (None, None));
    }
}
