use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

fn container(id: &str, state: i32) -> ContainerStatus {
    ContainerStatus { id: id.into(), state, ..Default::default() }
}

/// What a watcher that applies events knows.
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
fn there_is_nothing_to_read_before_the_first_list() {
    let state = CellState::default();
    state.set_logs([("logs/a".to_owned(), 1)].into());
    assert!(state.events_since(None).is_none());
    assert_eq!(*state.subscribe().borrow(), 0);
    state.set_pods(vec![], vec![]);
    assert!(*state.subscribe().borrow() > 0);
    let (events, _) = state.events_since(None).unwrap();
    assert!(matches!(&events[0].event, Some(Kind::Snapshot(snapshot)) if snapshot.logs.len() == 1));
}

#[test]
fn an_exit_comes_after_the_growth_of_its_log() {
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
fn a_reader_that_missed_removals_gets_a_snapshot() {
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

proptest! {
    /// Whenever a watcher looks, it ends up with what there is; and each change is told at most
    /// once.
    #[test]
    fn a_watcher_knows_what_is(steps in proptest::collection::vec((proptest::collection::btree_map(0_u8..5, 0..3_i32, 0..4), 0_u64..9, any::<bool>()), 1..40)) {
        let state = CellState::default();
        let (mut view, mut seen) = (View::default(), None);
        let mut truth = View::default();
        for (containers, size, look) in steps {
            truth.containers = containers.into_iter().map(|(id, state)| (id.to_string(), state)).collect();
            truth.logs.insert("logs/a".into(), size);
            state.set_pods(vec![], truth.containers.iter().map(|(id, state)| container(id, *state)).collect());
            state.set_logs(truth.logs.clone());
            if look {
                let (events, version) = state.events_since(seen).unwrap();
                seen = Some(version);
                events.into_iter().for_each(|event| view.apply(event));
                prop_assert_eq!(&view, &truth);
                prop_assert!(state.events_since(seen).unwrap().0.is_empty());
            }
        }
    }

    /// Versions are told apart.
    #[test]
    fn no_two_changes_share_a_version(ids in proptest::collection::btree_set("[a-d]", 0..4)) {
        let state = CellState::default();
        state.set_pods(vec![], ids.iter().map(|id| container(id, 0)).collect());
        let state = state.lock();
        let subscribe: BTreeSet<_> = state.containers.values().map(|(version, _)| *version).collect();
        prop_assert_eq!(subscribe.len(), ids.len());
    }
}
