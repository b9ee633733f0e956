//! Turns events of cells into events of their pods.

use std::collections::{BTreeMap, HashMap};

use kiyot_proto::admin;

use crate::{
    object,
    recorder::{PodEvent, PodRef},
    source::ShownCell,
};

/// Bounds the remembered cells. A node has fewer.
const MAX_REMEMBERED: usize = 4096;

/// A bounded map. The value that was set first is removed first.
#[derive(Debug)]
struct Latest<T> {
    values: HashMap<String, (u64, T)>,
    /// Keys by the number of the change that set their value.
    by_age: BTreeMap<u64, String>,
    changes: u64,
}

impl<T> Latest<T> {
    fn new() -> Self {
        Self { values: HashMap::new(), by_age: BTreeMap::new(), changes: 0 }
    }

    fn set(&mut self, key: String, value: T) {
        self.remove(&key);
        if self.values.len() >= MAX_REMEMBERED
            && let Some((_, oldest)) = self.by_age.pop_first()
        {
            self.values.remove(&oldest);
        }
        self.changes += 1;
        self.by_age.insert(self.changes, key.clone());
        self.values.insert(key, (self.changes, value));
    }

    fn get(&self, key: &str) -> Option<&T> {
        self.values.get(key).map(|(_, value)| value)
    }

    fn remove(&mut self, key: &str) {
        if let Some((change, _)) = self.values.remove(key) {
            self.by_age.remove(&change);
        }
    }
}

/// The cells of events. A cell may have ended when its event is read.
#[derive(Debug)]
pub struct PodEvents {
    cells: Latest<ShownCell>,
    since_unix_nanos: i64,
}

impl PodEvents {
    /// Returns a translator of events since a time.
    pub fn new(since_unix_nanos: i64) -> Self {
        Self { cells: Latest::new(), since_unix_nanos }
    }

    /// Remembers a cell, if it has a pod.
    pub fn remember(&mut self, shown: ShownCell) {
        let cell = &shown.cell;
        if cell.pod_uid.is_empty() || cell.pod_name.is_empty() {
            return;
        }
        self.cells.set(cell.id.clone(), shown);
    }

    /// Returns the pod events for an event.
    pub fn of(&mut self, event: &admin::Event) -> Vec<PodEvent> {
        match event.kind.as_str() {
            "Pod" => of_pod(event).into_iter().collect(),
            "Cell" => {
                let events = self.cells.get(&event.name).map(|shown| self.of_cell(shown, event));
                if event.status == "Ended" {
                    self.cells.remove(&event.name);
                }
                events.unwrap_or_default()
            }
            _ => Vec::new(),
        }
    }

    fn of_cell(&self, shown: &ShownCell, event: &admin::Event) -> Vec<PodEvent> {
        let cell = &shown.cell;
        let pod = PodRef {
            namespace: cell.pod_namespace.clone(),
            name: cell.pod_name.clone(),
            uid: cell.pod_uid.clone(),
        };
        let pod_event = |is_warning, reason, message: String| PodEvent {
            pod: pod.clone(),
            is_warning,
            reason,
            message,
        };
        let id = &cell.id;
        match event.status.as_str() {
            "Launched" | "Taken" => {
                let mut events = Vec::new();
                if let Some(offering) = &cell.offering {
                    let reason =
                        if cell.start_failures > 0 { "FellBack" } else { "OfferingChosen" };
                    events.push(pod_event(false, reason, chosen(cell, offering)));
                }
                let verb = if event.status == "Taken" { "CellTaken" } else { "CellLaunched" };
                let message = format!("Cell {id}: {}", event.message);
                events.push(pod_event(false, verb, message));
                events
            }
            "LaunchFailed" => {
                vec![pod_event(true, "LaunchRefused", format!("Cell {id}: {}", event.message))]
            }
            // A cell also connects after a restart of the daemon.
            "Connected" => {
                let steps = cell.timeline.unwrap_or_default();
                let is_first = steps.enrolled >= self.since_unix_nanos
                    && event.unix_nanos.abs_diff(steps.enrolled) < 5_000_000_000;
                let message = format!("Cell {id} enrolled");
                is_first.then(|| pod_event(false, "CellEnrolled", message)).into_iter().collect()
            }
            "Lost" => vec![pod_event(true, "CellLost", format!("Cell {id}: {}", event.message))],
            "LaunchesPaused" => {
                vec![pod_event(true, "LaunchesPaused", format!("Cell {id}: {}", event.message))]
            }
            "StartsLate" => {
                vec![pod_event(true, "StartsLate", format!("Cell {id}: {}", event.message))]
            }
            "InstanceEnded" => {
                vec![pod_event(true, "InstanceEnded", format!("Instance of cell {id} ended"))]
            }
            _ => Vec::new(),
        }
    }
}

