//! The launch of a cell's instance.

use std::sync::Arc;

use kiyot_proto::store;

use crate::{
    engine::{Boot, Launch, launch},
    placement::Candidate,
    provider::ProviderError,
};

/// The launch of a cell's instance, as far as it goes.
#[derive(Debug, Default)]
pub(in crate::engine) struct CellLaunch {
    /// Its call, until the cell is bound; `None` if a previous daemon has its answer.
    pub(in crate::engine) call: Option<Arc<Launch>>,
    /// The digest of the provider's own parameters of the call; `None` without any.
    pub(in crate::engine) parameters_sha256: Option<String>,
    /// True if a call has no answer: it may have made an instance.
    pub(in crate::engine) may_have_effect: bool,
    /// The error of the last call that may succeed when it is repeated.
    pub(in crate::engine) error: Option<ProviderError>,
    /// The number of replays of the call.
    pub(in crate::engine) replays: u32,
    /// The boot of the instance, until the outcome is counted; `None` for a cell of a previous
    /// daemon.
    pub(in crate::engine) boot: Option<Boot>,
}

/// The offering of an instance.
#[derive(Debug)]
pub(in crate::engine) struct Offered {
    pub(in crate::engine) candidate: Candidate,
    /// The reason for it; empty in the record of an older daemon.
    pub(in crate::engine) reason: String,
}

impl Offered {
    /// Returns the offering of a cell's record, if it has one.
    pub(in crate::engine) fn from_stored(record: &store::Cell) -> Option<Self> {
        let candidate = launch::candidate(record.offering.as_ref()?);
        Some(Self { candidate, reason: record.offering_reason.clone() })
    }
}

impl CellLaunch {
    /// Returns the launch of a previous daemon, whose call may be on its way.
    pub(in crate::engine) fn resumed(
        call: Option<Launch>,
        parameters_sha256: Option<String>,
    ) -> Self {
        let call = call.map(Arc::new);
        Self { call, parameters_sha256, may_have_effect: true, ..Self::default() }
    }

    /// Returns the candidates of the call, as long as it is known.
    pub(in crate::engine) fn candidates(&self) -> impl Iterator<Item = &Candidate> {
        self.call.iter().flat_map(|call| &call.spec.candidates)
    }
}
