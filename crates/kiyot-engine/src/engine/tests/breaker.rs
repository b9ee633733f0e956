//! Boots that never enrol.

use proptest::{prelude::*, sample::Index};

use crate::{
    engine::tests::{
        pools::{errors, launches, pool, taking},
        *,
    },
    placement::{Defaults, Needs, Requested},
    request::{CellRequest, InstanceType},
};

const CONSOLE: &str = "booting\nno route to host\ngiving up\n";
const REASON: &str = "in a in a row did not enrol; the console of the last ends: booting | no \
                      route to host | giving up";

/// Returns the order of a pod with candidates in these zones.
fn in_zones(pod: &str, zones: &[&str]) -> OrderSpec {
    spec(pod).of(Ok(zones.iter().map(|zone| candidate(zone)).collect()))
}

/// Returns the zones of the candidates of the only launch.
fn zones(effects: &Effects) -> Vec<String> {
    let mut launched = effects.iter().filter_map(|(_, effect)| match effect {
        Effect::Launch(launch) => Some(&launch.spec.candidates),
        _ => None,
    });
    let zones = launched.next().into_iter().flatten().map(|it| it.offering.zone.clone());
    let zones = zones.collect();
    assert!(launched.next().is_none(), "several launches");
    zones
}

/// Answers the launch of a cell with an instance in a zone.
fn runs_in(engine: &mut Engine, cell: &CellId, zone: &str, now: u64) -> Effects {
    let launched = Instance { offering: offering(zone), ..launched_as(cell.as_str(), cell) };
    engine.handle(Event::Launched(cell.clone(), Ok(launched)), at(now))
}

/// Shows the end of a cell's instance, and confirms it with its console.
fn ends(engine: &mut Engine, cell: &CellId, lacks_capacity: bool, now: u64) -> Effects {
    let instance = Instance {
        state: InstanceState::Terminated,
        lacks_capacity,
        ..launched_as(cell.as_str(), cell)
    };
    let mut effects = engine.handle(Event::Described(cell.clone(), Ok(instance)), at(now));
    effects.extend(terminated(engine, cell, now));
    effects
}

fn terminated(engine: &mut Engine, cell: &CellId, now: u64) -> Effects {
    let (outcome, console) = (Ok(Termination::Confirmed), CONSOLE.to_owned());
    engine.handle(Event::Terminated { cell: cell.clone(), outcome, console }, at(now))
}

fn enrols(engine: &mut Engine, cell: &CellId, now: u64) -> Effects {
    let token = engine.cells[cell].stored().token_sha256;
    let (key_sha256, cell) = ("key".into(), cell.clone());
    engine.handle(Event::Redeem { cell, token_sha256: token, key_sha256, redemption: 1 }, at(now))
}

fn paused(effects: &Effects) -> Vec<(String, u64)> {
    let notices = effects.iter().filter_map(|(_, effect)| match effect {
        Effect::Log(Notice::LaunchesPaused { reason, seconds }) => {
            Some((reason.to_string(), *seconds))
        }
        _ => None,
    });
    notices.collect()
}

/// Fails three boots of an order at a time. The last failure begins a pause in zone `a`. Returns
/// all effects.
fn fail_thrice(engine: &mut Engine, order: OrderSpec, now: u64) -> Effects {
    let (_, mut effects) = engine.order(order, at(now));
    let mut all = Effects::new();
    while let Some(cell) = launches(&effects).pop() {
        runs_in(engine, &cell, "a", now);
        effects = ends(engine, &cell, false, now);
        all.extend(effects.clone());
    }
    all
}

/// Returns an engine with a pause of zone `a` from a time on.
fn pausing(now: u64) -> Engine {
    let mut engine = engine(capabilities::CLOUD);
    let effects = fail_thrice(&mut engine, in_zones("pod", &["a"]), now);
    assert_eq!(paused(&effects), [(format!("3 boots {REASON}"), 60)]);
    engine
}

fn is_paused(engine: &Engine, now: u64) -> bool {
    let refusals = engine.refusals_for(ONLY, &BTreeMap::new(), "", at(now));
    let reason = refusals.reason(&offering("a"), at(now).boot);
    reason.is_some_and(|reason| reason.contains("in a row did not enrol"))
}

