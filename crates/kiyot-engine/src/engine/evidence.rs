//! Evidence from listings and descriptions.
//!
//! A terminal state ends a cell. An instance that is absent from a list is described by its id.
//! "Not found" counts only from the declared age on. It does not count for many instances at once,
//! which is an outage, or for a cell of another place (`place`). A stray is ended after two
//! sightings, half a listing period apart.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use crate::{
    engine::{
        Cell, CellError, CellEvent, Effect, Engine, INSTANCE_ENDED, NO_INSTANCE, Notice, Now,
        ProviderKey, State,
    },
    id::CellId,
    provider::{Capabilities, ErrorClass, Instance, InstanceId, InstanceState, ProviderError},
};

/// The least number of absent instances that may be an outage.
const MIN_OUTAGE: usize = 3;

/// A launch without an answer made no instance if this many listings past the declared age lack it.
const MIN_ABSENT_LISTINGS: u32 = 3;

/// The number of listing periods after which the accepted termination of a stray is repeated, if
/// the stray is still listed.
pub(super) const STRAY_PERIODS: u32 = 10;

/// Results of listings and descriptions.
#[derive(Debug, Default)]
pub(super) struct Evidence {
    /// The strays, with the times of their first sightings.
    sightings: BTreeMap<InstanceId, Duration>,
    /// True after the first listing.
    has_listed: bool,
    /// The pods that the last listing showed attached to strays.
    pods_of_strays: BTreeSet<String>,
    /// The strays whose termination is pending or was accepted. An accepted termination has the
    /// time of the next attempt.
    ending: BTreeMap<InstanceId, Option<Duration>>,
    /// An instance of the same owner with another fingerprint.
    foreign: Option<InstanceId>,
    /// The cells whose instances were not found, with the times.
    not_found: BTreeMap<CellId, Duration>,
    /// The launches without an answer that listings did not show: the time of the first listing,
    /// and the number of listings past the declared age.
    not_listed: BTreeMap<CellId, (Duration, u32)>,
}

impl Evidence {
    /// Returns an instance of the same owner that another daemon launched.
    pub(super) fn foreign(&self) -> Option<&InstanceId> {
        self.foreign.as_ref()
    }

    pub(super) fn has_listed(&self) -> bool {
        self.has_listed
    }

    /// Returns whether the last listing showed strays.
    pub(super) fn has_strays(&self) -> bool {
        !self.sightings.is_empty()
    }

    /// Returns whether containers of a pod may run in a stray, as after the loss of the journal:
    /// before the first listing, or while a stray is attached to the pod.
    pub(super) fn may_run_in_stray(&self, pod_uid: &str) -> bool {
        !self.has_listed || self.pods_of_strays.contains(pod_uid)
    }

    /// Returns whether strays may run: before the first listing, or while a listing shows strays or
    /// instances of another daemon.
    pub(super) fn may_have_strays(&self) -> bool {
        !self.has_listed || self.foreign.is_some() || !self.sightings.is_empty()
    }

    fn strays_ended(&mut self, accepted: Vec<InstanceId>, failed: &[InstanceId], again: Duration) {
        self.ending.extend(accepted.into_iter().map(|instance| (instance, Some(again))));
        for instance in failed {
            self.ending.remove(instance);
        }
    }

    /// Returns whether the termination of a stray is due: neither pending nor accepted lately.
    /// Marks a due termination as pending.
    fn begin_end(&mut self, stray: &InstanceId, now: Duration) -> bool {
        match self.ending.get(stray) {
            Some(None) => false,
            Some(Some(again)) if now < *again => false,
            _ => {
                self.ending.insert(stray.clone(), None);
                true
            }
        }
    }
}

impl Engine {
    /// Returns an instance of another daemon of this owner, if each provider shows an instance of
    /// another daemon.
    pub(super) fn all_foreign(&self) -> Option<&InstanceId> {
        let mut foreign = self.providers.configured().map(|provider| provider.evidence.foreign());
        let first = foreign.next()??;
        foreign.all(|other| other.is_some()).then_some(first)
    }

    pub(super) fn on_listed(
        &mut self,
        key: ProviderKey,
        began: Duration,
        instances: Vec<Instance>,
        now: Now,
    ) {
        let listed: BTreeMap<&InstanceId, &Instance> =
            instances.iter().map(|instance| (&instance.id, instance)).collect();
        self.found(key, &listed.keys().copied().collect(), now);
        self.resolve_open_launches(key, began, &instances, now);
        self.compare_cells(key, began, &listed, now);
        self.find_strays(key, began, &instances);
        if let Some(provider) = self.providers.get_mut(key) {
            provider.evidence.has_listed = true;
        }
        self.wake_waiting_orders(now);
    }

