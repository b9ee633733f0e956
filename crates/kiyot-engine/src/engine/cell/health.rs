//! Health of cells: a cell whose agent is silent for too long is lost.
//!
//! The heartbeat is the keepalive of the control connection. Silence begins when the connection
//! ends. Checks count it while the gateway listens: the time of a stopped daemon or a suspended
//! node does not count. At the limit, a last probe asks the provider for the instance; then the
//! cell ends. If many cells fall silent together, the node itself may be cut off. Then a cell is
//! lost only after the orphan timeout, when its agent has stopped the pod.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use crate::engine::cell::timeline;

use crate::{
    engine::{CellEvent, Effect, Engine, Notice, Now, State, cell::Cell, timers::Timer},
    id::CellId,
    provider::{ErrorClass, Instance, ProviderError},
};

/// The longest time between two checks of silent cells.
const CHECK_PERIOD: Duration = Duration::from_secs(5);
/// The longest time that counts between two checks: beyond it, the daemon stood still.
const MAX_COUNTED_STEP: Duration = Duration::from_secs(10);
/// The pause after a probe without an answer.
const PROBE_PAUSE: Duration = Duration::from_secs(30);
/// When the node is cut off, all its connections end within this time.
const TOGETHER: Duration = Duration::from_secs(60);
/// The least number of silent cells with which the node may be cut off.
const MIN_CUT_OFF: usize = 3;
/// The divisor of the number of bound and warm cells: the node may be cut off if at least this part
/// of them is silent.
const CUT_OFF_PART: usize = 3;

/// The cells with and without a control connection.
#[derive(Debug, Default)]
pub(in crate::engine) struct Health {
    silent: BTreeMap<CellId, Silence>,
    connected: BTreeSet<CellId>,
    /// True while so many bound and warm cells have fallen silent together that the node may be cut
    /// off.
    is_cut_off: bool,
    /// True if the cut-off was logged, because it kept a cell from being lost.
    is_logged: bool,
}

/// The silence of a cell's agent.
#[derive(Debug)]
struct Silence {
    /// The time at which the connection ended, or at which the gateway began to listen.
    since: Duration,
    /// The counted silence since the end of the last cut-off.
    counted: Duration,
    /// The whole counted silence.
    total: Duration,
    /// The time until which the silence is counted.
    checked: Duration,
    /// True while a probe has no answer.
    is_probed: bool,
}

impl Health {
    pub(in crate::engine) fn is_connected(&self, id: &CellId) -> bool {
        self.connected.contains(id)
    }
}

impl Silence {
    fn new(now: Now) -> Self {
        let (counted, total) = (Duration::ZERO, Duration::ZERO);
        Self { since: now.boot, counted, total, checked: now.boot, is_probed: false }
    }

    /// Counts the time until now, [`MAX_COUNTED_STEP`] at most.
    fn count(&mut self, now: Now) {
        let step = now.boot.saturating_sub(self.checked);
        let step = step.min(MAX_COUNTED_STEP);
        self.counted = self.counted.saturating_add(step);
        self.total = self.total.saturating_add(step);
        self.checked = now.boot;
    }
}

impl Engine {
    /// Sets the limit of silence for cells whose pods set no limit; `None` for no limit.
    pub fn set_healthy_timeout(
        &mut self,
        limit: Option<Duration>,
        now: Now,
    ) -> crate::engine::Effects {
        self.config.healthy_timeout = limit;
        self.timers.clear(&Timer::Health);
        self.schedule_check(now);
        self.handle(crate::engine::Event::Tick, now)
    }

    /// Begins to count the silence of all cells: the gateway listens from now on.
    pub(in crate::engine) fn start_health(&mut self, now: Now) {
        for id in self.cells.keys() {
            self.health.silent.insert(id.clone(), Silence::new(now));
        }
        self.update_cut_off(now);
        self.schedule_check(now);
    }

    pub(in crate::engine) fn on_connected(&mut self, id: &CellId, now: Now) {
        if self.cells.contains_key(id) {
            self.health.connected.insert(id.clone());
        }
        if self.health.silent.remove(id).is_some() {
            self.update_cut_off(now);
        }
    }

