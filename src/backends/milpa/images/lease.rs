//! Leases of the node's containerd, which end with the work that needs them.

use std::{fmt, sync::Arc};

use tokio::runtime::Handle;

use super::node::Node;
use crate::backends::milpa::failure::Failure;

/// Lease on a blob of the node and all that it references. If it is dropped, because its work was
/// cancelled, a task releases it; the deadlines of the node's containerd bound that task.
pub(super) struct Lease {
    node: Arc<dyn Node>,
    /// `None` once it is released.
    id: Option<String>,
}

impl Lease {
    /// Takes a lease.
    pub(super) async fn acquire(node: &Arc<dyn Node>, digest: &str) -> Result<Self, Failure> {
        let id = Some(node.acquire_lease(digest).await?);
        Ok(Self { node: Arc::clone(node), id })
    }

    /// Releases the lease and ignores failures.
    pub(super) async fn release(mut self) {
        if let Some(id) = &self.id {
            self.node.release_lease(id).await;
        }
        self.id = None;
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // Without a runtime the daemon is ending: the lease expires by itself.
        if let (Some(id), Ok(runtime)) = (self.id.take(), Handle::try_current()) {
            let node = Arc::clone(&self.node);
            runtime.spawn(async move { node.release_lease(&id).await });
        }
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease").field("id", &self.id).finish_non_exhaustive()
    }
}
