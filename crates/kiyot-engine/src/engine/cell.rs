//! A cell of the engine, its record, and the parts that the daemon reads.

use std::{sync::Arc, time::Duration};

use kiyot_proto::store;

use crate::{
    engine::{
        Engine, Now, RedeemRefusal, State, Timeline, cell::earlier::EarlierLaunches,
        launch::stored_candidate,
    },
    id::CellId,
    placement::{Candidate, NodeShare},
    request::HealthyTimeout,
};

mod bill;
pub(super) mod earlier;
mod end;
pub(super) mod health;
mod launch;
mod order;
pub(super) mod place;
mod pod;
pub(super) mod ports;
pub(super) mod state;
pub(super) mod tags;
pub(super) mod timeline;
mod token;
pub(super) mod tombstones;

pub(super) use bill::Bill;
pub(super) use end::{CellEnd, End, EndCallers};
pub(super) use launch::{CellLaunch, Offered, OpenLaunch};
pub(super) use order::CellOrder;
pub(super) use pod::Pod;
pub(super) use token::Token;

#[derive(Debug)]
pub(super) struct Cell {
    pub(super) id: CellId,
    pub(super) state: State,
    pub(super) launch: CellLaunch,
    /// The provider that launched it; `None` if unknown.
    pub(super) provider: Option<Arc<str>>,
    /// The place of its instance; `None` if unknown, or if the provider has no place.
    pub(super) place: Option<Arc<str>>,
    /// The part of the node that it uses; zero for a cell on another machine.
    pub(super) share: NodeShare,
    pub(super) order: CellOrder,
    /// The identity of the warm pool that it was launched for, or has joined.
    pub(super) pool: Option<Arc<str>>,
    /// Its pod; `None` while it belongs to a warm pool.
    pub(super) pod: Option<Pod>,
    pub(super) boot_id: String,
    pub(super) created_unix_nanos: i64,
    /// The time of creation by [`super::Now::boot`]; `None` for a cell of a previous daemon.
    pub(super) requested: Option<Duration>,
    /// The offering of its instance, once the launch is answered.
    pub(super) offered: Option<Offered>,
    pub(super) timeline: Timeline,
    pub(super) bill: Bill,
    /// The token with which its agent enrols; `None` if its record could not be read.
    pub(super) token: Option<Token>,
    /// True once it was bound.
    pub(super) was_bound: bool,
    /// The launches of the same order that failed before it.
    pub(super) earlier: EarlierLaunches,
    /// The time at which its instance became known.
    pub(super) instance_known: Option<Duration>,
    pub(super) end: CellEnd,
}

impl Cell {
    /// Returns a cell with its id and state; everything else is unknown.
    pub(super) fn new(id: CellId, state: State) -> Self {
        Self {
            id,
            state,
            launch: CellLaunch::default(),
            provider: None,
            place: None,
            share: NodeShare::default(),
            order: CellOrder::None,
            pool: None,
            pod: None,
            boot_id: String::new(),
            created_unix_nanos: 0,
            requested: None,
            offered: None,
            timeline: Timeline::default(),
            bill: Bill::default(),
            token: None,
            was_bound: false,
            earlier: EarlierLaunches::default(),
            instance_known: None,
            end: CellEnd::default(),
        }
    }

    /// Returns whether agents may enrol and connect.
    pub(super) fn admits_agents(&self) -> bool {
        !matches!(self.state, State::Requested | State::Terminating { .. } | State::Ended { .. })
    }

    /// Returns the warm pool that it waits in, or is launched for.
    pub(super) fn warm_in(&self) -> Option<&Arc<str>> {
        self.pool.as_ref().filter(|_| self.pod.is_none() && self.state.is_unbound())
    }

    /// Returns whether it waits in a warm pool, or is launched for a warm pool.
    pub(super) fn is_warm(&self) -> bool {
        self.warm_in().is_some()
    }

    /// Returns the offering of its instance, once the launch is answered.
    pub(super) fn offering(&self) -> Option<&Candidate> {
        self.offered.as_ref().map(|offered| &offered.candidate)
    }

    /// Returns the namespace of its pod; empty without a pod.
    pub(super) fn namespace(&self) -> &str {
        self.pod.as_ref().map_or("", |pod| &pod.namespace)
    }

    /// Returns the uid of its pod; empty without a pod.
    pub(super) fn pod_uid(&self) -> &str {
        self.pod.as_ref().map_or("", |pod| &pod.uid)
    }

    /// Returns the id of its pod's sandbox; empty without a pod.
    pub(super) fn sandbox(&self) -> &str {
        self.pod.as_ref().map_or("", |pod| &pod.sandbox)
    }

