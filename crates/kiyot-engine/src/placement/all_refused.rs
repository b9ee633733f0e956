//! The error of a pod whose offerings were all refused recently.

use std::{sync::Arc, time::Duration};

use crate::placement::{Candidate, Offering, Refusals};

/// All offerings that fit a pod were refused recently.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "every offering that fits the pod was refused lately ({offerings} of them); {first} is tried \
     again in {seconds} s, and was refused: {reason}"
)]
pub struct AllRefused {
    /// The number of fitting offerings that a launch tries.
    offerings: usize,
    /// The first offering to be tried again.
    first: Offering,
    /// The provider's reason.
    reason: Arc<str>,
    /// The seconds until it is tried again.
    seconds: u64,
}

impl AllRefused {
    /// Returns the error of a pod with these fitting offerings; `None` if no offering is refused.
    pub fn new(fitting: &[Candidate], refusals: &Refusals, now: Duration) -> Option<Self> {
        let offerings = fitting.iter().map(|candidate| &candidate.offering);
        let (first, refusal) = refusals.first_end(offerings)?;
        Some(Self {
            offerings: fitting.len(),
            first: first.clone(),
            reason: Arc::clone(&refusal.reason),
            seconds: refusal.until.saturating_sub(now).as_secs() + 1,
        })
    }
}
