//! The error of a pod all of whose offerings were refused lately.

use std::{sync::Arc, time::Duration};

use crate::placement::{Candidate, Offering, Refusals};

/// All offerings that fit a pod were refused lately.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "every offering that fits the pod was refused lately ({offerings} of them); {first} is tried \
     again in {seconds} s, and was refused: {reason}"
)]
pub struct AllRefused {
    /// The number of offerings, as far as a launch tries them.
    offerings: usize,
    /// The offering that is tried again first.
    first: Offering,
    /// The provider's reason.
    reason: Arc<str>,
    /// The time after which an offering is tried again.
    seconds: u64,
}

impl AllRefused {
    /// Returns the error of a pod that these offerings fit; `None` if none of them was refused.
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
