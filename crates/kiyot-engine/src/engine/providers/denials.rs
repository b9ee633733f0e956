//! Denied launches, which are not repeated for a while.
//!
//! Refused credentials, or a quota that every launch needs, stop all launches. A launch that the
//! policy denies stops only the launches with its parameters and its first candidate: a pod chooses
//! a role, security groups and an instance type by annotations, and must not stop the launches of
//! other pods by its choice.

use std::{collections::BTreeMap, time::Duration};

use crate::{
    engine::{CellError, Now, launch::parameters_digest},
    placement::{Candidate, Offering},
    provider::{LaunchSpec, ProviderError},
};

/// Bounds the kinds of launches that are kept.
const MAX_KINDS: usize = 256;

/// The digest of the parameters of a launch, and its first candidate.
type Kind = (Option<String>, Offering);

/// A launch that was not permitted.
#[derive(Debug)]
pub(in crate::engine) struct Denial {
    /// The time from which launches are tried again.
    pub(in crate::engine) until: Duration,
    error: ProviderError,
}

impl Denial {
    /// Returns the error of an order until launches are tried again.
    pub(in crate::engine) fn error(&self, now: Now) -> CellError {
        let seconds = self.until.saturating_sub(now.boot).as_secs() + 1;
        CellError::Denied { seconds, source: self.error.clone() }
    }
}

/// The launches that were not permitted lately.
#[derive(Debug, Default)]
pub(in crate::engine) struct Denials {
    of_all: Option<Denial>,
    of_kinds: BTreeMap<Kind, Denial>,
}

impl Denials {
    /// Records that a launch was not permitted.
    pub(in crate::engine) fn add(
        &mut self,
        launch: &LaunchSpec,
        error: ProviderError,
        until: Duration,
    ) {
        let denial = Denial { until, error };
        if !denial.error.is_of_request {
            self.of_all = Some(denial);
            return;
        }
        let Some(kind) = kind(&launch.parameters, &launch.candidates) else { return };
        if self.of_kinds.len() >= MAX_KINDS && !self.of_kinds.contains_key(&kind) {
            let first = self.of_kinds.iter().min_by_key(|(_, denial)| denial.until);
            if let Some(first) = first.map(|(kind, _)| kind.clone()) {
                self.of_kinds.remove(&first);
            }
        }
        self.of_kinds.insert(kind, denial);
    }

    /// Returns the denial that stops all launches.
    pub(in crate::engine) fn of_all(&self, now: Now) -> Option<&Denial> {
        self.of_all.as_ref().filter(|denial| now.boot < denial.until)
    }

    /// Returns the denial that stops launches with these parameters and candidates.
    pub(in crate::engine) fn of_kind(
        &self,
        parameters: &BTreeMap<String, String>,
        candidates: &[Candidate],
        now: Now,
    ) -> Option<&Denial> {
        if self.of_kinds.is_empty() {
            return None;
        }
        let denial = self.of_kinds.get(&kind(parameters, candidates)?)?;
        Some(denial).filter(|denial| now.boot < denial.until)
    }
}

fn kind(parameters: &BTreeMap<String, String>, candidates: &[Candidate]) -> Option<Kind> {
    let first = candidates.first()?.offering.clone();
    Some((parameters_digest(parameters), first))
}
