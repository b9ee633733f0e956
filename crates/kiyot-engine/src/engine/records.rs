//! Records that could not be written.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use kiyot_proto::store::CellPhase;

use crate::{
    StoreError,
    engine::{
        CellError, CellEvent, Change, CommitOf, Effect, Engine, Now, cell::state::NOT_RECORDED,
        config::MAX_RETRY_PAUSE, timers::Timer,
    },
    id::CellId,
};

/// Bounds the ended cells whose last changes wait to be written.
const MAX_UNWRITTEN: usize = 1000;
/// Bounds the commits of a retry.
const MAX_REWRITTEN: usize = 16;

/// The last changes of ended cells that could not be written yet.
#[derive(Debug, Default)]
pub(super) struct Unwritten {
    changes: VecDeque<(CellId, Vec<Change>)>,
    /// The consecutive retries that failed.
    failures: u32,
    /// The time of the last retry, until a commit of the retry fails.
    retried: Option<Duration>,
}

impl Engine {
    /// Ends a cell whose state could not be recorded. Makes up for the skipped effects: a skipped
    /// call of the provider gets no answer, and a skipped answer to an order must still be sent.
    pub(super) fn on_record_failed(
        &mut self,
        id: &CellId,
        error: Arc<StoreError>,
        skipped: Vec<Effect>,
        now: Now,
    ) {
        let failure = CellError::Store(id.clone(), error);
        self.fail(id, failure.clone());
        let launch = self.cells.get(id).and_then(|cell| cell.state.open_launch());
        let may_be_launched = launch.is_some_and(|launch| launch.may_have_effect);
        let mut event = CellEvent::RecordFailed;
        for effect in skipped {
            match effect {
                Effect::Launch(_) if may_be_launched => event = CellEvent::LaunchUnanswered,
                Effect::Launch(_) => event = CellEvent::NothingLaunched(NOT_RECORDED.into()),
                Effect::Attach(..) => event = CellEvent::AttachFailed(NOT_RECORDED.into()),
                Effect::Detach(_) => self.on_detach_answered(id),
                Effect::AnswerOrder(order, outcome) => {
                    let error = outcome.err().unwrap_or_else(|| failure.clone());
                    self.emit(id, Effect::AnswerOrder(order, Err(error)));
                }
                _ => {}
            }
        }
        self.apply(id, event, now);
    }

    /// Keeps the last changes of an ended cell, because no further commit repeats them.
    pub(super) fn write_later(&mut self, id: &CellId, changes: Vec<Change>, now: Now) {
        if self.cells.contains_key(id) {
            return;
        }
        let mut changes = changes;
        // The commit of the end has overtaken these changes.
        if changes.iter().any(|change| is_before_the_end(change, id)) {
            changes.retain(|change| matches!(change, Change::Cost(..)));
        }
        self.retain_current(&mut changes);
        let unwritten = &mut self.unwritten;
        if unwritten.changes.len() >= MAX_UNWRITTEN {
            // The next start removes the record.
            unwritten.changes.pop_front();
        }
        unwritten.changes.push_back((id.clone(), changes));
        // A failure this soon after a retry belongs to the retry.
        let retried = unwritten.retried.take();
        if retried.is_some_and(|retried| now.boot.saturating_sub(retried) < MAX_RETRY_PAUSE) {
            unwritten.failures = unwritten.failures.saturating_add(1);
            let pause = self.config.pause_after(unwritten.failures);
            self.timers.set(Timer::Rewrite, now.boot + pause);
        } else if self.timers.set_once(Timer::Rewrite, now.boot + self.config.retry_pause) {
            unwritten.failures = 0;
        }
    }

    /// Commits unwritten changes again.
    pub(super) fn rewrite(&mut self, now: Now) {
        let count = self.unwritten.changes.len().min(MAX_REWRITTEN);
        let again: Vec<_> = self.unwritten.changes.drain(..count).collect();
        for (cell, mut changes) in again {
            self.retain_current(&mut changes);
            self.costs.refresh(&mut changes);
            self.emit(&cell, Effect::Commit { changes, of: CommitOf::Information });
        }
        self.unwritten.retried = Some(now.boot);
        if !self.unwritten.changes.is_empty() {
            self.timers.set(Timer::Rewrite, now.boot + self.config.retry_pause);
        }
    }

    /// Drops the removal of an order's record if the order goes on with another cell, whose commits
    /// write the record.
    fn retain_current(&self, changes: &mut Vec<Change>) {
        changes.retain(
            |change| !matches!(change, Change::Order(id, None) if self.orders.contains_key(id)),
        );
    }
}

/// Returns whether a change writes the record of a cell that has not ended.
fn is_before_the_end(change: &Change, id: &CellId) -> bool {
    let Change::Cell(cell, Some(record)) = change else { return false };
    cell == id && record.phase() != CellPhase::Gone
}