/// Verifies V104, V106.
#[test]
fn three_boots_that_never_enrol_pause_launches_in_their_zone_alone() {
    let mut engine = pausing(1);
    assert_eq!(engine.metrics(at(1)).launch_pauses, 1);
    let (_, effects) = engine.order(in_zones("refused", &["a"]), at(10));
    let expected = format!(
        "every offering that fits the pod was refused lately (1 of them); {} is tried again in 52 \
         s, and was refused: 3 boots {REASON}",
        offering("a")
    );
    assert_eq!((errors(&effects), launches(&effects)), (vec![expected], vec![]));
    let (_, effects) = engine.order(in_zones("moves", &["a", "b"]), at(10));
    assert_eq!(zones(&effects), ["b"]);
    // The ranking also avoids the zone.
    let refusals = engine.refusals_for(ONLY, &BTreeMap::new(), "", at(10));
    let reason = |zone| refusals.reason(&offering(zone), at(10).boot);
    assert_eq!(reason("a").as_deref(), Some(format!("3 boots {REASON}").as_str()));
    assert_eq!(reason("b"), None);
}

/// Verifies V105.
#[test]
fn trial_is_a_single_launch_and_its_failure_doubles_the_pause() {
    let mut engine = pausing(0);
    let (mut now, mut pauses) = (0, Vec::new());
    for pause in [60, 120, 240, 480, 960, 1800, 1800] {
        let early = in_zones(&format!("early-{now}"), &["a"]);
        assert_eq!(launches(&engine.order(early, at(now + pause - 1)).1), []);
        now += pause;
        let name = |pod: &str| format!("{pod}-{now}");
        let order = OrderSpec { timeout: Some(TTL), ..in_zones(&name("trial"), &["a", "b"]) };
        let (_, effects) = engine.order(order, at(now));
        assert_eq!(zones(&effects), ["a", "b"]);
        let trial = launches(&effects).remove(0);
        // No second launch is made while the trial's zone is unknown and while the trial boots.
        let (_, effects) = engine.order(in_zones(&name("second"), &["a", "c"]), at(now));
        assert_eq!(zones(&effects), ["c"]);
        let second = launches(&effects).remove(0);
        runs_in(&mut engine, &second, "c", now);
        runs_in(&mut engine, &trial, "a", now);
        let refused = engine.order(in_zones(&name("third"), &["a"]), at(now)).1;
        let error = errors(&refused).remove(0);
        assert!(error.contains("did not enrol, and the trial after them boots;"), "{error}");
        // The agent stays silent until the timeout.
        now += TTL.as_secs();
        engine.handle(Event::Tick, at(now));
        pauses.extend(paused(&terminated(&mut engine, &trial, now)));
        engine.handle(Event::Terminate { cell: second.clone(), reason: "".into() }, at(now));
        terminated(&mut engine, &second, now);
    }
    let pauses: Vec<u64> = pauses.into_iter().map(|(_, seconds)| seconds).collect();
    assert_eq!(pauses, [120, 240, 480, 960, 1800, 1800, 1800]);
}

/// Verifies V105.
#[test]
fn enrolled_agent_ends_the_pauses_even_before_its_launch_is_answered() {
    for is_answered in [true, false] {
        let mut engine = pausing(0);
        let trial = launches(&engine.order(in_zones("trial", &["a"]), at(60)).1).remove(0);
        if is_answered {
            runs_in(&mut engine, &trial, "a", 61);
        }
        enrols(&mut engine, &trial, 62);
        if !is_answered {
            runs_in(&mut engine, &trial, "a", 63);
        }
        // An end after the enrolment is no failed boot, and the next failures count from 1.
        ends(&mut engine, &trial, false, 64);
        assert!(!is_paused(&engine, 64), "{is_answered}");
        let effects = fail_thrice(&mut engine, in_zones("later", &["a"]), 70);
        let seconds: Vec<u64> = paused(&effects).into_iter().map(|(_, pause)| pause).collect();
        assert_eq!(seconds, [60], "{is_answered}");
    }
}

