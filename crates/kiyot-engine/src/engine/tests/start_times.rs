//! Ranking of offerings by measured starts.

use proptest::prelude::*;

use super::{
    providers::{AWAY, NODE, launched_by, node, offered},
    *,
};
use crate::engine::StartTimes;

fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn ranked(provider: ProviderKey, instance_type: &str, zone: &str) -> Ranked {
    let offering = Offering { instance_type: instance_type.into(), ..offering(zone) };
    Ranked { provider, candidate: Candidate { offering, ..candidate(zone) } }
}

/// Adds the number of starts from which a time counts as measured.
fn measure(times: &mut StartTimes, provider: ProviderKey, instance_type: &str, seconds: u64) {
    for _ in 0..3 {
        times.add(provider, instance_type, secs(seconds));
    }
}

/// Verifies A38.
#[test]
fn cheapest_offering_within_the_limit_is_launched_else_the_fastest_with_a_notice() {
    let none = None::<(u64, u64)>;
    for (node_takes, away_takes, within, launched, notice) in [
        (Some(5), Some(40), None, AWAY, none),
        (Some(5), Some(40), Some(10), NODE, none),
        (Some(5), Some(40), Some(60), AWAY, none),
        (Some(5), Some(40), Some(2), NODE, Some((2, 5))),
        (Some(40), Some(5), Some(2), AWAY, Some((2, 5))),
        // An offering without a measurement is launched before one that is known to take longer.
        (Some(5), None, Some(2), AWAY, none),
        (Some(5), None, Some(10), NODE, none),
        (None, None, Some(2), AWAY, none),
    ] {
        let mut engine = super::providers::with(node());
        for (provider, takes) in [(NODE, node_takes), (AWAY, away_takes)] {
            if let Some(seconds) = takes {
                measure(&mut engine.start_times, provider, "small", seconds);
            }
        }
        let order = with(offered("pod", &[3], &[1]), |wanted| {
            wanted.request.start_within = within.map(secs);
        });
        let (_, effects) = engine.order(order, at(1));
        let providers: Vec<_> = launched_by(&engine, &effects).into_iter().map(|it| it.0).collect();
        assert_eq!(providers, [launched], "{node_takes:?} {away_takes:?} {within:?}");
        let notices = effects.iter().filter_map(|(_, effect)| match effect {
            Effect::Log(Notice::StartsLate { within, fastest, .. }) => {
                Some((within.as_secs(), fastest.as_secs()))
            }
            _ => None,
        });
        assert_eq!(notices.collect::<Vec<_>>(), Vec::from_iter(notice));
    }
}

/// Verifies A38.
#[test]
fn time_is_the_ninetieth_percentile_of_the_latest_starts_of_the_family_or_the_provider() {
    let mut times = StartTimes::default();
    let (nano, other) = (ranked(AWAY, "t4g.nano", "a"), ranked(AWAY, "c5.large", "a"));
    times.add(AWAY, "t4g.micro", secs(1));
    times.add(AWAY, "t4g.micro", secs(2));
    assert_eq!(times.of(&nano), None);
    (3..=20).for_each(|seconds| times.add(AWAY, "t4g.micro", secs(seconds)));
    assert_eq!((times.of(&nano), times.of(&other)), (Some(secs(18)), Some(secs(18))));
    assert_eq!(times.of(&ranked(NODE, "t4g.nano", "a")), None);
    (0..20).for_each(|_| times.add(AWAY, "c5.xlarge", secs(3)));
    assert_eq!((times.of(&nano), times.of(&other)), (Some(secs(18)), Some(secs(3))));
    (0..20).for_each(|_| times.add(AWAY, "t4g.micro", secs(4)));
    assert_eq!(times.of(&nano), Some(secs(4)));
}

/// Verifies A38.
#[test]
fn cold_starts_are_measured_and_warm_starts_are_not() {
    let mut engine = engine(capabilities::LOCAL);
    let small = ranked(ONLY, "small", "a");
    for (pod, pool) in [("a", None), ("b", Some("pool")), ("c", None), ("d", None)] {
        assert_eq!(engine.start_times().of(&small), None, "{pod}");
        let (cell, _) = launched(&mut engine, pod, at(1));
        engine.handle(Event::Launched(cell.clone(), Ok(launched_as(pod, &cell))), at(1));
        engine.cells.get_mut(&cell).unwrap().pool = pool.map(Into::into);
        engine.reach(&cell, Step::Bound, at(8));
        engine.reach(&cell, Step::FirstContainer, at(9));
    }
    assert_eq!(engine.start_times().of(&small), Some(secs(7)));
}

proptest! {
    /// Verifies A30, A38.
    #[test]
    fn ranking_by_starts_is_a_permutation_in_three_parts(
        offerings in prop::collection::vec((0..2_usize, 0..3_usize), 0..20),
        takes in prop::collection::vec(prop::option::of(1..5_u64), 6),
        within in 1..5_u64,
    ) {
        let (providers, families) = ([NODE, AWAY], ["x", "y", "z"]);
        let mut times = StartTimes::default();
        for (index, takes) in takes.iter().enumerate() {
            if let Some(seconds) = takes {
                measure(&mut times, providers[index % 2], families[index / 2], *seconds);
            }
        }
        let given: Vec<Ranked> = offerings
            .iter()
            .enumerate()
            .map(|(index, (provider, family))| {
                ranked(providers[*provider], families[*family], &format!("{index:02}"))
            })
            .collect();
        let sorted = times.rank(given.clone(), secs(within));
        prop_assert_eq!(&times.rank(given.clone(), secs(within)), &sorted);
        let part = |it: &&Ranked| match times.of(it) {
            Some(time) if time <= secs(within) => 0,
            None => 1,
            Some(_) => 2,
        };
        // Each part is in the order of the zones, which is the previous ranking, or of the times.
        let place = |it: &Ranked| {
            let late = times.of(it).filter(|_| part(&it) == 2);
            (part(&it), late, it.candidate.offering.zone.clone())
        };
        prop_assert!(sorted.is_sorted_by_key(place));
        let mut back = sorted.clone();
        back.sort_by_key(|it| it.candidate.offering.zone.clone());
        prop_assert_eq!(back, given);
        let beyond = times.beyond(&sorted, secs(within));
        let all_late = !sorted.is_empty() && sorted.iter().all(|it| part(&it) == 2);
        prop_assert_eq!(beyond.is_some(), all_late);
        let run = Ranked::first_run(&sorted).map_or(0, |(_, run)| run.len());
        prop_assert!(sorted[..run].windows(2).all(|two| two[0].provider == two[1].provider));
    }
}
