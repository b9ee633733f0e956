//! The writes that make the API's objects equal to the cells.
//!
//! The plan has the wanted objects, and the known objects of the API server. An object that differs
//! waits in a queue, once however often it changes. The write has the object's state at the time of
//! the write.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    mem,
    time::{Duration, Instant},
};

use crate::{
    failure::Failure,
    gate::Gate,
    object::{self, Cell},
};

/// Age at which an accrued cost, which always grows, is written without another change.
const COST_REFRESH: Duration = Duration::from_secs(3600);
/// Bounds the objects whose denied writes wait alone.
const MAX_DENIED: usize = 4;

/// A due write.
#[derive(Debug, Clone, PartialEq)]
pub enum Write {
    /// Applies name, labels, owner and spec.
    Apply(Box<Cell>),
    /// Applies the status.
    ApplyStatus(Box<Cell>),
    /// Deletes the object with this name and uid.
    Delete {
        /// Name of the object.
        name: String,
        /// Uid of the object.
        uid: String,
    },
}

impl Write {
    /// Returns the name of the object.
    pub fn name(&self) -> &str {
        match self {
            Self::Apply(cell) | Self::ApplyStatus(cell) => &cell.metadata.name,
            Self::Delete { name, .. } => name,
        }
    }

    /// Returns verb and resource of the call.
    pub fn operation(&self) -> &'static str {
        match self {
            Self::Apply(_) => "patch cells",
            Self::ApplyStatus(_) => "patch cells/status",
            Self::Delete { .. } => "delete cells",
        }
    }
}

/// The known state of an object of the API server.
#[derive(Debug, Clone)]
struct KnownObject {
    /// The object that was applied or listed.
    cell: Cell,
    /// False until the status is written.
    has_status: bool,
    uid: String,
    resource_version: String,
    cost_written: Instant,
}

/// A denied write, which is repeated after its own pauses.
#[derive(Debug)]
struct Denied {
    operation: &'static str,
    gate: Gate,
}

/// The wanted and the known objects.
#[derive(Debug, Default)]
pub struct Plan {
    wanted: BTreeMap<String, Cell>,
    known: BTreeMap<String, KnownObject>,
    /// The wanted objects that were refused. They are written again only after a change.
    refused: BTreeMap<String, Cell>,
    /// The objects whose writes were denied, and wait alone.
    denied: BTreeMap<String, Denied>,
    /// The objects that were absent at the last write of their status.
    absent: BTreeSet<String>,
    queue: VecDeque<String>,
    queued: BTreeSet<String>,
}

impl Plan {
    /// Sets the wanted objects. Conditions keep their transition times.
    pub fn want(&mut self, cells: Vec<Cell>, now: Instant) {
        let mut wanted = BTreeMap::new();
        for mut cell in cells {
            let name = cell.metadata.name.clone();
            let earlier = self.wanted.get(&name).or(self.known.get(&name).map(|own| &own.cell));
            if let Some(earlier) = earlier {
                object::keep_transitions(&earlier.status, &mut cell.status);
            }
            wanted.insert(name, cell);
        }
        self.wanted = wanted;
        self.refused.retain(|name, refused| {
            self.wanted.get(name).is_some_and(|wanted| !differs(refused, wanted))
        });
        self.absent.retain(|name| self.wanted.contains_key(name));
        self.enqueue(now);
    }

    /// Sets the API server's objects of this node.
    pub fn listed(&mut self, cells: Vec<Cell>, now: Instant) {
        let mut known = BTreeMap::new();
        for cell in cells {
            let (name, uid) = (cell.metadata.name.clone(), cell.metadata.uid.clone());
            let version = cell.metadata.resource_version.clone();
            // An older schema drops fields. The applied object counts until another client writes.
            let own = self.known.remove(&name);
            let own = own.filter(|own| own.resource_version == version && own.uid == uid);
            let listed = || KnownObject {
                cell,
                has_status: true,
                uid,
                resource_version: version,
                cost_written: now,
            };
            known.insert(name, own.unwrap_or_else(listed));
        }
        self.known = known;
        self.enqueue(now);
    }

    fn enqueue(&mut self, now: Instant) {
        let denied = mem::take(&mut self.denied).into_iter();
        let denied = denied.filter(|(name, denied)| {
            self.needed(name, now).is_some_and(|write| write.operation() == denied.operation)
        });
        self.denied = denied.collect();
        let names: Vec<String> = self.wanted.keys().chain(self.known.keys()).cloned().collect();
        for name in names {
            if self.due(&name, now).is_some() && self.queued.insert(name.clone()) {
                self.queue.push_back(name);
            }
        }
    }

    /// Returns the write that an object needs; `None` while a denied write waits.
    fn due(&self, name: &str, now: Instant) -> Option<Write> {
        let write = self.needed(name, now)?;
        let waits = self.denied.get(name).is_some_and(|denied| {
            denied.operation == write.operation()
                && denied.gate.open_at().is_some_and(|open| open > now)
        });
        (!waits).then_some(write)
    }

    fn needed(&self, name: &str, now: Instant) -> Option<Write> {
        let Some(wanted) = self.wanted.get(name) else {
            let known = self.known.get(name)?;
            return Some(Write::Delete { name: name.to_owned(), uid: known.uid.clone() });
        };
        if self.refused.contains_key(name) {
            return None;
        }
        let boxed = || Box::new(wanted.clone());
        let Some(known) = self.known.get(name) else { return Some(Write::Apply(boxed())) };
        let has_labels =
            |(key, value): (&String, &String)| known.cell.metadata.labels.get(key) == Some(value);
        let has_owners = (wanted.metadata.owner_references.iter())
            .all(|owner| known.cell.metadata.owner_references.contains(owner));
        if known.cell.spec != wanted.spec
            || !has_owners
            || !wanted.metadata.labels.iter().all(has_labels)
        {
            return Some(Write::Apply(boxed()));
        }
        let is_old = now.saturating_duration_since(known.cost_written) >= COST_REFRESH
            && known.cell.status.accrued_cost != wanted.status.accrued_cost;
        let is_due =
            !known.has_status || object::differ(&known.cell.status, &wanted.status) || is_old;
        is_due.then(|| Write::ApplyStatus(boxed()))
    }

