//! Creation and end of pods that the daemon runs without a kubelet.

use std::sync::Arc;

use kiyot_proto::admin;
use tonic::Status;

use super::{manifest_files, parts::Parts};
use crate::backends::{
    Backend,
    milpa::{Milpa, standalone::Created},
};

impl Parts {
    /// Creates the pods of a manifest.
    pub(super) async fn create_pods(
        &self,
        request: admin::CreatePodsRequest,
    ) -> Result<admin::CreatePodsResponse, Status> {
        let milpa = self.milpa(&request.backend)?;
        let created = milpa.create_pods(manifest_files::of(request.files)).await?;
        let message = |created: Created| {
            let Created { namespace, name, uid, warnings } = created;
            admin::CreatedPod { namespace, name, uid, warnings }
        };
        Ok(admin::CreatePodsResponse { pods: created.into_iter().map(message).collect() })
    }

    /// Ends a pod of [`Self::create_pods`].
    pub(super) async fn delete_pod(
        &self,
        request: admin::DeletePodRequest,
    ) -> Result<admin::DeletePodResponse, Status> {
        if let Some(grace) = request.grace_seconds.filter(|grace| *grace < 0) {
            return Err(Status::invalid_argument(format!(
                "grace period {grace}; allowed: 0 seconds or more"
            )));
        }
        let (milpa, key) = self.find_pod(&request.namespace, &request.name)?;
        let pod = milpa
            .inventory()
            .pod(&key)
            .ok_or_else(|| Status::not_found(format!("pod {} has just ended", key.name())))?;
        milpa.delete_pod(&pod.uid, request.grace_seconds).await.map_err(|status| {
            Status::new(status.code(), format!("pod {}: {}", key.name(), status.message()))
        })?;
        Ok(admin::DeletePodResponse { namespace: pod.namespace, name: pod.name, uid: pod.uid })
    }

    fn milpa(&self, name: &str) -> Result<&Arc<Milpa>, Status> {
        let is_it = |milpa: &&Arc<Milpa>| name.is_empty() || milpa.name().to_string() == name;
        self.milpas.iter().find(is_it).ok_or_else(|| {
            let known: Vec<_> = self.milpas.iter().map(|milpa| milpa.name().to_string()).collect();
            Status::not_found(format!("backend {name:?}; allowed: {}", known.join(", ")))
        })
    }
}
