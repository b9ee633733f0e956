//! Sandboxes whose caller was gone when they were made: torn down if nobody asks for them.

use std::{
    sync::{Arc, PoisonError},
    time::{Duration, Instant},
};

use super::{Verbs, failure};
use crate::backends::milpa::id::SandboxId;

/// How often they are looked at.
const LOOK: Duration = Duration::from_secs(5);

impl Verbs {
    /// A sandbox is made, and nobody has been told yet.
    pub(super) fn unclaimed(&self, id: &SandboxId) {
        self.unclaimed
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(id.clone(), Instant::now());
    }

    /// Somebody knows of this sandbox.
    pub(super) fn claim(&self, id: &SandboxId) {
        self.unclaimed.lock().unwrap_or_else(PoisonError::into_inner).remove(id);
    }

    fn is_unclaimed(&self, id: &SandboxId) -> bool {
        self.unclaimed.lock().unwrap_or_else(PoisonError::into_inner).contains_key(id)
    }

    /// Tears down the sandboxes that nobody has asked for in time.
    pub(super) async fn end_abandoned(self: Arc<Self>) {
        let mut looks = tokio::time::interval(LOOK.min(self.parts.adopt_within));
        loop {
            looks.tick().await;
            let patience = self.parts.adopt_within;
            let abandoned: Vec<_> = {
                let unclaimed = self.unclaimed.lock().unwrap_or_else(PoisonError::into_inner);
                unclaimed
                    .iter()
                    .filter(|(_, since)| since.elapsed() >= patience)
                    .map(|(id, _)| id.clone())
                    .collect()
            };
            for id in abandoned {
                // To end another one takes its time: somebody may have asked for this one
                // meanwhile.
                if !self.is_unclaimed(&id) {
                    continue;
                }
                tracing::warn!(sandbox = %id, seconds = patience.as_secs(), "Nobody has asked for a sandbox since its caller went away; it is torn down");
                match self.erase_sandbox(&id).await {
                    Ok(()) => self.claim(&id),
                    Err(status) => {
                        tracing::warn!(sandbox = %id, status = failure::chain(&status), "An abandoned sandbox is still there")
                    }
                }
            }
        }
    }
}
