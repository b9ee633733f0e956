use std::collections::BTreeSet;

use kiyot_proto::cri::PodSandboxMetadata;
use proptest::prelude::*;

use super::*;

fn container(id: &str, state: i32) -> ContainerStatus {
    ContainerStatus { id: id.into(), state, ..Default::default() }
}

/// State of a watcher that applies events.
#[derive(Debug, Default, PartialEq)]
struct View {
    containers: BTreeMap<String, i32>,
    logs: BTreeMap<String, u64>,
}

impl View {
    fn apply(&mut self, event: Event) {
        match event.event.unwrap() {
            Kind::Snapshot(snapshot) => {
                self.containers = snapshot
                    .containers
                    .into_iter()
                    .map(|status| (status.id, status.state))
                    .collect();
                self.logs = snapshot.logs.into_iter().map(|log| (log.path, log.size)).collect();
            }
            Kind::Container(status) => {
                self.containers.insert(status.id, status.state);
            }
            Kind::ContainerGone(id) => {
                self.containers.remove(&id);
            }
            Kind::Log(log) => {
                self.logs.insert(log.path, log.size);
            }
            Kind::Sandbox(_) | Kind::SandboxGone(_) | Kind::Heartbeat(_) => {}
        }
    }
}

#[test]
fn state_before_first_list_has_no_events() {
    let state = CellState::default();
    state.set_logs([("logs/a".to_owned(), 1)].into());
    assert!(state.events_since(None).is_none());
    assert_eq!(*state.subscribe().borrow(), 0);
    state.set_pods(vec![], vec![]);
    assert!(*state.subscribe().borrow() > 0);
    let (events, _) = state.events_since(None).unwrap();
    assert!(matches!(&events[0].event, Some(Kind::Snapshot(snapshot)) if snapshot.logs.len() == 1));
}

/// Verifies U1.
#[test]
fn sandbox_of_a_rehearsal_is_not_the_pods_sandbox() {
    let sandbox = |id: &str, namespace: &str| PodSandboxStatus {
        id: id.into(),
        metadata: Some(PodSandboxMetadata { namespace: namespace.into(), ..Default::default() }),
        ..Default::default()
    };
    let state = CellState::default();
    assert_eq!(state.pod_sandbox(), None);
    let of_rehearsal = ["a", "z"].map(|id| sandbox(id, rehearsal::NAMESPACE));
    state.set_pods(of_rehearsal.to_vec(), vec![]);
    assert_eq!(state.pod_sandbox(), None);
    let [first, last] = of_rehearsal;
    state.set_pods(vec![first, sandbox("m", "rehearsal"), last], vec![]);
    assert_eq!(state.pod_sandbox().as_deref(), Some("m"));
}

#[test]
fn log_growth_is_sent_before_the_exit() {
    let state = CellState::default();
    state.set_pods(vec![], vec![container("c", 1)]);
    let (_, seen) = state.events_since(None).unwrap();
    state.set_logs([("logs/c".to_owned(), 10)].into());
    state.set_pods(vec![], vec![container("c", 2)]);
    let kinds: Vec<_> = state
        .events_since(Some(seen))
        .unwrap()
        .0
        .into_iter()
        .map(|event| event.event.unwrap())
        .collect();
    assert!(matches!(&kinds[..], [Kind::Log(_), Kind::Container(_)]), "{kinds:?}");
}

#[test]
fn reader_behind_compaction_gets_a_snapshot() {
    let state = CellState::default();
    state.set_pods(vec![], vec![]);
    let (_, seen) = state.events_since(None).unwrap();
    for n in 0..=MAX_REMOVALS {
        state.set_pods(vec![], vec![container(&format!("c{n}"), 0)]);
        state.set_pods(vec![], vec![]);
    }
    let (events, _) = state.events_since(Some(seen)).unwrap();
    assert!(matches!(&events[..], [Event { event: Some(Kind::Snapshot(_)) }]));
}

/// States of containers, the size of a log, and whether the watcher reads then.
fn step() -> impl Strategy<Value = (BTreeMap<u8, i32>, u64, bool)> {
    (proptest::collection::btree_map(0_u8..5, 0..3_i32, 0..4), 0_u64..9, any::<bool>())
}

proptest! {
    /// Compares a watcher's view with the state at each read. No change is sent twice.
    #[test]
    fn watcher_view_equals_state(steps in proptest::collection::vec(step(), 1..40)) {
        let state = CellState::default();
        let (mut view, mut seen) = (View::default(), None);
        let mut expected = View::default();
        for (containers, size, read) in steps {
            expected.containers =
                containers.into_iter().map(|(id, state)| (id.to_string(), state)).collect();
            expected.logs.insert("logs/a".into(), size);
            let statuses = expected.containers.iter().map(|(id, state)| container(id, *state));
            state.set_pods(vec![], statuses.collect());
            state.set_logs(expected.logs.clone());
            if read {
                let (events, version) = state.events_since(seen).unwrap();
                seen = Some(version);
                events.into_iter().for_each(|event| view.apply(event));
                prop_assert_eq!(&view, &expected);
                prop_assert!(state.events_since(seen).unwrap().0.is_empty());
            }
        }
    }

    #[test]
    fn each_change_has_its_own_version(ids in proptest::collection::btree_set("[a-d]", 0..4)) {
        let state = CellState::default();
        state.set_pods(vec![], ids.iter().map(|id| container(id, 0)).collect());
        let state = state.lock();
        let versions: BTreeSet<_> =
            state.containers.values().map(|(version, _)| *version).collect();
        prop_assert_eq!(versions.len(), ids.len());
    }
}