    /// Returns whether a cell is being ended or has ended.
    pub fn is_ending(&self, id: &CellId) -> bool {
        self.cells.get(id).is_none_or(|cell| match cell.state {
            State::Stopping { .. } | State::Terminating { .. } | State::Ended { .. } => true,
            State::Requested
            | State::Launching { .. }
            | State::Booting { .. }
            | State::Idle { .. }
            | State::Binding { .. }
            | State::Bound { .. } => false,
        })
    }

    pub(in crate::engine) fn on_disconnected(&mut self, id: &CellId, now: Now) {
        self.health.connected.remove(id);
        if self.cells.contains_key(id) {
            self.health.silent.entry(id.clone()).or_insert_with(|| Silence::new(now));
            self.update_cut_off(now);
            self.schedule_check(now);
        }
    }

    /// Adapts to a new state of a cell, because only the silence of bound and warm cells counts.
    pub(in crate::engine) fn settle_health(&mut self, id: &CellId, now: Now) {
        self.update_cut_off(now);
        if self.health.silent.contains_key(id) {
            self.schedule_check(now);
        }
    }

    pub(in crate::engine) fn forget_health(&mut self, id: &CellId, now: Now) {
        self.health.connected.remove(id);
        self.health.silent.remove(id);
        self.update_cut_off(now);
    }

    /// Schedules the next check, if a silent cell has a limit.
    pub(in crate::engine) fn schedule_check(&mut self, now: Now) {
        let waits = self.health.silent.iter().filter_map(|(id, silence)| {
            let limit = self.silence_limit(id)?;
            let counted = silence.counted + now.boot.saturating_sub(silence.checked);
            Some(limit.checked_sub(counted).filter(|left| !left.is_zero()).unwrap_or(CHECK_PERIOD))
        });
        if let Some(wait) = waits.min() {
            let at = now.boot + wait.min(CHECK_PERIOD);
            self.timers.set_earlier(Timer::Health, at);
        }
    }

    /// Probes the cells that have been silent for too long, unless the node may be cut off.
    pub(in crate::engine) fn check_health(&mut self, now: Now) {
        for silence in self.health.silent.values_mut() {
            silence.count(now);
        }
        let overdue: Vec<CellId> =
            self.health.silent.keys().filter(|id| self.is_overdue(id)).cloned().collect();
        let (kept, due): (Vec<_>, Vec<_>) = overdue.into_iter().partition(|id| self.is_kept(id));
        if !kept.is_empty() && !std::mem::replace(&mut self.health.is_logged, true) {
            let (silent, all) = self.silent_cells();
            self.effects.push((None, Effect::Log(Notice::CutOff { silent, all })));
        }
        for id in due {
            let instance = self.cells.get(&id).and_then(|cell| cell.state.instance().cloned());
            let Some(silence) = self.health.silent.get_mut(&id) else { continue };
            if let Some(instance) = instance
                && !std::mem::replace(&mut silence.is_probed, true)
            {
                self.emit(&id, Effect::Describe(instance));
            }
        }
        self.schedule_check(now);
    }

    /// Ends a silent cell after its last probe, if the provider answered about the instance. Any
    /// answer counts: the end of an instance is handled as evidence. Without an answer, or if the
    /// provider looks in another place, another probe follows: the node may reach neither provider
    /// nor cell.
    pub(in crate::engine) fn on_probed(
        &mut self,
        id: &CellId,
        outcome: &Result<Instance, ProviderError>,
        now: Now,
    ) {
        let has_answer = match outcome {
            Ok(_) => true,
            Err(error) => error.class == ErrorClass::NotFound && !self.is_out_of_sight(id),
        };
        let limit = self.silence_limit(id);
        let Some(silence) = self.health.silent.get_mut(id).filter(|silence| silence.is_probed)
        else {
            return;
        };
        silence.is_probed = false;
        let Some(limit) = limit else { return };
        if !has_answer {
            silence.counted = silence.counted.min(limit.saturating_sub(PROBE_PAUSE));
            return self.schedule_check(now);
        }
        let seconds = now.boot.saturating_sub(silence.since).as_secs();
        if !self.is_overdue(id) || self.is_kept(id) {
            return;
        }
        self.emit(id, Effect::Log(Notice::Lost { seconds }));
        if let Some(cell) = self.cells.get_mut(id) {
            cell.end.lost_unix_nanos = Some(timeline::nanos(now.unix));
        }
        let limit = limit.as_secs();
        let reason = format!(
            "its agent has been silent for {seconds} s, longer than its healthy timeout of \
             {limit} s"
        );
        self.apply(id, CellEvent::End(reason.into()), now);
    }

