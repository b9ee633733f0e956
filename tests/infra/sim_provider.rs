//! The simulated cloud behind the contract with providers. Its clock runs a thousand times faster
//! than the node's, and a test may advance it.

use std::{
    collections::BTreeSet,
    sync::{Mutex, MutexGuard},
    time::{Duration, Instant},
};

use async_trait::async_trait;
use kiyot_engine::{
    id::CellId,
    placement::Catalogue,
    provider::{
        Attached, Attachment, Capabilities, ErrorClass, Instance, InstanceId, LaunchSpec, Provider,
        ProviderError, Termination, Terminations,
    },
};
use kiyot_sim::cloud::{CAPABILITIES, SimCloud};

use super::conformance::fault::{Fault, Gate};

/// The factor by which the cloud's clock is faster than the node's.
const SPEED: u32 = 1000;
/// The time in which a terminated instance ends.
const END: Duration = Duration::from_secs(60);
/// The time in which a terminated instance ends while terminations are slow.
const SLOW_END: Duration = Duration::from_secs(1_000_000_000);
/// The time after which a new instance is listed and described. It is shorter than
/// `not_found_believed_after`, but so long that a test that does not expect it always fails.
const VISIBLE: Duration = Duration::from_secs(60);

/// The simulated cloud as a provider.
#[derive(Debug)]
pub(crate) struct SimProvider {
    began: Instant,
    state: Mutex<CloudState>,
    launches: Gate,
    pub(crate) shutdowns: Gate,
}

#[derive(Debug, Default)]
struct CloudState {
    cloud: SimCloud,
    /// The time that a test has added to the clock.
    passed: Duration,
    /// The faults, with the times of their beginnings.
    faults: Vec<(Fault, Duration)>,
    /// Launches that have not arrived yet.
    late: Vec<(LaunchSpec, String)>,
    /// Instances that a fault has launched, and ends.
    foreign: BTreeSet<InstanceId>,
}

impl CloudState {
    fn since(&self, fault: Fault) -> Option<Duration> {
        self.faults.iter().find(|(active, _)| *active == fault).map(|(_, since)| *since)
    }

    fn plays(&self, fault: Fault) -> bool {
        self.since(fault).is_some()
    }

    /// Returns the error of every call during a fault. In an outage a call with an effect is
    /// unanswered.
    fn refusal(&self, doing: &str, has_effect: bool) -> Result<(), ProviderError> {
        let class = if self.plays(Fault::Denied) {
            ErrorClass::Auth
        } else if self.plays(Fault::Throttled) {
            ErrorClass::Throttled
        } else if self.plays(Fault::Outage) && has_effect {
            ErrorClass::Unanswered
        } else if self.plays(Fault::Outage) {
            ErrorClass::Transient
        } else {
            return Ok(());
        };
        Err(ProviderError::without_cause(class, doing))
    }

    fn is_seen(&self, instance: &Instance) -> bool {
        self.since(Fault::UnseenInstance)
            .is_none_or(|since| instance.since.is_some_and(|launched| launched < since))
    }

    fn describe(&self, id: &InstanceId, now: Duration) -> Result<Instance, ProviderError> {
        self.refusal("describe", false)?;
        let instance = self.cloud.describe(id, now)?;
        if self.is_seen(&instance) {
            return Ok(instance);
        }
        Err(ProviderError::without_cause(ErrorClass::NotFound, "describe"))
    }

    fn terminate(&mut self, id: &InstanceId, now: Duration) -> Result<Termination, ProviderError> {
        self.refusal("terminate", true)?;
        self.describe(id, now)?;
        if self.plays(Fault::FailedEnd) {
            return Err(ProviderError::without_cause(ErrorClass::Transient, "terminate"));
        }
        let takes = if self.plays(Fault::SlowEnd) { SLOW_END } else { END };
        self.cloud.terminate(id, now, takes)
    }

    fn running(&self, now: Duration) -> Vec<(InstanceId, CellId)> {
        let all = self.cloud.instances().iter();
        let running = all.filter(|(_, instance)| instance.runs(now));
        running.map(|(id, instance)| (id.clone(), instance.spec.cell.clone())).collect()
    }
}

impl SimProvider {
    pub(crate) fn new() -> Self {
        Self {
            began: Instant::now(),
            state: Mutex::default(),
            launches: Gate::default(),
            shutdowns: Gate::default(),
        }
    }

    /// Returns the state and the time.
    fn state(&self) -> (MutexGuard<'_, CloudState>, Duration) {
        let state = self.state.lock().unwrap();
        let now = self.began.elapsed() * SPEED + state.passed;
        (state, now)
    }

    /// Lets time pass.
    pub(crate) fn pass(&self, time: Duration) {
        self.state().0.passed += time;
    }

