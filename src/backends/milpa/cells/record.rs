//! The record of a cell in the store.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use kiyot_proto::store::{self, CellPhase};
use ring::digest::{SHA256, digest};

use super::{
    super::{id::CellId, providers::InstanceId},
    CellsConfig, LaunchOrder,
    state::{State, Step},
};

/// The reason of a cell whose launch the end of the daemon has cut. The kubelet retries.
const UNFINISHED: &str = "the daemon was restarted while the cell was launched";
/// The reason of a bound cell without a sandbox record: its caller never got an answer.
const ORPHANED: &str = "no pod sandbox was recorded for the cell";
/// The reason of a cell without a readable record: its agent can't be authenticated.
const LOST: &str = "its record could not be read";
/// The reason of a cell that was launched before a reboot.
const REBOOTED: &str = "the node was rebooted";

/// The record of a cell, without its state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Record {
    pub(super) id: CellId,
    pub(super) token_sha256: String,
    pub(super) token_expires_unix: i64,
    /// The same time by the monotonic clock; `None` for a token of a previous daemon.
    pub(super) token_deadline: Option<Instant>,
    /// The digest of the public key that spent the token; empty while it is unspent.
    pub(super) key_sha256: String,
    pub(super) pod_uid: String,
    pub(super) sandbox: String,
    pub(super) boot_id: String,
    pub(super) created_unix_nanos: i64,
    /// True once the cell was bound.
    pub(super) was_bound: bool,
}

impl Record {
    pub(super) fn new(id: CellId, token: &str, order: &LaunchOrder, config: &CellsConfig) -> Self {
        let now = since_epoch();
        Self {
            id,
            token_sha256: hex::encode(digest(&SHA256, token.as_bytes())),
            token_expires_unix: i64::try_from((now + config.token_ttl).as_secs())
                .unwrap_or(i64::MAX),
            token_deadline: Instant::now().checked_add(config.token_ttl),
            key_sha256: String::new(),
            pod_uid: order.attachment.pod_uid.clone(),
            sandbox: order.sandbox.as_str().to_owned(),
            boot_id: config.boot_id.clone().unwrap_or_default(),
            created_unix_nanos: i64::try_from(now.as_nanos()).unwrap_or(i64::MAX),
            was_bound: false,
        }
    }

    /// Returns true if the token has expired.
    pub(super) fn is_expired(&self) -> bool {
        self.is_expired_at(Instant::now(), since_epoch())
    }

    /// The wall clock counts only for a token of a previous daemon: while the daemon runs, a clock
    /// that jumps must neither end a launch nor prolong a token.
    fn is_expired_at(&self, now: Instant, since_epoch: Duration) -> bool {
        match self.token_deadline {
            Some(until) => now >= until,
            None => {
                i64::try_from(since_epoch.as_secs()).is_ok_and(|now| now >= self.token_expires_unix)
            }
        }
    }

    /// Returns the record in the form of the store.
    pub(super) fn stored(&self, state: &State) -> store::Cell {
        let addresses = if let State::Bound { addresses, .. } = state {
            addresses.iter().map(ToString::to_string).collect()
        } else {
            Vec::new()
        };
        store::Cell {
            id: self.id.as_str().to_owned(),
            token_sha256: self.token_sha256.clone(),
            token_expires_unix: self.token_expires_unix,
            key_sha256: self.key_sha256.clone(),
            phase: state.phase().into(),
            instance: state.instance().map(|instance| instance.0.clone()).unwrap_or_default(),
            pod_uid: self.pod_uid.clone(),
            sandbox: self.sandbox.clone(),
            addresses,
            boot_id: self.boot_id.clone(),
            created_unix_nanos: self.created_unix_nanos,
            reason: state.reason().map(ToString::to_string).unwrap_or_default(),
        }
    }

    /// Returns the record of a sandbox's cell that has none, with a state that ends it.
    pub(super) fn lost(id: CellId, sandbox: &store::SandboxMeta) -> (Self, State) {
        let metadata =
            sandbox.config.as_ref().and_then(|config| config.metadata.clone()).unwrap_or_default();
        let record = Self {
            id,
            token_sha256: String::new(),
            token_expires_unix: 0,
            token_deadline: None,
            key_sha256: String::new(),
            pod_uid: metadata.uid,
            sandbox: sandbox.id.clone(),
            boot_id: String::new(),
            created_unix_nanos: sandbox.created_unix_nanos,
            was_bound: true,
        };
        (record, State::Terminating { instance: None, reason: LOST.into(), step: Step::Backoff })
    }

