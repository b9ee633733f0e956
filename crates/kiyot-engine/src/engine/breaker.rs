//! The breaker: pauses launches of a kind in a zone after boots that never enrolled.
//!
//! After three failed boots in a row, no cell of the kind is launched in the zone for a minute.
//! Then a single launch is the trial: its failure doubles the pause, up to half an hour; its
//! enrolment ends the pause. The failures are kept in memory only: a restart forgets them.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
    time::Duration,
};

use kiyot_values::backoff::doubled;

use crate::{
    engine::{
        Cell, CellError, Cells, Effect, Engine, Notice, Now, ProviderKey, State, Step,
        launch::parameters_digest,
    },
    id::CellId,
    placement::{AllRefused, Candidate, LaunchRefusal, Refusal, Refusals},
};

/// The number of consecutive failed boots at which launches pause.
const MIN_FAILURES: u32 = 3;
/// The first and the longest pause. Each failed trial doubles the pause.
const FIRST_PAUSE: Duration = Duration::from_secs(60);
const MAX_PAUSE: Duration = Duration::from_secs(30 * 60);
/// The time for which failed boots of a kind are kept after the last of them.
const MEMORY: Duration = Duration::from_secs(24 * 3600);
/// Bounds the number of kinds and zones with failed boots.
const MAX_KEPT: usize = 256;
/// Bounds the console output that an error quotes, in lines and in characters.
const MAX_CONSOLE_LINES: usize = 3;
const MAX_CONSOLE_CHARS: usize = 500;

/// A kind of boots, which succeed or fail alike in a zone. The choices of a pod are part of the
/// kind, so that no pod pauses the launches of other pods.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct BootKind {
    provider: ProviderKey,
    /// The digest of the provider's own parameters that affect boots.
    parameters_sha256: Option<String>,
    /// The architecture and the instance types that the pod asks for.
    machine: String,
}

impl BootKind {
    pub(super) fn new(
        provider: ProviderKey,
        ignored: &[&str],
        parameters: &BTreeMap<String, String>,
        machine: &str,
    ) -> Self {
        let mut relevant = parameters.clone();
        relevant.retain(|key, _| !ignored.contains(&key.as_str()));
        let parameters_sha256 = parameters_digest(&relevant);
        Self { provider, parameters_sha256, machine: machine.to_owned() }
    }
}

/// A boot that this daemon began and has not counted yet.
#[derive(Debug)]
pub(super) struct Boot {
    kind: BootKind,
    began: Duration,
    has_failed: bool,
}

impl Boot {
    pub(super) fn new(kind: BootKind, now: Now) -> Self {
        Self { kind, began: now.boot, has_failed: false }
    }
}

impl Cell {
    /// Marks the boot of its instance as failed, unless a caller or the provider's lack of capacity
    /// is the cause.
    pub(super) fn note_failed_boot(&mut self, failure: &CellError) {
        let is_of_boot = matches!(failure, CellError::Silent { .. } | CellError::Ended(..));
        if let Some(boot) = &mut self.launch.boot {
            boot.has_failed = is_of_boot
                && matches!(self.state, State::Booting { .. })
                && !self.end.is_by_caller();
        }
    }

    /// Returns whether the cell may boot in a zone, or has a failed boot there that is not counted
    /// yet.
    fn boots_in(&self, kind: &BootKind, zone: &str) -> bool {
        let boot = self.launch.boot.as_ref().filter(|boot| boot.kind == *kind);
        let Some(boot) = boot else { return false };
        let is_there = match self.offering() {
            Some(own) => own.offering.zone == zone,
            None => self.launch.candidates().any(|requested| requested.offering.zone == zone),
        };
        is_there && (self.state.is_unbound() || boot.has_failed)
    }
}

/// The failed boots of a kind in a zone.
#[derive(Debug)]
struct FailedBoots {
    /// The number of consecutive failures.
    count: u32,
    /// The time of the last failure, at which the pause begins.
    last: Duration,
    /// The end of the pause.
    until: Duration,
    /// The end of the console output of the last boot.
    console: Arc<str>,
}

/// The failed boots of all kinds and zones.
#[derive(Debug, Default)]
pub(super) struct Breaker {
    failed: BTreeMap<(BootKind, String), FailedBoots>,
    /// The number of pauses that have begun.
    pub(super) pauses: u64,
}

impl Breaker {
    /// Returns the number of kinds and zones with failed boots.
    #[cfg(test)]
    pub(super) fn kept(&self) -> usize {
        self.failed.len()
    }

    /// Counts a failed boot. Returns the failures if a pause begins. Ignores a boot that began
    /// before the last pause: it is among the launches that led to the pause.
    fn add(&mut self, boot: Boot, zone: &str, console: &str, now: Now) -> Option<&FailedBoots> {
        self.failed.retain(|_, failed| now.boot < failed.last + MEMORY);
        let key = (boot.kind, zone.to_owned());
        if self.failed.len() >= MAX_KEPT && !self.failed.contains_key(&key) {
            let oldest = self.failed.iter().min_by_key(|(_, failed)| failed.last);
            if let Some(oldest) = oldest.map(|(key, _)| key.clone()) {
                self.failed.remove(&oldest);
            }
        }
        let none = FailedBoots { count: 0, last: now.boot, until: now.boot, console: "".into() };
        let failed = self.failed.entry(key).or_insert(none);
        if failed.count >= MIN_FAILURES && boot.began < failed.last {
            return None;
        }
        failed.count = failed.count.saturating_add(1);
        failed.last = now.boot;
        failed.console = end_of(console).into();
        let doublings = failed.count.checked_sub(MIN_FAILURES)?;
        failed.until = now.boot + doubled(FIRST_PAUSE, doublings, MAX_PAUSE);
        self.pauses += 1;
        Some(failed)
    }