    /// Begins a fault.
    pub(crate) fn inject(&self, fault: Fault) {
        let (mut state, now) = self.state();
        state.faults.push((fault, now));
        match fault {
            Fault::HeldLaunch => self.launches.close(),
            Fault::HeldShutdown => self.shutdowns.close(),
            Fault::Interruption => {
                for (id, _) in state.running(now) {
                    state.cloud.end(&id, now);
                }
            }
            Fault::Twin => {
                for (id, _) in state.running(now) {
                    let spec = state.cloud.instances()[&id].spec.clone();
                    state.cloud.launch(&spec, "of the twin", "", now, VISIBLE).unwrap();
                }
            }
            Fault::OtherAuthority => {
                let cell = CellId::mint().unwrap();
                let spec =
                    super::bench::launch_spec(cell, SimCloud::catalogue().offerings().collect());
                let id = state.cloud.launch(&spec, "theirs", "theirs", now, VISIBLE).unwrap();
                state.foreign.insert(id);
            }
            _ => {}
        }
    }

    /// Ends all faults.
    pub(crate) fn heal(&self) {
        self.launches.open();
        self.shutdowns.open();
        let (mut state, now) = self.state();
        if state.plays(Fault::SlowEnd) {
            let ending = state.cloud.instances().iter();
            let ending = ending.filter(|(_, instance)| instance.ending.is_some());
            for id in ending.map(|(id, _)| id.clone()).collect::<Vec<_>>() {
                state.cloud.end(&id, now);
            }
        }
        for id in std::mem::take(&mut state.foreign) {
            state.cloud.end(&id, now);
        }
        for (spec, token) in std::mem::take(&mut state.late) {
            state.cloud.launch(&spec, &token, "", now, VISIBLE).unwrap();
        }
        state.faults.clear();
    }

    /// Returns whether a launch has no answer yet.
    pub(crate) fn holds_launch(&self) -> bool {
        self.launches.holds()
    }

    /// Returns the instances that really run.
    pub(crate) fn running(&self) -> Vec<(InstanceId, CellId)> {
        let (state, now) = self.state();
        state.running(now)
    }
}

#[async_trait]
impl Provider for SimProvider {
    fn capabilities(&self) -> Capabilities {
        let unseen = self.state().0.plays(Fault::UnseenInstance);
        Capabilities {
            listing_period: CAPABILITIES.listing_period / SPEED,
            // The fault ends before this age.
            not_found_believed_after: if unseen {
                CAPABILITIES.not_found_believed_after * SPEED
            } else {
                CAPABILITIES.not_found_believed_after / SPEED
            },
            ..CAPABILITIES
        }
    }

    async fn catalogue(&self) -> Result<Catalogue, ProviderError> {
        Ok(SimCloud::catalogue())
    }

    async fn launch(&self, spec: &LaunchSpec, token: &str) -> Result<Instance, ProviderError> {
        let launched = {
            let (mut state, now) = self.state();
            state.refusal("launch", true)?;
            if state.plays(Fault::LateLaunch) {
                state.late.push((spec.clone(), token.to_owned()));
                return Err(ProviderError::without_cause(ErrorClass::Unanswered, "launch"));
            }
            if state.plays(Fault::RefusedLaunch) {
                let all = spec.offerings().cloned().collect();
                return Err(ProviderError::no_capacity("launch", all));
            }
            let id = state.cloud.launch(spec, token, "", now, VISIBLE)?;
            state.cloud.describe(&id, now + VISIBLE)
        };
        self.launches.pass().await;
        launched
    }

    async fn attach(
        &self,
        _instance: &InstanceId,
        _to: &Attachment,
    ) -> Result<Attached, ProviderError> {
        Ok(Attached::default())
    }

    async fn detach(&self, _instance: &InstanceId) -> Result<(), ProviderError> {
        Ok(())
    }

    async fn list_owned(&self) -> Result<Vec<Instance>, ProviderError> {
        let (state, now) = self.state();
        state.refusal("list", false)?;
        let mut listed = state.cloud.list(state.since(Fault::StaleList).unwrap_or(now));
        listed.retain(|instance| state.is_seen(instance));
        if state.plays(Fault::PartialList) {
            listed = listed.into_iter().skip(1).step_by(2).collect();
        }
        Ok(listed)
    }

    async fn describe(&self, instance: &InstanceId) -> Result<Instance, ProviderError> {
        let (state, now) = self.state();
        state.describe(instance, now)
    }

    async fn terminate(&self, instances: &[InstanceId]) -> Terminations {
        let (mut state, now) = self.state();
        instances.iter().map(|id| (id.clone(), state.terminate(id, now))).collect()
    }

    async fn console(&self, instance: &InstanceId) -> Result<String, ProviderError> {
        self.describe(instance).await.map(|_| String::new())
    }

    async fn check(&self) -> Result<(), ProviderError> {
        Ok(())
    }
}
