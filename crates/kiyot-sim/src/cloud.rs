//! The simulated cloud: a model of a provider whose instances are remote, slow, paid and limited.
//!
//! The model has no clock, no task and no socket: its caller passes the time of each event.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use kiyot_engine::{
    engine::ProviderKey,
    placement::{Accuracy, Catalogue, Entry, InstanceType, Market, Offer, Offering},
    provider::{
        Capabilities, ErrorClass, Instance, InstanceId, InstanceState, LaunchSpec, ProviderError,
        Termination,
    },
    request::Architecture,
};
use kiyot_values::price::Price;

/// The capabilities of the simulated cloud.
pub const CAPABILITIES: Capabilities = Capabilities {
    provider: "sim",
    own_kernel: true,
    own_users: true,
    own_devices: true,
    remote: true,
    sees_node_files: false,
    separate_link: false,
    can_be_paused: false,
    pods_control_agent: false,
    ends_with_node: false,
    ends_confirmed_within: Duration::from_secs(600),
    not_found_believed_after: Duration::from_secs(120),
    listing_period: Duration::from_secs(60),
    has_tags: true,
    parameters_without_effect_on_boots: &[],
};

/// The key of the second provider, in a world with two.
pub(crate) const SECOND: ProviderKey = "sim-2";

/// The instance types, cheapest first.
const INSTANCE_TYPES: [&str; 3] = ["small", "medium", "large"];
/// The zones. In a world with two providers the last zone is the second provider's.
pub const ZONES: [&str; 3] = ["zone-a", "zone-b", "zone-c"];

/// A terminated instance is listed for this time.
const TERMINATED_LISTED: Duration = Duration::from_secs(3600);

/// An instance of the simulated cloud.
#[derive(Debug, Clone)]
pub struct SimInstance {
    /// The parameters of the launch.
    pub spec: LaunchSpec,
    /// The token of the launch.
    pub token: String,
    /// The fingerprint in the tags.
    pub fingerprint: String,
    /// The offering.
    pub offering: Offering,
    /// The time of the launch.
    pub launched: Duration,
    /// The time from which lists and descriptions show the instance.
    pub visible: Duration,
    /// The time at which the instance begins to end, and the time at which it has ended.
    pub ending: Option<(Duration, Duration)>,
    /// True after an interruption by the cloud.
    pub is_interrupted: bool,
}

impl SimInstance {
    /// Returns whether the instance runs at a time.
    pub fn runs(&self, now: Duration) -> bool {
        self.ending.is_none_or(|(_, ended)| now < ended)
    }

    fn state(&self, now: Duration) -> InstanceState {
        match self.ending {
            Some((_, ended)) if now >= ended => InstanceState::Terminated,
            Some((began, _)) if now >= began => InstanceState::Stopped,
            _ => InstanceState::Running,
        }
    }

    pub(crate) fn described(&self, id: &InstanceId, now: Duration) -> Instance {
        Instance {
            id: id.clone(),
            cell: self.spec.cell.clone(),
            token: Some(self.token.clone()),
            fingerprint: Some(self.fingerprint.clone()),
            pod_uid: None,
            offering: self.offering.clone(),
            addresses: Vec::new(),
            state: self.state(now),
            end_reason: None,
            lacks_capacity: self.is_interrupted,
            since: Some(self.launched),
        }
    }
}

/// The simulated cloud.
#[derive(Debug, Default)]
pub struct SimCloud {
    instances: BTreeMap<InstanceId, SimInstance>,
    launches: u64,
    /// The number of instances that each offering has room for. Absent offerings have no limit.
    capacity: BTreeMap<Offering, usize>,
    /// The zones in which launches fail.
    closed_zones: BTreeSet<String>,
    /// The most candidates that a launch tries; `None`: all.
    max_tried: Option<usize>,
}

impl SimCloud {
    /// Returns the instance types. Each has twice the size and the price of the previous type.
    pub fn catalogue() -> Catalogue {
        let entries = INSTANCE_TYPES.into_iter().zip(0..).map(|(name, doublings)| {
            let offer = |zone: &str, market, micros: u64| Offer {
                zone: zone.to_owned(),
                market,
                price: Price::from_micros(micros << doublings),
                accuracy: Accuracy::Exact,
            };
            let offers = ZONES.into_iter().flat_map(|zone| {
                [offer(zone, Market::OnDemand, 10_000), offer(zone, Market::Spot, 3000)]
            });
            let instance_type = InstanceType {
                name: name.to_owned(),
                milli_cpus: 1000 << doublings,
                memory_mib: 2048 << doublings,
                architectures: vec![Architecture::Amd64, Architecture::Arm64],
                baseline_milli_cpus: None,
                gpus: None,
                is_bare_metal: false,
                is_nitro: false,
                is_current: true,
            };
            Entry::new(instance_type, offers.collect())
        });
        Catalogue::new(entries.collect())
    }

    /// Sets the capacity of an offering.
    pub fn set_capacity(&mut self, offering: Offering, instances: usize) {
        self.capacity.insert(offering, instances);
    }

