//! Ends of cells: terminations, their answers, and the callers that wait for them.

use std::{sync::Arc, time::Duration};

use crate::{
    engine::{CellError, CellEvent, Effect, EndCallers, Engine, Now},
    id::CellId,
    provider::{ErrorClass, ProviderError, Termination},
};

impl Engine {
    pub(super) fn on_terminated(
        &mut self,
        id: &CellId,
        outcome: Result<Termination, ProviderError>,
        console: String,
        now: Now,
    ) {
        let Some(cell) = self.cells.get_mut(id) else { return };
        if let Some(end) = cell.state.end_mut()
            && !console.is_empty()
        {
            end.console = Some(console);
        }
        self.count_failed_boot(id, now);
        // A provider of the node can't see the instance of another place: its success proves
        // nothing.
        let callee = self.cells.get(id).and_then(|cell| self.providers.callee(cell));
        let is_known =
            callee.is_some_and(|it| it.capabilities.not_found_believed_after > Duration::ZERO);
        let elsewhere = self.no_end_elsewhere(id);
        let outcome = match (outcome, elsewhere) {
            (Ok(progress), Some(error)) => {
                if is_known {
                    Ok(progress)
                } else {
                    Err(error)
                }
            }
            (Err(error), Some(elsewhere)) if error.class == ErrorClass::NotFound => Err(elsewhere),
            (outcome, _) => outcome,
        };
        match outcome {
            Ok(Termination::Confirmed) => self.apply(id, CellEvent::Terminated, now),
            Ok(Termination::Accepted) => self.apply(id, CellEvent::TerminationAccepted, now),
            Err(error)
                if error.class == ErrorClass::NotFound && self.believes_not_found(id, now) =>
            {
                self.apply(id, CellEvent::Terminated, now);
            }
            Err(error) => {
                self.refuse_end(id, error);
                self.apply(id, CellEvent::TerminationFailed, now);
            }
        }
    }

    pub(super) fn on_terminate(&mut self, id: &CellId, reason: Arc<str>, now: Now) {
        let Some(cell) = self.cells.get_mut(id) else {
            return self.effects.push((Some(id.clone()), Effect::AnswerEnd(Ok(()))));
        };
        cell.end.callers = EndCallers::Waiting;
        self.fail(id, CellError::Ended(id.clone(), reason.to_string()));
        self.stop(id, reason, now);
    }

    /// Ends a cell once its agent has ended the pod.
    pub(super) fn stop(&mut self, id: &CellId, reason: Arc<str>, now: Now) {
        // If the pod's end does not await the end of the instance, the agent ends the pod first.
        let event = if self.cells.get(id).is_some_and(|cell| self.awaits_end_of(cell)) {
            CellEvent::End(reason)
        } else {
            CellEvent::Stop(reason)
        };
        self.apply(id, event, now);
    }

    pub(super) fn on_not_terminated(&mut self, id: &CellId) {
        let Some(cell) = self.cells.get_mut(id) else { return };
        let refusal = cell.state.end_mut().and_then(|end| end.refusal.take());
        self.answer_order_of(id);
        if let Some(error) = refusal {
            self.answer_end(id, Err(error.clone()));
            self.fail_orders_of_pod(id, &error);
        }
    }

    /// Removes an ended cell, and answers the callers that wait for its end.
    pub(super) fn on_ended(&mut self, id: &CellId, now: Now) {
        self.count_failed_boot(id, now);
        let Some(mut cell) = self.cells.remove(id) else { return };
        let reason: Arc<str> = cell.state.reason().cloned().unwrap_or_else(|| "".into());
        self.timers.clear_cell(id);
        self.forget_health(id, now);
        self.emit(id, Effect::PublishEnded(Arc::clone(&reason)));
        self.emit(id, Effect::AnswerEnd(Ok(())));
        match cell.order.part() {
            Some(order) => self.on_cell_of_order_ended(&order, cell, now),
            None => self.on_cell_of_pool_ended(cell, now),
        }
        self.wake_waiting_orders(now);
    }

    pub(super) fn on_detach_answered(&mut self, id: &CellId) {
        if let Some(end) = self.cells.get_mut(id).and_then(|cell| cell.state.end_mut()) {
            end.is_detaching = false;
        }
    }

    pub(super) fn refuse_end(&mut self, id: &CellId, error: ProviderError) {
        if let Some(end) = self.cells.get_mut(id).and_then(|cell| cell.state.end_mut()) {
            end.refusal = Some(error);
        }
    }

    pub(super) fn answer_end(&mut self, id: &CellId, outcome: Result<(), ProviderError>) {
        if let Some(cell) = self.cells.get_mut(id)
            && cell.end.callers == EndCallers::Waiting
        {
            cell.end.callers = EndCallers::Answered;
        }
        self.emit(id, Effect::AnswerEnd(outcome));
    }
}