/// Verifies V105.
#[test]
fn ends_by_callers_or_for_lack_of_capacity_are_no_failed_boots() {
    let mut engine = engine(capabilities::CLOUD);
    for round in 0..10 {
        let now = 1000 * round;
        let mut order = |name: &str| {
            let effects = engine.order(in_zones(&format!("{name}-{round}"), &["a"]), at(now)).1;
            (launches(&effects).remove(0), effects)
        };
        let interrupted = order("interrupted").0;
        let deleted = order("deleted").0;
        let refused = order("refused").0;
        let unanswered = order("unanswered").0;
        for cell in [&interrupted, &deleted] {
            runs_in(&mut engine, cell, "a", now);
        }
        ends(&mut engine, &interrupted, true, now);
        let stop = Event::Terminate { cell: deleted.clone(), reason: "deleted".into() };
        engine.handle(stop, at(now));
        terminated(&mut engine, &deleted, now);
        let full = ProviderError::no_capacity("full", vec![offering("a")]);
        engine.handle(Event::Launched(refused, Err(full)), at(now));
        let stop = Event::Terminate { cell: unanswered.clone(), reason: "deleted".into() };
        engine.handle(stop, at(now));
        runs_in(&mut engine, &unanswered, "a", now);
        terminated(&mut engine, &unanswered, now);
        assert!(engine.cells.is_empty() && !is_paused(&engine, now));
    }
}

/// Verifies V105.
#[test]
fn boot_that_a_previous_daemon_began_is_not_counted() {
    let record = store::Cell { pool: "small".into(), ..stored(CellPhase::Booting) };
    let (mut engine, cell) = recovered(record, false, at(1));
    assert!(matches!(engine.cells[&cell].state, State::Booting { .. }));
    ends(&mut engine, &cell, false, 2);
    assert!(engine.cells.is_empty());
    assert_eq!(engine.breaker.kept(), 0);
}

/// Verifies V104.
#[test]
fn boots_that_began_before_the_pause_do_not_lengthen_it() {
    let mut engine = engine(capabilities::CLOUD);
    let order = |engine: &mut Engine, number: u64| {
        let effects = engine.order(in_zones(&format!("pod-{number}"), &["a"]), at(1)).1;
        let cell = launches(&effects).remove(0);
        runs_in(engine, &cell, "a", 1);
        cell
    };
    let cells: Vec<CellId> = (0..9).map(|number| order(&mut engine, number)).collect();
    let mut pauses = Vec::new();
    for cell in &cells {
        pauses.extend(paused(&ends(&mut engine, cell, false, 100)));
    }
    assert_eq!(pauses, [(format!("3 boots {REASON}"), 60)]);
}

/// Verifies V104.
#[test]
fn choices_of_a_pod_do_not_pause_launches_of_other_pods() {
    let parameters = |key: &str, value: &str| {
        let common = [("subnet:a".to_owned(), "subnet-a".to_owned())];
        common.into_iter().chain([(key.to_owned(), value.to_owned())]).collect::<BTreeMap<_, _>>()
    };
    let plain = parameters("volume-gib", "10");
    let mut engine = engine(capabilities::EC2);
    let closed = in_zones("closed", &["a"]);
    let closed = closed.with_parameters(parameters("security-groups", "sg-closed"));
    fail_thrice(&mut engine, closed, 1);
    let needs = |types: Option<&str>| {
        let instance_type = types.map(|name| InstanceType::Exact(name.to_owned()));
        let request = CellRequest { instance_type, ..CellRequest::default() };
        Needs::new(&request, &Requested::default(), &Defaults::default())
    };
    let of_type = |pod: &str, types: Option<&str>| {
        let order = taking(pod).with_parameters(plain.clone()).of(Ok(vec![candidate("a")]));
        let needs = Arc::new(needs(types));
        order.offering(|offers| {
            offers.choice.as_mut().unwrap().needs = Arc::clone(&needs);
        })
    };
    fail_thrice(&mut engine, of_type("metal", Some("m5.metal")), 1);
    assert_eq!(engine.metrics(at(2)).launch_pauses, 2);
    let effects = fail_thrice(&mut engine, of_type("other", None), 2);
    assert_eq!(paused(&effects).len(), 1, "the pod paused its own kind after three boots");
    // A pod of another size has the same boots.
    let large = of_type("large", None).with_parameters(parameters("volume-gib", "500"));
    assert_eq!(launches(&engine.order(large, at(3)).1), []);
}