    /// Removes the limit of an offering's capacity. Returns whether it had a limit.
    pub fn clear_capacity(&mut self, offering: &Offering) -> bool {
        self.capacity.remove(offering).is_some()
    }

    /// Opens or closes a zone for launches.
    pub fn set_zone_open(&mut self, zone: &str, is_open: bool) {
        if is_open {
            self.closed_zones.remove(zone);
        } else {
            self.closed_zones.insert(zone.to_owned());
        }
    }

    /// Sets the most candidates that a launch tries; `None`: all.
    pub fn set_max_tried(&mut self, candidates: Option<usize>) {
        self.max_tried = candidates;
    }

    fn has_room(&self, offering: &Offering, now: Duration) -> bool {
        if self.closed_zones.contains(&offering.zone) {
            return false;
        }
        let Some(capacity) = self.capacity.get(offering) else { return true };
        let running = self
            .instances
            .values()
            .filter(|instance| instance.runs(now) && instance.offering == *offering)
            .count();
        running < *capacity
    }

    /// Returns all instances that were launched.
    pub fn instances(&self) -> &BTreeMap<InstanceId, SimInstance> {
        &self.instances
    }

    /// Launches an instance, or returns the instance of an earlier launch with the token.
    pub fn launch(
        &mut self,
        spec: &LaunchSpec,
        token: &str,
        fingerprint: &str,
        now: Duration,
        visible_after: Duration,
    ) -> Result<InstanceId, ProviderError> {
        let earlier = self.instances.iter().find(|(_, instance)| instance.token == token);
        if let Some((id, _)) = earlier {
            return Ok(id.clone());
        }
        let tried = || spec.offerings().take(self.max_tried.unwrap_or(usize::MAX));
        let Some(offering) = tried().find(|offering| self.has_room(offering, now)).cloned() else {
            let tried = tried().cloned().collect();
            return Err(ProviderError::no_capacity("launch: no capacity", tried));
        };
        self.launches += 1;
        let id = InstanceId(format!("i-{:08}", self.launches));
        let instance = SimInstance {
            spec: spec.clone(),
            token: token.to_owned(),
            fingerprint: fingerprint.to_owned(),
            offering,
            launched: now,
            visible: now + visible_after,
            ending: None,
            is_interrupted: false,
        };
        self.instances.insert(id.clone(), instance);
        Ok(id)
    }

    /// Lists the instances as of a time.
    pub fn list(&self, at: Duration) -> Vec<Instance> {
        self.instances
            .iter()
            .filter(|(_, instance)| instance.visible <= at && !is_forgotten(instance, at))
            .map(|(id, instance)| instance.described(id, at))
            .collect()
    }

    /// Describes an instance.
    pub fn describe(&self, id: &InstanceId, now: Duration) -> Result<Instance, ProviderError> {
        let known = self
            .instances
            .get(id)
            .filter(|instance| instance.visible <= now && !is_forgotten(instance, now));
        known.map(|instance| instance.described(id, now)).ok_or_else(|| not_found(id))
    }

    /// Terminates an instance. The instance has ended some time later.
    pub fn terminate(
        &mut self,
        id: &InstanceId,
        now: Duration,
        takes: Duration,
    ) -> Result<Termination, ProviderError> {
        let known = self
            .instances
            .get_mut(id)
            .filter(|instance| instance.visible <= now && !is_forgotten(instance, now));
        let instance = known.ok_or_else(|| not_found(id))?;
        if instance.ending.is_none() {
            instance.ending = Some((now, now + takes));
        }
        Ok(Termination::Accepted)
    }

    /// Ends an instance without a call.
    pub fn end(&mut self, id: &InstanceId, now: Duration) {
        self.end_within(id, now, Duration::ZERO);
    }

    /// Ends an instance without a call, after this time at the latest.
    pub fn end_within(&mut self, id: &InstanceId, now: Duration, takes: Duration) {
        if let Some(instance) = self.instances.get_mut(id)
            && instance.runs(now)
        {
            let (began, ended) = instance.ending.unwrap_or((now, Duration::MAX));
            instance.ending = Some((began, ended.min(now + takes)));
        }
    }

    /// Marks the end of a running instance as a spot interruption.
    pub fn interrupt(&mut self, id: &InstanceId) {
        if let Some(instance) = self.instances.get_mut(id) {
            instance.is_interrupted |= instance.ending.is_none();
        }
    }

    /// Removes and returns instances that are no longer listed, which limits the memory of long
    /// simulations.
    pub fn forget_old(&mut self, now: Duration) -> Vec<SimInstance> {
        let all = std::mem::take(&mut self.instances);
        let (old, kept): (BTreeMap<_, _>, BTreeMap<_, _>) =
            all.into_iter().partition(|(_, instance)| is_forgotten(instance, now));
        self.instances = kept;
        old.into_values().collect()
    }
}

fn is_forgotten(instance: &SimInstance, now: Duration) -> bool {
    instance.ending.is_some_and(|(_, ended)| now > ended + TERMINATED_LISTED)
}

fn not_found(id: &InstanceId) -> ProviderError {
    ProviderError::without_cause(ErrorClass::NotFound, format!("instance {id} does not exist"))
}