    pub(super) fn on_strays_ended(
        &mut self,
        key: ProviderKey,
        accepted: Vec<InstanceId>,
        failed: &[InstanceId],
        now: Now,
    ) {
        let Some(provider) = self.providers.get_mut(key) else { return };
        let period = provider.capabilities.listing_period;
        let again = now.boot + period.saturating_mul(STRAY_PERIODS);
        provider.evidence.strays_ended(accepted, failed, again);
    }

    /// Returns whether a provider finds the instance of a cell.
    fn is_of(&self, key: ProviderKey, cell: &Cell) -> bool {
        self.providers.of(cell).is_some_and(|provider| provider.key() == key)
    }

    /// Finds the instances of launches without an answer.
    fn resolve_open_launches(
        &mut self,
        key: ProviderKey,
        began: Duration,
        instances: &[Instance],
        now: Now,
    ) {
        let Some(provider) = self.providers.get(key) else { return };
        let age = provider.capabilities.not_found_believed_after;
        // A request may arrive late, and a list may be partial.
        let enough = if age.is_zero() { 1 } else { MIN_ABSENT_LISTINGS };
        let open: Vec<(CellId, Option<&Instance>, bool)> = self
            .cells
            .values()
            .filter(|cell| cell.state.has_open_launch())
            .filter(|cell| self.is_of(key, cell) || self.is_elsewhere(cell))
            .map(|cell| {
                let found = instances.iter().find(|instance| is_of_launch(instance, cell));
                let is_searching = cell.state.is_searching();
                (cell.id.clone(), found, is_searching)
            })
            .collect();
        let open_ids: BTreeSet<&CellId> = open.iter().map(|(id, ..)| id).collect();
        if let Some(provider) = self.providers.get_mut(key) {
            provider.evidence.not_listed.retain(|cell, _| open_ids.contains(cell));
        }
        for (id, found, is_searching) in open {
            match found {
                // A launch with a pending call is answered by the call.
                _ if !is_searching => {}
                Some(instance) => self.on_instance(&id, instance, now),
                None if self.is_out_of_sight(&id) => {}
                None => {
                    let Some(provider) = self.providers.get_mut(key) else { return };
                    let not_listed = &mut provider.evidence.not_listed;
                    let (first, absences) = not_listed.entry(id.clone()).or_insert((began, 0));
                    if began > *first && began.saturating_sub(*first) >= age {
                        *absences += 1;
                    }
                    if *absences >= enough {
                        not_listed.remove(&id);
                        self.apply(&id, CellEvent::NothingLaunched(NO_INSTANCE.into()), now);
                    }
                }
            }
        }
    }

    /// Ends cells whose instances have ended, and describes instances that are not listed.
    fn compare_cells(
        &mut self,
        key: ProviderKey,
        began: Duration,
        listed: &BTreeMap<&InstanceId, &Instance>,
        now: Now,
    ) {
        let Some(provider) = self.providers.get(key) else { return };
        let capabilities = provider.capabilities;
        let (mut ended, mut proofs) = (Vec::new(), Vec::new());
        let (mut absent, mut expected) = (Vec::new(), 0);
        // On the node, the end of an instance leaves parts that only its termination removes.
        let is_remote = !capabilities.awaits_ends();
        for cell in self.cells.values().filter(|cell| self.is_of(key, cell)) {
            // An instance that became known during the listing may be absent from it.
            let is_known = cell.instance_known.is_some_and(|known| known <= began);
            let is_confirming = cell.state.is_confirming();
            let Some(instance) = cell.state.instance() else { continue };
            let listed = listed.get(instance).copied();
            let state = listed.map(|listed| listed.state);
            if is_remote
                && cell.state.awaits_termination()
                && state == Some(InstanceState::Terminated)
            {
                proofs.push((cell.id.clone(), CellEvent::InstanceTerminated));
            }
            if !is_known || !(cell.state.expects_instance() || is_confirming) {
                continue;
            }
            expected += 1;
            match listed {
                Some(listed) if listed.state == InstanceState::Terminated && is_confirming => {
                    proofs.push((cell.id.clone(), CellEvent::Terminated));
                }
                Some(listed) if !listed.state.is_alive() && !is_confirming => {
                    ended.push((cell.id.clone(), listed));
                }
                Some(_) => {}
                None if !is_confirming => absent.push((cell.id.clone(), instance.clone())),
                None => {}
            }
        }
        for (id, proof) in proofs {
            self.apply(&id, proof, now);
        }
        for (id, instance) in ended {
            self.instance_ended(&id, Some(instance), now);
        }
        if is_outage(&capabilities, absent.len(), expected) {
            let owner = &self.config.owner;
            let (cluster, node) = (owner.cluster.clone(), owner.node.clone());
            let notice = Notice::Outage { absent: absent.len(), expected, cluster, node };
            return self.effects.push((None, Effect::Log(notice)));
        }
        for (id, instance) in absent {
            self.emit(&id, Effect::Describe(instance));
        }
    }

