//! The pod of a cell.

use kiyot_proto::store;

use crate::{
    engine::{JournalSandbox, PodPorts},
    id::SandboxId,
    request::HealthyTimeout,
    wanted::Wanted,
};

/// A pod that a cell was launched for, or that has taken the cell from a warm pool.
#[derive(Debug, Default, PartialEq, Eq)]
pub(in crate::engine) struct Pod {
    /// The id of its sandbox.
    pub(in crate::engine) sandbox: String,
    pub(in crate::engine) uid: String,
    pub(in crate::engine) namespace: String,
    /// The time for which the cell's agent may be silent, if the pod sets a limit.
    pub(in crate::engine) healthy_timeout: Option<HealthyTimeout>,
    /// Its host ports and networks, from its attachment until its end.
    pub(in crate::engine) ports: Option<Box<PodPorts>>,
}

impl Pod {
    pub(in crate::engine) fn of_order(sandbox: &SandboxId, wanted: &Wanted) -> Self {
        Self {
            sandbox: sandbox.as_str().to_owned(),
            uid: wanted.key.pod_uid.clone(),
            namespace: wanted.key.namespace.clone(),
            healthy_timeout: wanted.request.healthy_timeout,
            ports: None,
        }
    }

    pub(in crate::engine) fn of_sandbox(sandbox: &JournalSandbox) -> Self {
        Self {
            sandbox: sandbox.id.clone(),
            uid: sandbox.pod_uid.clone(),
            ports: sandbox.ports.clone(),
            ..Self::default()
        }
    }

    /// Returns the pod in a cell's record, if any, with the ports of its recorded sandbox.
    pub(in crate::engine) fn from_stored(
        record: &store::Cell,
        sandbox: Option<&JournalSandbox>,
    ) -> Option<Self> {
        let pod = Self {
            sandbox: record.sandbox.clone(),
            uid: record.pod_uid.clone(),
            namespace: record.namespace.clone(),
            healthy_timeout: record.healthy_timeout_secs.map(HealthyTimeout::of_secs),
            ports: sandbox.and_then(|sandbox| sandbox.ports.clone()),
        };
        (pod != Self::default()).then_some(pod)
    }
}