/// Verifies V104, V105.
#[test]
fn warm_pools_pause_with_pods_and_try_again() {
    let mut engine = pausing(0);
    let candidates = Some(vec![candidate("a")]);
    let only = || Pool { candidates: candidates.clone(), ..pool("small", 2) };
    assert_eq!(launches(&engine.set_pools(vec![only()], at(1))), []);
    assert_eq!(launches(&engine.handle(Event::Tick, at(59))), []);
    let trial = launches(&engine.handle(Event::Tick, at(60)));
    assert_eq!(trial.len(), 1, "a single trial at a time");
    runs_in(&mut engine, &trial[0], "a", 61);
    // The agent stays silent until the timeout.
    let end = 60 + config().launch_timeout.as_secs();
    engine.handle(Event::Tick, at(end));
    let effects = terminated(&mut engine, &trial[0], end);
    assert_eq!(paused(&effects), [(format!("4 boots {REASON}"), 120)]);
    let again = launches(&engine.handle(Event::Tick, at(end + 120)));
    assert_eq!(again.len(), 1);
    runs_in(&mut engine, &again[0], "a", end + 121);
    assert_eq!(
        launches(&enrols(&mut engine, &again[0], end + 122)).len(),
        1,
        "a second cell is launched after the enrolment"
    );
}

/// Verifies V104.
#[test]
fn failed_boots_are_bounded_and_kept_for_a_day() {
    let mut engine = engine(capabilities::CLOUD);
    let with_role = |number: u64| {
        let parameters = BTreeMap::from([("role".to_owned(), number.to_string())]);
        in_zones(&format!("pod-{number}"), &["a"]).with_parameters(parameters)
    };
    for number in 0..300 {
        fail_thrice(&mut engine, with_role(number), number);
    }
    assert_eq!(engine.breaker.kept(), 256);
    let is_kept = |number: u64| {
        let refusals =
            engine.refusals_for(ONLY, &with_role(number).offers[0].parameters, "", at(300));
        refusals.reason(&offering("a"), at(300).boot).is_some()
    };
    assert!((250..300).all(is_kept), "the latest kinds are kept");
    let day = 24 * 3600;
    fail_thrice(&mut engine, with_role(1000), 299 + day);
    assert_eq!(engine.breaker.kept(), 1);
}

/// A step of a day in zone `a`.
#[derive(Debug, Clone)]
enum Step {
    Order,
    Answer(Index),
    Fail(Index),
    Enrol(Index),
    Delete(Index),
    Pass(u64),
}

fn steps() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => Just(Step::Order),
        4 => any::<Index>().prop_map(Step::Answer),
        6 => any::<Index>().prop_map(Step::Fail),
        1 => any::<Index>().prop_map(Step::Enrol),
        1 => any::<Index>().prop_map(Step::Delete),
        2 => prop::sample::select(vec![1, 20, 70, 700, 2000]).prop_map(Step::Pass),
    ]
}

/// Returns an engine whose orders have time, and many launches.
fn patient_engine() -> Engine {
    let limits = Limits { max_cells: 1000, ..Limits::default() };
    let config = EngineConfig { limits, launch_timeout: YEAR, ..config() };
    let patient = ProviderSetup { max_launches: 1000, ..provider_in(capabilities::CLOUD, None) };
    let mut engine = Engine::new(config, vec![patient], Box::new(Counting::default()));
    listed(&mut engine, 0, &[]);
    engine
}

/// The test's model of a boot.
#[derive(Debug, Clone, Copy)]
struct Open {
    began: u64,
    has_instance: bool,
}