    /// Returns the zones in which launches of a kind pause or a trial boots.
    fn paused_zones(&self, cells: &Cells, kind: &BootKind, now: Now) -> BTreeMap<&str, Refusal> {
        let of_kind = self.failed.iter().filter(|((of, _), failed)| {
            of == kind && failed.count >= MIN_FAILURES && now.boot < failed.last + MEMORY
        });
        let paused = of_kind.filter_map(|((_, zone), failed)| {
            let is_tried = now.boot >= failed.until;
            if is_tried && !cells.values().any(|cell| cell.boots_in(kind, zone)) {
                return None;
            }
            let until = if is_tried { now.boot + FIRST_PAUSE } else { failed.until };
            Some((zone.as_str(), Refusal { until, reason: failed.reason(zone, is_tried) }))
        });
        paused.collect()
    }
}

impl FailedBoots {
    /// Returns why no cell is launched in the zone.
    fn reason(&self, zone: &str, is_tried: bool) -> Arc<str> {
        let place = if zone.is_empty() { String::new() } else { format!(" in {zone}") };
        let trial = if is_tried { ", and the trial after them boots" } else { "" };
        let (count, console) = (self.count, &self.console);
        let text = format!(
            "{count} boots{place} in a row did not enrol{trial}; the console of the last ends: \
             {console}"
        );
        text.into()
    }
}

impl Engine {
    /// Returns the refused offerings of a provider, and the zones in which launches with these
    /// parameters pause. `machine` has the architecture and the instance types that the pod asks
    /// for.
    pub fn refusals_for(
        &self,
        key: ProviderKey,
        parameters: &BTreeMap<String, String>,
        machine: &str,
        now: Now,
    ) -> Refusals {
        self.refusals_of_kind(&self.boot_kind_of(key, parameters, machine), now)
    }

    pub(super) fn refusals_of_kind(&self, kind: &BootKind, now: Now) -> Refusals {
        let mut refusals = self.refusals(kind.provider);
        for (zone, refusal) in self.breaker.paused_zones(&self.cells, kind, now) {
            refusals.add(&LaunchRefusal::Zone(zone.to_owned()), now.boot, &refusal);
        }
        refusals
    }

    /// Returns the candidates in zones where launches of a kind do not pause.
    pub(super) fn bootable(
        &self,
        candidates: &[Candidate],
        kind: &BootKind,
        now: Now,
    ) -> Result<Vec<Candidate>, CellError> {
        let paused = self.breaker.paused_zones(&self.cells, kind, now);
        let mut left = candidates.to_vec();
        left.retain(|candidate| !paused.contains_key(candidate.offering.zone.as_str()));
        let refused = || AllRefused::new(candidates, &self.refusals_of_kind(kind, now), now.boot);
        match left.is_empty().then(refused).flatten() {
            Some(refused) => Err(refused.into()),
            None => Ok(left),
        }
    }

    /// Forgets the failed boots of a kind once an agent of the kind has enrolled and its zone is
    /// known.
    pub(super) fn count_enrolled_boot(&mut self, id: &CellId) {
        let Some(cell) = self.cells.get_mut(id) else { return };
        let Some(zone) = cell.offering().map(|own| own.offering.zone.clone()) else {
            return;
        };
        if cell.timeline.at(Step::Enrolled).is_some()
            && let Some(boot) = cell.launch.boot.take()
        {
            self.breaker.failed.remove(&(boot.kind, zone));
        }
    }

    /// Counts a failed boot after its console was read or its cell has ended.
    pub(super) fn count_failed_boot(&mut self, id: &CellId, now: Now) {
        let Some(cell) = self.cells.get_mut(id) else { return };
        let Some(zone) = cell.offering().map(|own| own.offering.zone.clone()) else {
            return;
        };
        let Some(boot) = cell.launch.boot.take_if(|boot| boot.has_failed) else { return };
        let console = cell.state.end().and_then(|end| end.console.as_deref()).unwrap_or_default();
        if let Some(failed) = self.breaker.add(boot, &zone, console, now) {
            let notice = Notice::LaunchesPaused {
                reason: failed.reason(&zone, false),
                seconds: failed.until.saturating_sub(now.boot).as_secs(),
            };
            self.emit(id, Effect::Log(notice));
        }
    }
}

/// Returns the last lines of a console.
fn end_of(console: &str) -> String {
    let lines = console.lines().map(str::trim).filter(|line| !line.is_empty());
    let mut last = VecDeque::new();
    for line in lines {
        if last.len() == MAX_CONSOLE_LINES {
            last.pop_front();
        }
        last.push_back(line);
    }
    let text = last.into_iter().collect::<Vec<_>>().join(" | ");
    let excess = text.chars().count().saturating_sub(MAX_CONSOLE_CHARS);
    text.chars().skip(excess).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn end_of_a_console_has_its_last_lines_and_characters() {
        assert_eq!(end_of(""), "");
        assert_eq!(end_of("one\ntwo\n\nthree \r\nfour\n\n"), "two | three | four");
        let long = format!("first\n{}end", "ä".repeat(1000));
        let end = end_of(&long);
        assert_eq!(end.chars().count(), MAX_CONSOLE_CHARS);
        assert!(end.starts_with('ä') && end.ends_with("end"), "{end}");
    }
}