    /// Returns how long its agent may be silent, if its pod sets a limit.
    pub(super) fn healthy_timeout(&self) -> Option<HealthyTimeout> {
        self.pod.as_ref()?.healthy_timeout
    }

    pub(super) fn stored(&self) -> store::Cell {
        let addresses = if let State::Bound { addresses, .. } = &self.state {
            addresses.iter().map(ToString::to_string).collect()
        } else {
            Vec::new()
        };
        let token = self.token.as_ref();
        let key = token.and_then(|token| token.spent_by.clone());
        store::Cell {
            id: self.id.as_str().to_owned(),
            token_sha256: token.map(|token| token.sha256.clone()).unwrap_or_default(),
            token_expires_unix: token.map_or(0, |token| token.expires_unix),
            key_sha256: key.unwrap_or_default(),
            phase: self.state.phase().into(),
            instance: self.state.instance().map(|instance| instance.0.clone()).unwrap_or_default(),
            pod_uid: self.pod_uid().to_owned(),
            sandbox: self.sandbox().to_owned(),
            addresses,
            boot_id: self.boot_id.clone(),
            created_unix_nanos: self.created_unix_nanos,
            reason: self.state.reason().map(ToString::to_string).unwrap_or_default(),
            launch: self.state.open_launch().map(|launch| launch.request.stored()),
            containers_ended: self.state.containers_ended(),
            offering: self.offering().map(stored_candidate),
            timeline: Some(self.timeline.stored()),
            namespace: self.namespace().to_owned(),
            healthy_timeout_secs: self.healthy_timeout().map(HealthyTimeout::as_secs),
            pool: self.pool.as_deref().unwrap_or_default().to_owned(),
            offering_reason: self.offered.as_ref().map(|it| it.reason.clone()).unwrap_or_default(),
            start_failures: self.earlier.failures,
            spot_failed: self.earlier.spot_failed,
            last_failures: self.earlier.last.clone(),
            parameters_sha256: self.launch.parameters_sha256.clone().unwrap_or_default(),
            place: self.place.as_deref().unwrap_or_default().to_owned(),
            provider: self.provider.as_deref().unwrap_or_default().to_owned(),
            node_milli_cpus: self.share.milli_cpus,
            node_memory_mib: self.share.memory_mib,
            lost_unix_nanos: self.end.lost_unix_nanos.unwrap_or_default(),
        }
    }
}

impl Engine {
    /// Returns whether a cell is known and its end is not proven.
    pub fn contains(&self, id: &CellId) -> bool {
        self.cells.contains_key(id)
    }

    /// Returns all cells whose end is not proven.
    pub fn ids(&self) -> impl Iterator<Item = &CellId> {
        self.cells.keys()
    }

    /// Returns the digest of the key with which a cell's agent may connect now.
    pub fn admitted_key(&self, id: &CellId) -> Option<&str> {
        let cell = self.cells.get(id).filter(|cell| cell.admits_agents())?;
        cell.token.as_ref()?.spent_by.as_deref()
    }

    /// Checks the token of a cell without spending it.
    pub fn check_token(
        &self,
        id: &CellId,
        token_sha256: &str,
        now: Now,
    ) -> Result<(), RedeemRefusal> {
        self.check_redemption(id, token_sha256, None, now)
    }

    /// Checks the token of a cell and, if a key is given, whether the key may spend it.
    pub(super) fn check_redemption(
        &self,
        id: &CellId,
        token_sha256: &str,
        key_sha256: Option<&str>,
        now: Now,
    ) -> Result<(), RedeemRefusal> {
        let cell = self.cells.get(id).filter(|cell| cell.admits_agents());
        let token = cell.ok_or(RedeemRefusal::Unknown)?.token.as_ref();
        token.ok_or(RedeemRefusal::WrongToken)?.check(token_sha256, key_sha256, now)
    }

    /// Returns the reason of a cell's end, while its tombstone is kept.
    pub fn gone_reason(&self, id: &CellId) -> Option<&str> {
        self.tombstones.reason(id)
    }

    /// Drops all tombstones except those to keep. Returns the cells of the dropped tombstones.
    pub fn forget_gone(&mut self, keep: impl Fn(&CellId) -> bool) -> Vec<CellId> {
        self.tombstones.retain(keep)
    }
}

/// Returns a text of a record; `None` if the text is empty.
pub(super) fn known(text: &str) -> Option<String> {
    (!text.is_empty()).then(|| text.to_owned())
}
