//! Cells.

use std::collections::HashMap;

use kiyot_engine::{
    engine::{CellView, State, Step, Timeline},
    id::CellId,
};
use kiyot_proto::admin;

use super::{Inventory, offering};

impl Inventory {
    /// Returns the cells with these ids. Cells that have ended meanwhile are left out.
    pub fn cells(&self, ids: &[CellId]) -> Vec<admin::Cell> {
        let views = self.cells.views(ids);
        let mut waiting = HashMap::new();
        if views.iter().any(|(view, _)| self.pods.sandbox_of_cell(&view.id).is_none()) {
            let orders = self.cells.orders();
            waiting.extend(
                orders.into_iter().map(|order| (order.sandbox.to_string(), order.key.name)),
            );
        }
        let name = |view: &CellView| match self.pods.sandbox_of_cell(&view.id) {
            Some(sandbox) => {
                sandbox.pod.split_once('/').map(|(_, name)| name.to_owned()).unwrap_or_default()
            }
            None => {
                view.sandbox.as_ref().and_then(|it| waiting.get(it)).cloned().unwrap_or_default()
            }
        };
        views.iter().map(|(view, connected)| self.cell(view, name(view), *connected)).collect()
    }

    fn cell(&self, view: &CellView, pod_name: String, connected: bool) -> admin::Cell {
        let instance = view.state.instance().map(ToString::to_string).unwrap_or_default();
        admin::Cell {
            id: view.id.to_string(),
            backend: self.backend.to_string(),
            node: self.node.clone(),
            provider: view.provider.as_deref().unwrap_or_default().to_owned(),
            phase: phase(&view.state).into(),
            instance,
            offering: view.offering.as_ref().map(offering::priced),
            addresses: view.addresses.iter().map(ToString::to_string).collect(),
            created_unix_nanos: view.created_unix_nanos,
            timeline: Some(timeline(&view.timeline)),
            pod_namespace: view.namespace.clone().unwrap_or_default(),
            pod_name,
            pod_uid: view.pod_uid.clone().unwrap_or_default(),
            pool: view.pool.as_deref().unwrap_or_default().to_owned(),
            connected,
            reason: view.state.reason().map(ToString::to_string).unwrap_or_default(),
            error: view.error.clone().unwrap_or_default(),
            replays: view.replays,
            console: view.console.clone().unwrap_or_default(),
            cost_micros: view.cost.micros(),
            offering_reason: view.offering_reason.clone().unwrap_or_default(),
            start_failures: view.earlier.failures,
            last_failures: view.earlier.last.clone(),
            lost_unix_nanos: view.lost_unix_nanos.unwrap_or_default(),
        }
    }
}

fn phase(state: &State) -> admin::CellPhase {
    match state {
        State::Requested => admin::CellPhase::CellRequested,
        State::Launching { .. } => admin::CellPhase::CellLaunching,
        State::Booting { .. } => admin::CellPhase::CellBooting,
        State::Idle { .. } => admin::CellPhase::CellIdle,
        State::Binding { .. } => admin::CellPhase::CellBinding,
        State::Bound { .. } => admin::CellPhase::CellBound,
        State::Stopping { .. } => admin::CellPhase::CellStopping,
        State::Terminating { .. } | State::Ended { .. } => admin::CellPhase::CellTerminating,
    }
}

fn timeline(timeline: &Timeline) -> admin::Timeline {
    let at = |step| timeline.at(step).unwrap_or_default();
    admin::Timeline {
        launched: at(Step::Launched),
        booted: at(Step::Booted),
        enrolled: at(Step::Enrolled),
        bound: at(Step::Bound),
        image_ready: at(Step::ImageReady),
        first_container: at(Step::FirstContainer),
    }
}