    /// Returns whether the silence of a cell has reached its limit.
    fn is_overdue(&self, id: &CellId) -> bool {
        let silence = self.health.silent.get(id);
        silence.zip(self.silence_limit(id)).is_some_and(|(silence, limit)| silence.counted >= limit)
    }

    /// Returns whether a silent cell is kept because the node may be cut off. After the orphan
    /// timeout the cell is not kept: it has stopped its pod.
    fn is_kept(&self, id: &CellId) -> bool {
        let silence = self.health.silent.get(id);
        self.health.is_cut_off
            && silence.is_some_and(|silence| silence.total < self.config.orphan_timeout)
    }

    /// Returns the limit of silence of a bound or warm cell. Other states have other limits: the
    /// launch has a deadline, and the agent powers the instance off after a stop.
    fn silence_limit(&self, id: &CellId) -> Option<Duration> {
        let cell = self.cells.get(id).filter(|cell| is_watched(cell))?;
        match cell.healthy_timeout() {
            Some(own) => own.limit(),
            None => self.config.healthy_timeout,
        }
    }

    /// Returns whether a cell has no control connection.
    pub fn is_silent(&self, id: &CellId) -> bool {
        self.health.silent.contains_key(id)
    }

    /// Returns whether so many bound and warm cells are silent that the node may be cut off.
    pub fn is_cut_off(&self) -> bool {
        self.health.is_cut_off
    }

    /// Returns the cells whose silence counts: bound cells, and idle cells of warm pools.
    pub fn watched_cells(&self) -> impl Iterator<Item = &CellId> {
        self.cells.values().filter(|cell| is_watched(cell)).map(|cell| &cell.id)
    }

    /// Returns the largest number of watched cells that fell silent together, and the number of all
    /// watched cells.
    fn silent_cells(&self) -> (usize, usize) {
        let (mut all, mut since) = (0, Vec::new());
        for cell in self.watched_cells() {
            all += 1;
            since.extend(self.health.silent.get(cell).map(|silence| silence.since));
        }
        since.sort_unstable();
        let together = |(first, begin): (usize, &Duration)| {
            since.partition_point(|other| *other <= *begin + TOGETHER) - first
        };
        (since.iter().enumerate().map(together).max().unwrap_or_default(), all)
    }

    /// Updates whether the node may be cut off. When a cut-off ends, the counts begin again,
    /// because the silent cells may be about to connect.
    fn update_cut_off(&mut self, now: Now) {
        if self.health.silent.len() < MIN_CUT_OFF && !self.health.is_cut_off {
            return;
        }
        let (silent, all) = self.silent_cells();
        let is_cut_off = silent >= MIN_CUT_OFF && silent.saturating_mul(CUT_OFF_PART) >= all;
        if self.health.is_cut_off && !is_cut_off {
            for silence in self.health.silent.values_mut() {
                (silence.counted, silence.checked) = (Duration::ZERO, now.boot);
            }
            if std::mem::take(&mut self.health.is_logged) {
                self.effects.push((None, Effect::Log(Notice::CutOffOver)));
            }
        }
        self.health.is_cut_off = is_cut_off;
    }
}

fn is_watched(cell: &Cell) -> bool {
    match cell.state {
        State::Bound { .. } => true,
        State::Idle { .. } => cell.is_warm(),
        _ => false,
    }
}
