//! The launch of a cell's instance.

use std::sync::Arc;

use kiyot_proto::store;

use crate::{
    engine::{Boot, Launch, launch},
    placement::Candidate,
    provider::ProviderError,
};

/// A launch without an answer. The next call repeats the request.
#[derive(Debug, Clone)]
pub struct OpenLaunch {
    pub(in crate::engine) request: Arc<Launch>,
    /// True if a call got no answer, and may have made an instance.
    pub(in crate::engine) may_have_effect: bool,
    /// The error of the last call.
    pub(in crate::engine) error: Option<ProviderError>,
}

/// The parts of a launch that are known after its answer.
#[derive(Debug, Default)]
pub(in crate::engine) struct CellLaunch {
    /// The request, until the cell is bound; `None` if a previous daemon got the answer.
    pub(in crate::engine) request: Option<Arc<Launch>>,
    /// The digest of the provider's own parameters of the request; `None` without parameters.
    pub(in crate::engine) parameters_sha256: Option<String>,
    /// The number of replays of the request.
    pub(in crate::engine) replays: u32,
    /// The boot of the instance, until the outcome is counted; `None` for a cell of a previous
    /// daemon.
    pub(in crate::engine) boot: Option<Boot>,
}

/// The offering of an instance.
#[derive(Debug)]
pub(in crate::engine) struct Offered {
    pub(in crate::engine) candidate: Candidate,
    /// The reason for the choice; empty in the record of an older daemon.
    pub(in crate::engine) reason: String,
}

impl Offered {
    pub(in crate::engine) fn from_stored(record: &store::Cell) -> Option<Self> {
        let candidate = launch::candidate(record.offering.as_ref()?);
        Some(Self { candidate, reason: record.offering_reason.clone() })
    }
}

impl OpenLaunch {
    /// Returns a launch whose call was not made yet.
    pub(in crate::engine) fn new(request: Arc<Launch>) -> Self {
        Self { request, may_have_effect: false, error: None }
    }

    /// Returns the launch of a previous daemon. Its call may be under way.
    pub(in crate::engine) fn resumed(request: Arc<Launch>) -> Self {
        Self { may_have_effect: true, ..Self::new(request) }
    }
}

impl CellLaunch {
    /// Returns the candidates of the request, if the request is known.
    pub(in crate::engine) fn candidates(&self) -> impl Iterator<Item = &Candidate> {
        self.request.iter().flat_map(|request| &request.spec.candidates)
    }
}