impl Open {
    /// Returns whether its token is valid.
    fn may_enrol(self, now: u64) -> bool {
        self.has_instance && now < self.began + TTL.as_secs()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    /// Verifies V104, V105.
    #[test]
    fn launches_are_made_neither_in_a_pause_nor_beside_a_trial(
        steps in prop::collection::vec(steps(), 1..120),
    ) {
        let mut engine = patient_engine();
        let mut open: BTreeMap<CellId, Open> = BTreeMap::new();
        // The consecutive failures, the time of the last failure, and the end of the pause.
        let (mut failures, mut last, mut until) = (0_u32, 0, 0);
        let mut now = 1;
        for (number, step) in steps.iter().enumerate() {
            let ids: Vec<CellId> = open.keys().cloned().collect();
            let pick = |index: &Index| (!ids.is_empty()).then(|| index.get(&ids).clone());
            let effects = match step {
                Step::Order => engine.order(in_zones(&format!("pod-{number}"), &["a"]), at(now)).1,
                Step::Pass(seconds) => {
                    now += seconds;
                    if now >= last + 24 * 3600 {
                        failures = 0;
                    }
                    engine.handle(Event::Tick, at(now))
                }
                Step::Answer(index) => match pick(index).filter(|cell| !open[cell].has_instance) {
                    None => continue,
                    Some(cell) => {
                        open.get_mut(&cell).unwrap().has_instance = true;
                        runs_in(&mut engine, &cell, "a", now)
                    }
                },
                Step::Fail(index) => match pick(index).filter(|cell| open[cell].has_instance) {
                    None => continue,
                    Some(cell) => {
                        let began = open.remove(&cell).unwrap().began;
                        if failures < 3 || began >= last {
                            (failures, last) = (failures + 1, now);
                            if failures >= 3 {
                                until = now + (60 << (failures - 3).min(5)).min(1800);
                            }
                        }
                        ends(&mut engine, &cell, false, now)
                    }
                },
                Step::Enrol(index) => match pick(index).filter(|cell| open[cell].may_enrol(now)) {
                    None => continue,
                    Some(cell) => {
                        open.remove(&cell);
                        failures = 0;
                        enrols(&mut engine, &cell, now)
                    }
                },
                Step::Delete(index) => match pick(index).filter(|cell| open[cell].has_instance) {
                    None => continue,
                    Some(cell) => {
                        open.remove(&cell);
                        let stop = Event::Terminate { cell: cell.clone(), reason: "gone".into() };
                        let mut effects = engine.handle(stop, at(now));
                        effects.extend(terminated(&mut engine, &cell, now));
                        effects
                    }
                },
            };
            for cell in launches(&effects) {
                if failures >= 3 {
                    prop_assert!(now >= until, "{cell} is launched in the pause");
                    prop_assert!(open.is_empty(), "{cell} boots beside {open:?}");
                }
                open.insert(cell, Open { began: now, has_instance: false });
            }
            let is_open = failures >= 3 && (now < until || !open.is_empty());
            prop_assert_eq!(is_paused(&engine, now), is_open, "at {}", now);
        }
    }

}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20))]

    /// Verifies V105.
    #[test]
    fn boots_that_never_enrol_are_limited_per_hour(
        boots in prop::collection::vec(0..600_u64, 1..200),
        pods in 1..4_usize,
    ) {
        let mut engine = patient_engine();
        let mut boots = boots.into_iter().cycle();
        let (mut begun, mut ending) = (Vec::new(), BTreeMap::<CellId, u64>::new());
        for now in (1..6 * 3600).step_by(20) {
            let mut effects = Effects::new();
            let due: Vec<CellId> = ending
                .iter()
                .filter(|(_, end)| **end <= now)
                .map(|(cell, _)| cell.clone())
                .collect();
            for cell in due {
                ending.remove(&cell);
                effects.extend(ends(&mut engine, &cell, false, now));
            }
            for pod in 0..pods {
                effects.extend(engine.order(in_zones(&format!("pod-{pod}"), &["a"]), at(now)).1);
            }
            for cell in launches(&effects) {
                runs_in(&mut engine, &cell, "a", now);
                begun.push(now);
                ending.insert(cell, now + boots.next().unwrap());
            }
        }
        let most = begun.iter().map(|begin| {
            begun.iter().filter(|other| (*begin..*begin + 3600).contains(*other)).count()
        });
        // Three boots, or the boots of all pods at once, and a trial after 1, 2, 4, 8 and 16
        // minutes.
        let most = most.max().unwrap();
        prop_assert!(most <= 2 + pods + 6, "{} launches in an hour", most);
        let late = begun.iter().filter(|begin| **begin > 2 * 3600).count();
        prop_assert!(late <= 9, "{} launches in the last four hours", late);
    }
}