    pub(super) fn on_described(
        &mut self,
        id: &CellId,
        outcome: Result<Instance, ProviderError>,
        now: Now,
    ) {
        if let (Ok(instance), Some(key)) = (&outcome, self.provider_of(id)) {
            self.found(key, &BTreeSet::from([&instance.id]), now);
        }
        let Some(cell) = self.cells.get(id) else { return };
        let (is_confirming, is_expected) =
            (cell.state.is_confirming(), cell.state.expects_instance());
        match outcome {
            Ok(instance) if instance.state == InstanceState::Terminated && is_confirming => {
                self.apply(id, CellEvent::Terminated, now);
            }
            // The termination was accepted and is not done: the call is repeated.
            Ok(_) if is_confirming => self.apply(id, CellEvent::RetryDue, now),
            Ok(instance) if !instance.state.is_alive() && is_expected => {
                self.instance_ended(id, Some(&instance), now);
            }
            Ok(_) => {
                let provider = self.cells.get(id).and_then(|cell| self.providers.of_mut(cell));
                if let Some(provider) = provider {
                    provider.evidence.not_found.remove(id);
                }
            }
            Err(error) if error.class == ErrorClass::NotFound => {
                let believed = self.believes_not_found(id, now);
                if believed && is_confirming {
                    self.apply(id, CellEvent::Terminated, now);
                } else if believed && is_expected && !self.contradicts(id) {
                    self.instance_ended(id, None, now);
                } else {
                    // The confirm timer asks again.
                    self.settle(id, now);
                }
            }
            Err(_) => self.settle(id, now),
        }
    }

    /// Returns whether "not found" proves that the instance of a cell has ended.
    pub(super) fn believes_not_found(&mut self, id: &CellId, now: Now) -> bool {
        let Some(cell) = self.cells.get(id) else { return false };
        let Some(provider) = self.providers.of(cell) else { return false };
        let (key, capabilities) = (provider.key(), provider.capabilities);
        let Some(known) = cell.instance_known else { return false };
        let is_expected = |cell: &&Cell| cell.state.instance().is_some() && self.is_of(key, cell);
        let expected = self.cells.values().filter(is_expected).count();
        let window = capabilities.listing_period.saturating_mul(2);
        let Some(provider) = self.providers.get_mut(key) else { return false };
        let not_found = &mut provider.evidence.not_found;
        not_found.insert(id.clone(), now.boot);
        let cells = &self.cells;
        not_found
            .retain(|cell, at| cells.contains_key(cell) && now.boot.saturating_sub(*at) <= window);
        now.boot.saturating_sub(known) >= capabilities.not_found_believed_after
            && !is_outage(&capabilities, not_found.len(), expected)
    }

    /// Returns whether the agent of a cell is connected although its instance was not found. Then
    /// the instance exists, and the provider looked in another place. A provider of the node, whose
    /// "not found" counts at once, is never contradicted.
    fn contradicts(&self, id: &CellId) -> bool {
        let provider = self.cells.get(id).and_then(|cell| self.providers.of(cell));
        let capabilities = provider.map(|provider| provider.capabilities);
        capabilities.is_some_and(|it| !it.not_found_believed_after.is_zero())
            && self.health.is_connected(id)
    }

