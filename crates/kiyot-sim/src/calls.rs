//! Calls to the provider of the simulated world: requests and replies may be lost, late or refused.

use std::{sync::Arc, time::Duration};

use kiyot_engine::{
    engine::{Event, Launch, ProviderKey},
    id::CellId,
    provider::{ErrorClass, Instance, InstanceId, ProviderError, Termination},
};
use kiyot_proto::store;

use crate::{
    cloud as sim,
    world::{FINGERPRINT, Happening, World},
};

/// A call without a reply is given up after this time.
const CALL_TIMEOUT: Duration = Duration::from_secs(30);
/// The time of a slow termination, in seconds.
const SLOW_END: (u64, u64) = (600, 3600);

/// The time of a call and of a termination on the node, in milliseconds.
const ON_NODE: (u64, u64) = (20, 500);

/// A call to the provider.
#[derive(Debug, Clone)]
pub(super) enum Call {
    Launch(Arc<Launch>),
    Terminate(CellId, InstanceId),
    Describe(CellId, InstanceId),
    List(Duration),
    EndStrays(Vec<InstanceId>),
}

/// A call to one of the providers.
#[derive(Debug, Clone)]
pub(super) struct ProviderCall {
    pub(super) provider: ProviderKey,
    pub(super) call: Call,
}