    /// Returns a stored cell after a start: a bound cell continues, unless the node was rebooted or
    /// the sandbox is unknown; every other cell must end.
    pub(super) fn resumed(
        id: CellId,
        cell: store::Cell,
        boot_id: Option<&str>,
        has_sandbox: bool,
    ) -> (Self, State) {
        let phase = cell.phase();
        let instance = (!cell.instance.is_empty()).then(|| InstanceId(cell.instance.clone()));
        let rebooted = boot_id.is_some_and(|now| now != cell.boot_id);
        let to_end = |reason: &str| State::Terminating {
            instance: instance.clone(),
            reason: reason.into(),
            step: Step::Backoff,
        };
        let state = match (phase, &instance) {
            (CellPhase::Gone, _) => State::Ended { reason: cell.reason.as_str().into() },
            (CellPhase::Terminating, _) => to_end(&cell.reason),
            (_, _) if rebooted => to_end(REBOOTED),
            (CellPhase::Bound, Some(instance)) if has_sandbox => {
                let addresses =
                    cell.addresses.iter().filter_map(|address| address.parse().ok()).collect();
                State::Bound { instance: instance.clone(), addresses }
            }
            (CellPhase::Bound, _) => to_end(ORPHANED),
            _ => to_end(UNFINISHED),
        };
        let record = Self {
            id,
            token_sha256: cell.token_sha256,
            token_expires_unix: cell.token_expires_unix,
            token_deadline: None,
            key_sha256: cell.key_sha256,
            pod_uid: cell.pod_uid,
            sandbox: cell.sandbox,
            boot_id: cell.boot_id,
            created_unix_nanos: cell.created_unix_nanos,
            was_bound: has_sandbox,
        };
        (record, state)
    }
}

fn since_epoch() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored(phase: CellPhase) -> store::Cell {
        store::Cell {
            phase: phase.into(),
            instance: "i".into(),
            boot_id: "now".into(),
            addresses: vec!["10.0.0.7".into()],
            reason: "stopped".into(),
            ..Default::default()
        }
    }

    fn resumed(cell: store::Cell, has_sandbox: bool) -> State {
        Record::resumed(CellId::mint().unwrap(), cell, Some("now"), has_sandbox).1
    }

    #[test]
    fn start_keeps_only_bound_cells_with_a_sandbox() {
        assert!(matches!(
            resumed(stored(CellPhase::Bound), true),
            State::Bound { addresses, .. } if addresses.len() == 1
        ));
        for phase in [
            CellPhase::Unspecified,
            CellPhase::Requested,
            CellPhase::Launching,
            CellPhase::Booting,
            CellPhase::Enrolled,
        ] {
            let state = resumed(stored(phase), true);
            assert!(
                matches!(
                    &state,
                    State::Terminating { step: Step::Backoff, reason, .. }
                        if &**reason == UNFINISHED
                ),
                "{state:?}"
            );
        }
        assert_eq!(
            resumed(stored(CellPhase::Bound), false).reason().map(|reason| &**reason),
            Some(ORPHANED)
        );
        assert_eq!(
            resumed(stored(CellPhase::Terminating), true).reason().map(|reason| &**reason),
            Some("stopped")
        );
        assert_eq!(
            resumed(stored(CellPhase::Gone), true),
            State::Ended { reason: "stopped".into() }
        );
    }

    #[test]
    fn reboot_ends_all_cells_of_the_node() {
        for phase in [CellPhase::Launching, CellPhase::Bound] {
            let cell = store::Cell { boot_id: "before".into(), ..stored(phase) };
            assert_eq!(
                resumed(cell.clone(), true).reason().map(|reason| &**reason),
                Some(REBOOTED)
            );
            let (_, state) = Record::resumed(CellId::mint().unwrap(), cell, None, true);
            assert_ne!(
                state.reason().map(|reason| &**reason),
                Some(REBOOTED),
                "instances elsewhere don't end with the node"
            );
        }
    }

    /// Verifies X16, Y60.
    #[test]
    fn clock_jump_neither_ends_nor_prolongs_a_token() {
        let (mut record, _) =
            Record::resumed(CellId::mint().unwrap(), stored(CellPhase::Bound), None, true);
        let (begin, noon, ttl) =
            (Instant::now(), Duration::from_secs(1_000_000_000), Duration::from_secs(600));
        record.token_expires_unix = 1_000_000_600;
        record.token_deadline = Some(begin + ttl);
        let year = Duration::from_secs(365 * 24 * 3600);
        for clock in [noon - year, noon, noon + ttl, noon + year] {
            assert!(!record.is_expired_at(begin + ttl - Duration::from_secs(1), clock));
            assert!(record.is_expired_at(begin + ttl, clock));
        }
        // A token of a previous daemon has only the wall clock.
        record.token_deadline = None;
        assert!(
            !record.is_expired_at(begin + ttl, noon) && record.is_expired_at(begin, noon + ttl)
        );
    }

    #[test]
    fn stored_record_round_trips() {
        let (record, state) =
            Record::resumed(CellId::mint().unwrap(), stored(CellPhase::Bound), None, true);
        let again = record.stored(&state);
        assert_eq!(Record::resumed(record.id.clone(), again, None, true), (record, state));
    }
}