    /// Ends a cell whose instance has ended. `instance` is the provider's description, if the
    /// provider still knows the instance.
    fn instance_ended(&mut self, id: &CellId, instance: Option<&Instance>, now: Now) {
        let Some(cell) = self.cells.get(id) else { return };
        let reason = instance.and_then(|instance| instance.end_reason.as_deref());
        let ended = match reason {
            None => INSTANCE_ENDED.to_owned(),
            Some(reason) => format!("{INSTANCE_ENDED}: {reason}"),
        };
        let was_taken_back = instance.is_some_and(|instance| instance.lacks_capacity)
            && matches!(cell.state, State::Booting { .. } | State::Idle { .. });
        let failure = match instance {
            // The launch was refused after its answer, or the spot instance was interrupted.
            Some(instance) if instance.lacks_capacity => {
                let launched = cell.offering().map(|candidate| &candidate.offering);
                let offering = launched.unwrap_or(&instance.offering).clone();
                let doing = format!("launch {offering}: {ended}");
                let error = ProviderError::no_capacity(doing, vec![offering]);
                self.avoid_refused(id, &error, now);
                CellError::Provider(error)
            }
            _ => CellError::Ended(id.clone(), ended.clone()),
        };
        self.emit(id, Effect::Log(Notice::InstanceEnded(reason.map(str::to_owned))));
        self.fail(id, failure);
        self.apply(id, CellEvent::End(ended.into()), now);
        if was_taken_back {
            self.part_from_order(id, now);
        }
    }

    /// Ends strays, from their second sighting on.
    fn find_strays(&mut self, key: ProviderKey, began: Duration, instances: &[Instance]) {
        let Some(provider) = self.providers.get(key) else { return };
        let apart = provider.capabilities.listing_period / 2;
        let is_stray = |instance: &&Instance| {
            instance.state != InstanceState::Terminated && !self.is_of_a_cell(instance)
        };
        let of_no_cell: Vec<&Instance> = instances.iter().filter(is_stray).collect();
        let (own, takes_over) = (&self.config.owner.fingerprint, self.config.take_over);
        let Some(provider) = self.providers.get_mut(key) else { return };
        let evidence = &mut provider.evidence;
        let (mut strays, mut foreign) = (Vec::new(), None);
        let (mut seen, mut pods) = (BTreeSet::new(), BTreeSet::new());
        for instance in of_no_cell {
            let is_foreign = instance.fingerprint.as_ref().is_some_and(|it| it != own);
            if is_foreign && !takes_over {
                foreign = foreign.or_else(|| Some(instance.id.clone()));
                continue;
            }
            seen.insert(instance.id.clone());
            pods.extend(instance.pod_uid.clone());
            let first = *evidence.sightings.entry(instance.id.clone()).or_insert(began);
            if began > first
                && began.saturating_sub(first) >= apart
                && evidence.begin_end(&instance.id, began)
            {
                strays.push(instance.id.clone());
            }
        }
        evidence.pods_of_strays = pods;
        evidence.sightings.retain(|instance, _| seen.contains(instance));
        let is_kept = |instance: &InstanceId, again: &mut Option<Duration>| {
            again.is_none() || seen.contains(instance)
        };
        evidence.ending.retain(is_kept);
        if foreign != evidence.foreign {
            if let Some(instance) = &foreign {
                self.effects.push((None, Effect::Log(Notice::Foreign(instance.clone()))));
            }
            evidence.foreign = foreign;
        }
        if !strays.is_empty() {
            self.effects.push((None, Effect::EndStrays(key, strays)));
        }
    }

    /// Returns whether an instance belongs to a cell, or may belong to a launch whose instance is
    /// not known yet.
    fn is_of_a_cell(&self, instance: &Instance) -> bool {
        let by_tag = self.cells.get(&instance.cell);
        let is_unresolved = by_tag
            .is_some_and(|cell| cell.state.instance().is_none() && is_of_launch(instance, cell));
        is_unresolved
            || by_tag.is_some_and(|cell| cell.state.instance() == Some(&instance.id))
            || self.cells.values().any(|cell| cell.state.instance() == Some(&instance.id))
    }
}

/// Returns whether the launch of a cell made an instance, by the launch token if the instance has
/// it.
fn is_of_launch(instance: &Instance, cell: &Cell) -> bool {
    let token = cell.launch.request.as_ref().map(|request| &request.token);
    instance.cell == cell.id
        && instance.state != InstanceState::Terminated
        && instance.token.as_ref().zip(token).is_none_or(|(its, token)| its == token)
}

/// Returns whether instances are absent because of an outage of the provider. A provider whose "not
/// found" counts at once has no outages of this kind.
fn is_outage(capabilities: &Capabilities, absent: usize, expected: usize) -> bool {
    !capabilities.not_found_believed_after.is_zero()
        && absent >= MIN_OUTAGE
        && absent.saturating_mul(2) > expected
}
