use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

fn kind(of: impl std::fmt::Debug) -> String {
    format!("{of:?}").split([' ', '{']).next().unwrap_or_default().to_owned()
}

proptest! {
    #[test]
    fn plan_of_a_seed_is_constant(seed: u64, caller in 0..CALLERS, number: u64) {
        prop_assert_eq!(
            Plan::of(seed).life(caller, number),
            Plan::of(seed).life(caller, number)
        );
        prop_assert_eq!(Plan::of(seed).kill(number % 5000), Plan::of(seed).kill(number % 5000));
    }

    #[test]
    fn shape_is_within_its_bounds(seed: u64, caller in 0..CALLERS, number: u64) {
        let life = Plan::of(seed).life(caller, number);
        prop_assert!((1..=MAX_CONTAINERS).contains(&life.containers.len()));
        prop_assert!(life.init.len() <= MAX_INIT);
        prop_assert!(life.volumes.len() <= MAX_VOLUMES);
        prop_assert!(life.steps.len() <= MAX_STEPS);
        prop_assert!((0..=MAX_GRACE_SECONDS).contains(&life.grace));
        let succeeds = |init: &ContainerShape| matches!(init.work, Work::Exits { code: 0, .. });
        prop_assert!(life.init.iter().all(succeeds));
        for container in &life.containers {
            let is_own = |index: usize| !life.volumes[index].kind.is_written();
            prop_assert!(container.volume.is_none_or(is_own));
            let bounded = match container.work {
                Work::Floods { lines } => (1..=MAX_FLOOD_LINES).contains(&lines),
                Work::LongLine { kib } => (1..=MAX_LINE_KIB).contains(&kib),
                Work::Deep { levels } => (1..=MAX_DEPTH).contains(&levels),
                Work::Files { files } => (1..=MAX_FILES).contains(&files),
                Work::Children { children } => (1..=MAX_CHILDREN).contains(&children),
                // Exit codes of signals and failed starts would be ambiguous.
                Work::Exits { code, .. } => (1..128).contains(&code),
                _ => true,
            };
            prop_assert!(bounded, "{container:?}");
        }
        for step in &life.steps {
            let there = match *step {
                Step::Probe { container, .. }
                | Step::Restart { container, .. }
                | Step::Logs { container } => {
                    container < life.containers.len()
                }
                Step::Update { volume } => life.volumes[volume].kind.is_written(),
                _ => true,
            };
            prop_assert!(there, "{step:?}");
        }
    }

    #[test]
    fn callers_share_no_port(seed: u64, one: u64, other: u64) {
        let plan = Plan::of(seed);
        let all: Vec<u16> = (0..CALLERS)
            .flat_map(|caller| plan.life(caller, if caller % 2 == 0 { one } else { other }).ports)
            .collect();
        prop_assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), all.len());
    }

    #[test]
    fn pause_between_kills_is_bounded(seed: u64, number in 0u64..5000) {
        let kill = Plan::of(seed).kill(number);
        prop_assert!(kill.after < MAX_KILL_PAUSE);
        prop_assert!(!spares_daemon(number) || kill.victim != Target::Daemon);
    }

    #[test]
    fn every_kind_appears_within_some_hundred_pods(seed: u64) {
        let plan = Plan::of(seed);
        let lives: Vec<Lifecycle> =
            (0..CALLERS).flat_map(|caller| (0..150).map(move |n| plan.life(caller, n))).collect();
        let works: BTreeSet<_> = lives
            .iter()
            .flat_map(|life| &life.containers)
            .map(|container| kind(container.work))
            .collect();
        prop_assert_eq!(works.len(), 10, "{:?}", works);
        let kinds: BTreeSet<_> = lives
            .iter()
            .flat_map(|life| &life.volumes)
            .map(|volume| format!("{:?}", volume.kind))
            .collect();
        prop_assert_eq!(kinds.len(), 6, "{:?}", kinds);
        let steps: BTreeSet<_> = lives
            .iter()
            .flat_map(|life| &life.steps)
            .map(kind)
            .collect();
        prop_assert_eq!(steps.len(), 7, "{:?}", steps);
        for life in [
            Lifecycle::is_refused,
            |life: &Lifecycle| !life.ports.is_empty(),
            |life: &Lifecycle| !life.init.is_empty(),
        ] {
            prop_assert!(lives.iter().any(life));
        }
        let victims: BTreeSet<_> = (0..1000).map(|number| plan.kill(number).victim).collect();
        prop_assert_eq!(victims.len(), Target::ALL.len());
    }
}

#[test]
fn plans_of_two_seeds_differ() {
    let lives: Vec<_> = (0..20).map(|seed| Plan::of(seed).life(0, 0)).collect();
    let distinct = lives.iter().map(|life| format!("{life:?}")).collect::<BTreeSet<_>>().len();
    assert!(distinct >= 19, "{lives:?}");
    let callers = (0..CALLERS).map(|caller| Plan::of(1).life(caller, 0)).collect::<Vec<_>>();
    assert!(callers.windows(2).all(|pair| pair[0].containers != pair[1].containers
        || pair[0].volumes != pair[1].volumes
        || pair[0].steps != pair[1].steps));
}

#[test]
fn every_other_phase_spares_the_daemon() {
    let spared: Vec<bool> = (0..112).map(spares_daemon).collect();
    assert!(spared[..16].iter().all(|spared| !spared));
    assert!(spared[16..48].iter().all(|spared| *spared));
    assert!(spared[48..].iter().all(|spared| !spared));
}