    /// Returns the next write. It stays the next until its outcome is noted.
    pub fn next(&mut self, now: Instant) -> Option<Write> {
        loop {
            let name = self.queue.front()?;
            if let Some(write) = self.due(name, now) {
                return Some(write);
            }
            self.drop_next();
        }
    }

    /// Returns the number of objects that wait for a write.
    pub fn waiting(&self) -> usize {
        self.queue.len()
    }

    /// Puts the next write behind all others, so that it does not hold them up.
    pub fn postpone(&mut self) {
        self.queue.rotate_left(usize::from(!self.queue.is_empty()));
    }

    /// Returns whether an operation is due, or follows a due operation.
    pub fn needs(&self, operation: &str, now: Instant) -> bool {
        self.queue.iter().filter_map(|name| self.due(name, now)).any(|write| {
            let has_status = matches!(write, Write::Apply(_));
            write.operation() == operation || has_status && operation == "patch cells/status"
        })
    }

    /// Returns whether a denied write of an object may wait alone. If many objects are denied, all
    /// objects count as denied.
    pub fn may_wait(&self, name: &str) -> bool {
        self.denied.len() < MAX_DENIED || self.denied.contains_key(name)
    }

    /// Returns whether denied objects wait alone.
    pub fn has_denied(&self) -> bool {
        !self.denied.is_empty()
    }

    /// Notes that the next write was denied. Its object waits alone, for growing pauses.
    ///
    /// `first_pause` and `jitter` are parameters of a [`Gate`].
    pub fn denied(
        &mut self,
        write: &Write,
        failure: &Failure,
        first_pause: Duration,
        now: Instant,
        jitter: f64,
    ) {
        let (name, operation) = (write.name(), write.operation());
        let earlier = self.denied.remove(name).filter(|earlier| earlier.operation == operation);
        let mut gate = earlier.map_or_else(|| Gate::new(first_pause), |earlier| earlier.gate);
        gate.failed(failure, now, jitter);
        self.denied.insert(name.to_owned(), Denied { operation, gate });
        self.drop_next();
    }

    fn drop_next(&mut self) {
        if let Some(name) = self.queue.pop_front() {
            self.queued.remove(&name);
        }
    }

    /// Notes that a write succeeded. The response to an apply has the object's uid and version.
    pub fn written(&mut self, write: Write, response: Option<&Cell>, now: Instant) {
        let (uid, resource_version) = response
            .map(|cell| (cell.metadata.uid.clone(), cell.metadata.resource_version.clone()))
            .unwrap_or_default();
        let name = write.name().to_owned();
        if self.denied.get(&name).is_some_and(|denied| denied.operation == write.operation()) {
            self.denied.remove(&name);
        }
        match write {
            Write::Delete { .. } => {
                self.known.remove(&name);
            }
            Write::Apply(cell) => {
                let earlier = self.known.remove(&name);
                let has_status =
                    earlier.as_ref().is_some_and(|known| known.has_status && known.uid == uid);
                let mut cell = *cell;
                if let Some(earlier) = &earlier {
                    cell.status = earlier.cell.status.clone();
                }
                let cost_written = earlier.map_or(now, |known| known.cost_written);
                self.known.insert(
                    name.clone(),
                    KnownObject { cell, has_status, uid, resource_version, cost_written },
                );
            }
            Write::ApplyStatus(cell) => {
                self.absent.remove(&name);
                if let Some(known) = self.known.get_mut(&name) {
                    known.cell.status = cell.status;
                    known.has_status = true;
                    known.resource_version = resource_version;
                    known.cost_written = now;
                }
            }
        }
        // The status of a new object is written next, because a row without status has empty
        // columns.
        if self.due(&name, now).is_none() {
            self.drop_next();
        }
    }

    /// Notes that the object of a write is absent. A wanted object is made again. Returns whether
    /// it was already made again and its status is still absent: the kind then lacks the
    /// subresource.
    pub fn absent(&mut self, write: &Write) -> bool {
        let name = write.name();
        self.known.remove(name);
        self.denied.remove(name);
        if !self.wanted.contains_key(name) {
            self.drop_next();
            return false;
        }
        let is_again = !self.absent.insert(name.to_owned());
        if is_again {
            self.postpone();
        }
        is_again
    }

    /// Notes that a write was refused for good. It is repeated only after its object changes.
    pub fn refused(&mut self, write: Write) {
        let name = write.name().to_owned();
        self.denied.remove(&name);
        match write {
            Write::Apply(cell) | Write::ApplyStatus(cell) => {
                self.refused.insert(name, *cell);
            }
            Write::Delete { .. } => {
                self.known.remove(&name);
            }
        }
        self.drop_next();
    }
}

/// Returns whether two objects differ in written parts.
fn differs(one: &Cell, other: &Cell) -> bool {
    one.spec != other.spec
        || one.metadata.labels != other.metadata.labels
        || one.metadata.owner_references != other.metadata.owner_references
        || object::differ(&one.status, &other.status)
}

#[cfg(test)]
mod tests;
