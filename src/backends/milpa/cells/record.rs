//! What of a cell is on disk.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use kiyot_proto::store::{self, CellPhase};
use ring::digest::{SHA256, digest};

use super::{
    super::{id::CellId, providers::InstanceId},
    CellsConfig, LaunchOrder,
    state::{State, Step},
};

/// Why a cell ends whose launch was cut short by the daemon's end. The kubelet asks for the sandbox
/// anew.
const UNFINISHED: &str = "the daemon was restarted while the cell was launched";
/// Why a cell ends of whose sandbox nothing is known: whoever ordered it was never told.
const ABANDONED: &str = "no pod sandbox was recorded for the cell";
/// Why a cell ends whose record can't be read: its agent can't be told from another's any more.
const LOST: &str = "its record could not be read";
/// Why a cell of the time before a reboot ends.
const REBOOTED: &str = "the node was rebooted";

/// What of a cell is on disk, beside its state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Record {
    pub(super) id: CellId,
    pub(super) token_sha256: String,
    pub(super) token_expires_unix: i64,
    /// The same by a clock that nobody sets; `None` if the token was made by a daemon before this
    /// one.
    pub(super) token_until: Option<Instant>,
    /// Of the public key that spent the token; empty while it is unspent.
    pub(super) key_sha256: String,
    pub(super) pod_uid: String,
    pub(super) sandbox: String,
    pub(super) boot_id: String,
    pub(super) created_unix_nanos: i64,
    /// Whether it has been a pod's.
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
            token_until: Instant::now().checked_add(config.token_ttl),
            key_sha256: String::new(),
            pod_uid: order.attachment.pod_uid.clone(),
            sandbox: order.sandbox.as_str().to_owned(),
            boot_id: config.boot_id.clone().unwrap_or_default(),
            created_unix_nanos: i64::try_from(now.as_nanos()).unwrap_or(i64::MAX),
            was_bound: false,
        }
    }

    /// Whether the token's time is over.
    pub(super) fn expired(&self) -> bool {
        self.expired_at(Instant::now(), since_epoch())
    }

    /// The node's clock counts only for a token of before: while the daemon runs, a clock that
    /// jumps must neither end a launch nor prolong a token.
    fn expired_at(&self, now: Instant, since_epoch: Duration) -> bool {
        match self.token_until {
            Some(until) => now >= until,
            None => {
                i64::try_from(since_epoch.as_secs()).is_ok_and(|now| now >= self.token_expires_unix)
            }
        }
    }

    /// As the store keeps it.
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

    /// A pod's cell without a record: all that can be done is to end it.
    pub(super) fn lost(id: CellId, sandbox: &store::SandboxMeta) -> (Self, State) {
        let metadata =
            sandbox.config.as_ref().and_then(|config| config.metadata.clone()).unwrap_or_default();
        let record = Self {
            id,
            token_sha256: String::new(),
            token_expires_unix: 0,
            token_until: None,
            key_sha256: String::new(),
            pod_uid: metadata.uid,
            sandbox: sandbox.id.clone(),
            boot_id: String::new(),
            created_unix_nanos: sandbox.created_unix_nanos,
            was_bound: true,
        };
        (record, State::Terminating { instance: None, reason: LOST.into(), step: Step::Pause })
    }

    /// What a daemon that starts makes of a stored cell: one that was a pod's goes on, unless the
    /// node was booted anew or the sandbox is unknown; every other must end.
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
            step: Step::Pause,
        };
        let state = match (phase, &instance) {
            (CellPhase::Gone, _) => State::Gone { reason: cell.reason.as_str().into() },
            (CellPhase::Terminating, _) => to_end(&cell.reason),
            (_, _) if rebooted => to_end(REBOOTED),
            (CellPhase::Bound, Some(instance)) if has_sandbox => {
                let addresses =
                    cell.addresses.iter().filter_map(|address| address.parse().ok()).collect();
                State::Bound { instance: instance.clone(), addresses }
            }
            (CellPhase::Bound, _) => to_end(ABANDONED),
            _ => to_end(UNFINISHED),
        };
        let record = Self {
            id,
            token_sha256: cell.token_sha256,
            token_expires_unix: cell.token_expires_unix,
            token_until: None,
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
    fn only_a_pods_cell_goes_on() {
        assert!(
            matches!(resumed(stored(CellPhase::Bound), true), State::Bound { addresses, .. } if addresses.len() == 1)
        );
        for phase in [
            CellPhase::Unspecified,
            CellPhase::Requested,
            CellPhase::Launching,
            CellPhase::Booting,
            CellPhase::Enrolled,
        ] {
            let state = resumed(stored(phase), true);
            assert!(
                matches!(&state, State::Terminating { step: Step::Pause, reason, .. } if &**reason == UNFINISHED),
                "{state:?}"
            );
        }
        assert_eq!(
            resumed(stored(CellPhase::Bound), false).reason().map(|reason| &**reason),
            Some(ABANDONED)
        );
        assert_eq!(
            resumed(stored(CellPhase::Terminating), true).reason().map(|reason| &**reason),
            Some("stopped")
        );
        assert_eq!(
            resumed(stored(CellPhase::Gone), true),
            State::Gone { reason: "stopped".into() }
        );
    }

    #[test]
    fn a_reboot_ends_all() {
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
    fn a_clock_that_jumps_neither_ends_nor_prolongs_a_token() {
        let (mut record, _) =
            Record::resumed(CellId::mint().unwrap(), stored(CellPhase::Bound), None, true);
        let (begin, noon, ttl) =
            (Instant::now(), Duration::from_secs(1_000_000_000), Duration::from_secs(600));
        record.token_expires_unix = 1_000_000_600;
        record.token_until = Some(begin + ttl);
        let year = Duration::from_secs(365 * 24 * 3600);
        for clock in [noon - year, noon, noon + ttl, noon + year] {
            assert!(!record.expired_at(begin + ttl - Duration::from_secs(1), clock));
            assert!(record.expired_at(begin + ttl, clock));
        }
        // Of a daemon before there is only the time of day.
        record.token_until = None;
        assert!(!record.expired_at(begin + ttl, noon) && record.expired_at(begin, noon + ttl));
    }

    #[test]
    fn comes_back_as_it_was() {
        let (record, state) =
            Record::resumed(CellId::mint().unwrap(), stored(CellPhase::Bound), None, true);
        let again = record.stored(&state);
        assert_eq!(Record::resumed(record.id.clone(), again, None, true), (record, state));
    }
}