impl World<'_> {
    pub(super) fn list(&mut self) {
        let run = self.run;
        let began = self.now;
        self.look_for_rest();
        self.check_silence();
        for provider in self.node.providers() {
            self.call(provider, Call::List(began));
        }
        self.after(sim::CAPABILITIES.listing_period, Happening::List { run });
    }

    /// Calls the provider. The request and its reply may be lost, late or refused.
    pub(super) fn call(&mut self, provider: ProviderKey, call: Call) {
        let (run, faults) = (self.run, self.faults());
        let wait = match self.node.on_node_of(provider) {
            Some(_) => self.rng.millis(ON_NODE.0, ON_NODE.1),
            None => self.rng.long_tailed(Duration::from_millis(200), Duration::from_secs(5)),
        };
        let unanswered = |doing: &str| {
            ProviderError::without_cause(ErrorClass::Unanswered, format!("{doing}: no answer"))
        };
        let fails = |class| ProviderError::without_cause(class, "simulated failure");
        let (error, after, arrives, replies) = if self.is_down(provider) {
            (Some(unanswered("outage")), CALL_TIMEOUT, None, false)
        } else if self.strikes("lost_request", faults.lost_request) {
            (Some(unanswered("request lost")), CALL_TIMEOUT, None, false)
        } else if self.strikes("late_request", faults.late_request) {
            let late = CALL_TIMEOUT + self.rng.seconds(1, 50);
            (Some(unanswered("request late")), CALL_TIMEOUT, Some(late), false)
        } else if self.strikes("lost_reply", faults.lost_reply) {
            (Some(unanswered("reply lost")), CALL_TIMEOUT, Some(wait), false)
        } else if self.strikes("throttled", faults.throttled) {
            (Some(fails(ErrorClass::Throttled)), wait, None, false)
        } else if self.strikes("failed", faults.failed) {
            (Some(fails(ErrorClass::Transient)), wait, None, false)
        } else {
            (None, wait, Some(wait), true)
        };
        if let Some(error) = error {
            self.log(format_args!("{} fails: {error}", call.name()));
            let event = call.failed(provider, error);
            if let Some(event) = event {
                self.after(after, Happening::Deliver { run, event: Box::new(event) });
            }
        }
        if let Some(arrives) = arrives {
            let call = Box::new(ProviderCall { provider, call });
            self.after(arrives, Happening::Arrives { run, call, replies });
        }
    }

    /// Carries out a call at the provider.
    pub(super) fn arrive(&mut self, run: u64, call: ProviderCall, replies: bool) {
        let ProviderCall { provider, call } = call;
        let event = match call {
            Call::Launch(launch) => {
                let outcome = self.launch(&launch);
                Event::Launched(launch.spec.cell.clone(), outcome)
            }
            Call::Terminate(cell, instance) => {
                let outcome = self.terminate(provider, &instance);
                Event::Terminated { cell, outcome, console: String::new() }
            }
            Call::Describe(cell, instance) => {
                let described = self.is_of(provider, &instance);
                let described = described.and_then(|()| self.cloud.describe(&instance, self.now));
                Event::Described(cell, described)
            }
            Call::List(began) => {
                // A list may be some time old.
                let at = self.now.saturating_sub(self.rng.seconds(0, 20));
                let mut instances = self.cloud.list(at);
                instances.retain(|it| self.node.provider_of(&it.offering) == provider);
                if self.strikes("partial_list", self.faults().partial_list) {
                    self.log(format_args!("a list is partial"));
                    instances.retain(|_| !self.rng.once_in(3));
                }
                Event::Listed { provider, began, instances }
            }
            Call::EndStrays(instances) => {
                let (accepted, failed) = instances
                    .into_iter()
                    .partition(|instance| self.terminate(provider, instance).is_ok());
                Event::StraysEnded { provider, accepted, failed }
            }
        };
        if replies {
            let wait = self.rng.millis(20, 200);
            self.after(wait, Happening::Deliver { run, event: Box::new(event) });
        }
    }

    fn launch(&mut self, launch: &Launch) -> Result<Instance, ProviderError> {
        let cell = &launch.spec.cell;
        let (before, now) = (self.cloud.instances().len(), self.now);
        let visible = self.rng.long_tailed(Duration::from_secs(4), Duration::from_secs(60));
        let launched = self.cloud.launch(&launch.spec, &launch.token, FINGERPRINT, now, visible);
        self.log(format_args!("launch of {cell}: {launched:?}"));
        if self.cloud.instances().len() > before {
            self.instances += 1;
            if !self.recorded.contains(cell) {
                self.violation(format!("{cell} is launched before it is recorded"));
            }
            let twins = self
                .cloud
                .instances()
                .values()
                .filter(|instance| instance.spec.cell == *cell && instance.runs(now))
                .count();
            if twins > 1 {
                self.violation(format!("{cell} has {twins} instances"));
            }
            let running = self.cloud.instances().values().filter(|one| one.runs(now)).count();
            self.most_instances = self.most_instances.max(running as u64);
            if let Ok(instance) = &launched {
                self.boot(&instance.clone());
            }
            if self.instances.is_multiple_of(256) {
                for old in self.cloud.forget_old(now) {
                    self.meter.add(&old, now);
                }
                let cloud = &self.cloud;
                self.agents.retain(|id, _| cloud.instances().contains_key(id));
            }
        }
        launched.map(|id| {
            let instance = &self.cloud.instances()[&id];
            instance.described(&id, now)
        })
    }

    /// Returns whether a provider is in an outage.
    fn is_down(&self, provider: ProviderKey) -> bool {
        self.outage && self.outage_of.is_none_or(|failed| failed == provider)
    }

    /// Checks that no other provider has an unresolved launch for the launch's pod. A starting
    /// daemon replays launches whose end it could not write.
    pub(super) fn check_unresolved(&mut self, launched: &CellId, provider: ProviderKey) {
        if !self.tried.insert(launched.clone()) {
            return;
        }
        let uid = self.cells.get(launched).map(|cell| cell.pod_uid.clone()).unwrap_or_default();
        // The record of an ended or pooled cell may not be written yet.
        let Some(daemon) = &self.daemon else { return };
        let is_of_pod = |id: &CellId| {
            let view = daemon.engine.cell_view(id, self.time());
            view.is_some_and(|view| view.pod_uid.as_ref() == Some(&uid))
        };
        let is_unresolved = |(id, cell): &(&CellId, &store::Cell)| {
            *id != launched && cell.launch.is_some() && cell.provider != provider && is_of_pod(id)
        };
        if let Some(other) = self.cells.iter().find(is_unresolved).map(|(id, _)| id.clone()) {
            self.violation(format!("{launched} of {uid} is launched beside unresolved {other}"));
        }
    }

    /// Returns an error if an instance is not the provider's.
    fn is_of(&self, provider: ProviderKey, instance: &InstanceId) -> Result<(), ProviderError> {
        let known = self.cloud.instances().get(instance);
        match known.filter(|known| self.node.provider_of(&known.offering) == provider) {
            Some(_) => Ok(()),
            None => Err(ProviderError::without_cause(ErrorClass::NotFound, "another cloud's")),
        }
    }

    fn terminate(
        &mut self,
        provider: ProviderKey,
        instance: &InstanceId,
    ) -> Result<Termination, ProviderError> {
        self.is_of(provider, instance)?;
        let known = self.cloud.instances().get(instance);
        let takes = if known.is_none_or(|known| known.ending.is_some()) {
            // A repeated termination changes nothing.
            Duration::ZERO
        } else if self.node.on_node_of(provider).is_some() {
            self.rng.millis(ON_NODE.0, ON_NODE.1)
        } else if self.strikes("slow_end", self.faults().slow_end) {
            self.rng.seconds(SLOW_END.0, SLOW_END.1)
        } else {
            self.rng.long_tailed(Duration::from_secs(60), Duration::from_secs(300))
        };
        let outcome = self.cloud.terminate(instance, self.now, takes);
        self.log(format_args!("termination of {instance} in {} s: {outcome:?}", takes.as_secs()));
        outcome
    }
}

impl Call {
    fn name(&self) -> &'static str {
        match self {
            Self::Launch(_) => "launch",
            Self::Terminate(..) => "terminate",
            Self::Describe(..) => "describe",
            Self::List(_) => "list",
            Self::EndStrays(_) => "end strays",
        }
    }

    /// Returns the event of a failed call.
    fn failed(&self, provider: ProviderKey, error: ProviderError) -> Option<Event> {
        Some(match self {
            Self::Launch(launch) => Event::Launched(launch.spec.cell.clone(), Err(error)),
            Self::Terminate(cell, _) => Event::Terminated {
                cell: cell.clone(),
                outcome: Err(error),
                console: String::new(),
            },
            Self::Describe(cell, _) => Event::Described(cell.clone(), Err(error)),
            Self::EndStrays(instances) => {
                Event::StraysEnded { provider, accepted: Vec::new(), failed: instances.clone() }
            }
            // The next list follows at its period.
            Self::List(_) => return None,
        })
    }
}