fn of_pod(event: &admin::Event) -> Option<PodEvent> {
    let known = ["NoCell", "EnvInFiles"];
    let reason = known.into_iter().find(|known| *known == event.status)?;
    if event.pod_uid.is_empty() {
        return None;
    }
    let (namespace, name) = event.name.split_once('/')?;
    let pod = PodRef {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        uid: event.pod_uid.clone(),
    };
    Some(PodEvent { pod, is_warning: true, reason, message: event.message.clone() })
}

/// Returns a sentence about the chosen offering.
fn chosen(cell: &admin::Cell, offering: &admin::Offering) -> String {
    let market = if offering.spot { "spot" } else { "on-demand" };
    let accuracy = match (offering.price_is_at_most, offering.price_is_estimate) {
        (true, _) => " at most",
        (false, true) => " by an estimate",
        (false, false) => "",
    };
    let failure = cell.last_failures.last();
    let failure = failure.map(|last| format!("; the last said: {last}")).unwrap_or_default();
    format!(
        "{} in {}, {market}, ${} an hour{accuracy}: {}{failure}",
        offering.instance_type,
        offering.zone,
        object::dollars(offering.price_micros),
        object::reason(cell),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown() -> ShownCell {
        ShownCell {
            cell: admin::Cell {
                id: "cell-abcdefghijkl".to_owned(),
                pod_namespace: "default".to_owned(),
                pod_name: "web".to_owned(),
                pod_uid: "uid-web".to_owned(),
                offering: Some(admin::Offering {
                    instance_type: "c5.large".to_owned(),
                    zone: "us-east-1a".to_owned(),
                    price_micros: 85_000,
                    ..admin::Offering::default()
                }),
                offering_reason: "cheapest of 2 candidates".to_owned(),
                timeline: Some(admin::Timeline { enrolled: 50, ..admin::Timeline::default() }),
                ..admin::Cell::default()
            },
            ..ShownCell::default()
        }
    }

    fn event(kind: &str, name: &str, status: &str, message: &str) -> admin::Event {
        admin::Event {
            kind: kind.to_owned(),
            name: name.to_owned(),
            status: status.to_owned(),
            message: message.to_owned(),
            ..admin::Event::default()
        }
    }

    /// Verifies K8.
    #[test]
    fn events_of_a_cell_are_events_of_its_pod() {
        let mut events = PodEvents::new(10);
        let of_cell = |status, message| event("Cell", "cell-abcdefghijkl", status, message);
        assert_eq!(events.of(&of_cell("Launched", "")), []);
        events.remember(shown());
        let mut read = |event: &admin::Event| -> Vec<String> {
            let events = events.of(event).into_iter();
            events
                .map(|event| {
                    assert_eq!(event.pod.uid, "uid-web");
                    let kind = if event.is_warning { "Warning" } else { "Normal" };
                    format!("{kind} {} {}", event.reason, event.message)
                })
                .collect()
        };
        assert_eq!(
            read(&of_cell("Launched", "instance i-1")),
            [
                "Normal OfferingChosen c5.large in us-east-1a, on-demand, $0.085 an hour: cheapest \
                 of 2 candidates",
                "Normal CellLaunched Cell cell-abcdefghijkl: instance i-1",
            ]
        );
        assert_eq!(
            read(&of_cell("LaunchFailed", "no capacity")),
            ["Warning LaunchRefused Cell cell-abcdefghijkl: no capacity"]
        );
        assert_eq!(
            read(&of_cell("Connected", "")),
            ["Normal CellEnrolled Cell cell-abcdefghijkl enrolled"]
        );
        assert_eq!(
            read(&of_cell("Lost", "its agent was silent for 90 s")),
            ["Warning CellLost Cell cell-abcdefghijkl: its agent was silent for 90 s"]
        );
        assert_eq!(
            read(&of_cell("LaunchesPaused", "no cell is launched for 60 s")),
            ["Warning LaunchesPaused Cell cell-abcdefghijkl: no cell is launched for 60 s"]
        );
        assert_eq!(
            read(&of_cell("StartsLate", "no offering")),
            ["Warning StartsLate Cell cell-abcdefghijkl: no offering"]
        );
        assert!(read(&of_cell("Bound", "10.88.0.2")).is_empty());
        assert!(read(&of_cell("Ended", "")).is_empty());
        assert!(read(&of_cell("Lost", "")).is_empty(), "the ended cell was removed");
    }

    /// Verifies K8.
    #[test]
    fn event_of_a_pod_without_a_cell_names_the_pod_by_uid() {
        let mut events = PodEvents::new(0);
        events.remember(shown());
        let refused = event("Pod", "default/web", "NoCell", "price limit reached");
        let refused = admin::Event { pod_uid: "uid-of-the-next".to_owned(), ..refused };
        let [reported] = events.of(&refused).try_into().unwrap();
        assert_eq!(
            (reported.pod.name.as_str(), reported.pod.uid.as_str(), reported.reason),
            ("web", "uid-of-the-next", "NoCell")
        );
        assert_eq!(reported.message, "price limit reached");
        assert_eq!(events.of(&event("Pod", "default/web", "Ordered", "")), []);
        let in_files = admin::Event { status: "EnvInFiles".to_owned(), ..refused };
        let [reported] = events.of(&in_files).try_into().unwrap();
        assert_eq!((reported.is_warning, reported.reason), (true, "EnvInFiles"));
    }

    /// Verifies K8.
    #[test]
    fn oldest_remembered_cell_is_removed_first() {
        let mut events = PodEvents::new(0);
        let mut remember = |name: &str| {
            let mut shown = shown();
            (shown.cell.id, shown.cell.pod_name) = (format!("cell-{name}"), name.to_owned());
            events.remember(shown);
        };
        // By name, the live cell is the first, and the oldest cell the last.
        remember("a");
        remember("z");
        (2..MAX_REMEMBERED).for_each(|number| remember(&format!("b-{number}")));
        remember("a");
        remember("c");
        let mut count =
            |name: &str| events.of(&event("Cell", &format!("cell-{name}"), "Lost", "")).len();
        assert_eq!(["a", "b-2", "c", "z"].map(&mut count), [1, 1, 1, 0]);
    }

    /// Verifies K8.
    #[test]
    fn another_offering_after_refusals_is_a_fallback() {
        let mut events = PodEvents::new(0);
        let mut shown = shown();
        shown.cell.start_failures = 2;
        shown.cell.last_failures = vec!["no spot".to_owned(), "no capacity".to_owned()];
        events.remember(shown);
        let launched = event("Cell", "cell-abcdefghijkl", "Launched", "instance i-2");
        let first = events.of(&launched).remove(0);
        assert_eq!(first.reason, "FellBack");
        assert!(
            first.message.ends_with("after 2 failed launches; the last said: no capacity"),
            "{first:?}"
        );
    }
}
