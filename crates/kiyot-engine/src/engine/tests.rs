use kiyot_link::bootstrap::GatewayAddress;
use kiyot_proto::store::{self, CellPhase};
use kiyot_values::{error_chain::error_chain, price::Price};

use super::*;
use crate::{
    engine::tests::capabilities::ONLY,
    placement::{Accuracy, Candidate, Choice, LaunchRefusal, Market, NodeShare, Offering, Ranked},
    provider::{Attached, Capabilities, InstanceId, InstanceState, Owner, TagRules, Termination},
    wanted::{OrderKey, Wanted},
};

mod abandoned;
mod breaker;
mod budgets;
mod capabilities;
mod clock;
mod costs;
mod denials;
mod ends;
mod health;
mod limits;
mod market;
mod offers;
mod outages;
mod places;
mod pools;
mod ports;
mod properties;
mod providers;
mod records;
mod resumes;
mod room;
mod start_times;
mod tags;

/// Seams that count.
#[derive(Debug, Default)]
struct Counting(u64);

impl Seams for Counting {
    fn random(&mut self, buffer: &mut [u8]) -> Result<(), NoRandomness> {
        self.0 += 1;
        buffer.fill(0);
        for (byte, count) in buffer.iter_mut().zip(self.0.to_le_bytes()) {
            *byte = count;
        }
        Ok(())
    }

    fn bootstrap(&self, cell: &CellId, token: &str, _: bool) -> Option<Bootstrap> {
        Some(Bootstrap {
            cell: cell.to_string(),
            gateway: GatewayAddress::Unix("/nowhere".into()),
            ca_sha256: String::new(),
            token: token.to_owned(),
            orphan_timeout_secs: 900,
            agent: None,
        })
    }
}

const TTL: Duration = Duration::from_secs(600);
const NOON: Duration = Duration::from_secs(1_000_000_000);
const YEAR: Duration = Duration::from_secs(365 * 24 * 3600);

fn config() -> EngineConfig {
    EngineConfig {
        limits: Limits { max_cells: 10, ..Limits::default() },
        launch_timeout: TTL * 10,
        token_ttl: TTL,
        boot_id: "now".into(),
        refusal_pause: Duration::from_secs(180),
        retry_pause: Duration::from_secs(3),
        spot_deadline: Duration::from_secs(60),
        orphan_timeout: Duration::from_secs(1000),
        healthy_timeout: Some(Duration::from_secs(90)),
        owner: Owner { fingerprint: "ours".into(), ..Owner::default() },
        tag_rules: TagRules::default(),
        take_over: false,
    }
}

fn at(seconds: u64) -> Now {
    let boot = Duration::from_secs(seconds);
    Now { boot, unix: NOON + boot }
}

fn offering(zone: &str) -> Offering {
    Offering { instance_type: "small".into(), zone: zone.into(), market: Market::Spot }
}

const PRICE: Price = Price::from_micros(3_600_000);

fn candidate(zone: &str) -> Candidate {
    Candidate { offering: offering(zone), price: PRICE, accuracy: Accuracy::Exact }
}

fn key(pod: &str) -> OrderKey {
    let name: String = pod.into();
    OrderKey { pod_uid: name.clone(), namespace: "default".into(), name, attempt: 0 }
}

/// Returns a provider that looks in a place.
fn provider_in(capabilities: Capabilities, place: Option<&str>) -> ProviderSetup {
    ProviderSetup {
        capabilities,
        place: place.map(Into::into),
        max_launches: 3,
        boots: None,
        machine: None,
    }
}

/// Returns an engine's only provider.
fn only(capabilities: Capabilities) -> Vec<ProviderSetup> {
    vec![provider_in(capabilities, None)]
}

fn spec(pod: &str) -> OrderSpec {
    let offers = Offers {
        provider: ONLY,
        candidates: Ok(["a", "b"].map(candidate).to_vec()),
        parameters: BTreeMap::new(),
        choice: None,
    };
    OrderSpec {
        wanted: Arc::new(Wanted { key: key(pod), ..Wanted::default() }),
        sandbox: SandboxId::mint().unwrap(),
        offers: vec![offers],
        timeout: None,
        is_joined: true,
    }
}

/// Returns an order with changed wishes of its pod.
fn with(mut spec: OrderSpec, change: impl FnOnce(&mut Wanted)) -> OrderSpec {
    change(Arc::make_mut(&mut spec.wanted));
    spec
}

/// Returns the request of a launch.
pub(super) fn request() -> Arc<Launch> {
    let mut engine = engine(capabilities::LOCAL);
    launched(&mut engine, "pod", at(1)).1
}

fn engine(capabilities: Capabilities) -> Engine {
    let mut engine = Engine::new(config(), only(capabilities), Box::new(Counting::default()));
    engine.handle(
        Event::Listed { provider: ONLY, began: Duration::ZERO, instances: Vec::new() },
        at(0),
    );
    engine
}

/// Orders a cell, and returns it with its launch.
fn launched(engine: &mut Engine, pod: &str, now: Now) -> (CellId, Arc<Launch>) {
    let (_, effects) = engine.order(spec(pod), now);
    let launch = effects.into_iter().find_map(|(cell, effect)| match effect {
        Effect::Launch(launch) => Some((cell.unwrap(), launch)),
        _ => None,
    });
    launch.unwrap()
}

/// Binds a cell to its pod.
fn bound(engine: &mut Engine, pod: &str, instance: &str) -> CellId {
    let (cell, launch) = launched(engine, pod, at(1));
    engine.handle(Event::Launched(cell.clone(), Ok(launched_as(instance, &cell))), at(1));
    redeem(engine, &cell, &launch, at(1)).unwrap();
    engine.handle(Event::Running(cell.clone(), Duration::ZERO), at(1));
    engine.handle(Event::Connected(cell.clone()), at(1));
    engine.handle(Event::Attached(cell.clone(), Ok(Attached::default())), at(1));
    assert!(engine.orders.is_empty());
    cell
}

fn redeem(
    engine: &mut Engine,
    cell: &CellId,
    launch: &Launch,
    now: Now,
) -> Result<(), RedeemRefusal> {
    let event = Event::Redeem {
        cell: cell.clone(),
        token_sha256: sha256(launch.spec.bootstrap.token.as_bytes()),
        key_sha256: "key".into(),
        redemption: 1,
    };
    let mut effects = engine.handle(event, now).into_iter();
    effects
        .find_map(|(_, effect)| match effect {
            Effect::AnswerRedeem(_, outcome) => Some(outcome),
            _ => None,
        })
        .unwrap()
}

fn instance(id: &str, cell: &CellId, fingerprint: &str) -> Instance {
    Instance {
        token: Some("another token".into()),
        fingerprint: Some(fingerprint.into()),
        ..Instance::new(InstanceId(id.into()), cell.clone(), offering("a"), InstanceState::Running)
    }
}

/// Returns the instance of a launch's answer.
fn launched_as(id: &str, cell: &CellId) -> Instance {
    instance(id, cell, "ours")
}

fn listed(engine: &mut Engine, seconds: u64, instances: &[Instance]) -> Effects {
    let event =
        Event::Listed { provider: ONLY, began: at(seconds).boot, instances: instances.to_vec() };
    engine.handle(event, at(seconds))
}

fn ends_strays(effects: &Effects) -> bool {
    effects.iter().any(|(_, effect)| matches!(effect, Effect::EndStrays(..)))
}

/// Verifies X16, Y60.
#[test]
fn clock_jump_neither_ends_nor_prolongs_a_token() {
    for unix in [NOON - YEAR, NOON, NOON + YEAR] {
        let mut engine = engine(capabilities::LOCAL);
        let (cell, launch) = launched(&mut engine, "pod", at(1));
        let before = Now { boot: TTL, unix };
        assert!(redeem(&mut engine, &cell, &launch, before).is_ok());
        let after = Now { boot: TTL + Duration::from_secs(1), unix };
        assert!(matches!(redeem(&mut engine, &cell, &launch, after), Err(RedeemRefusal::Expired)));
    }
}

/// Verifies L24.
#[test]
fn token_is_checked_without_being_spent_until_it_expires() {
    let mut engine = engine(capabilities::LOCAL);
    let (cell, launch) = launched(&mut engine, "pod", at(1));
    let token = sha256(launch.spec.bootstrap.token.as_bytes());
    let (before, after) = (at(2), Now { boot: TTL + Duration::from_secs(1), unix: NOON });
    let check = |engine: &Engine, token: &str, now| engine.check_token(&cell, token, now);
    assert!(check(&engine, &token, before).is_ok());
    assert!(matches!(check(&engine, "guess", before), Err(RedeemRefusal::WrongToken)));
    assert!(matches!(check(&engine, &token, after), Err(RedeemRefusal::Expired)));
    let unknown = CellId::mint().unwrap();
    assert!(matches!(engine.check_token(&unknown, &token, before), Err(RedeemRefusal::Unknown)));
    // The checks did not spend the token: a key may spend it, and it stays valid.
    redeem(&mut engine, &cell, &launch, before).unwrap();
    assert!(check(&engine, &token, before).is_ok());
    assert!(matches!(check(&engine, &token, after), Err(RedeemRefusal::Expired)));
}

/// Verifies X16, Y60.
#[test]
fn clock_jump_across_a_restart_can_only_shorten_a_token() {
    let record = store::Cell {
        token_sha256: "token".into(),
        token_expires_unix: i64::try_from((NOON + TTL).as_secs()).unwrap(),
        ..stored(CellPhase::Bound)
    };
    for (unix, left) in [(NOON, TTL), (NOON - YEAR, TTL), (NOON + YEAR, Duration::ZERO)] {
        let now = Now { boot: Duration::from_secs(9), unix };
        let (engine, cell) = recovered(record.clone(), true, now);
        let token = engine.cells[&cell].token.as_ref().unwrap();
        assert_eq!(token.deadline, now.boot + left);
    }
}

fn stored(phase: CellPhase) -> store::Cell {
    store::Cell {
        id: "cell-aaaaaaaaaaaa".into(),
        phase: phase.into(),
        instance: "i".into(),
        boot_id: "now".into(),
        addresses: vec!["10.0.0.7".into()],
        reason: "stopped".into(),
        ..Default::default()
    }
}

/// Returns the record of a cell's sandbox.
fn sandbox_of(cell: &store::Cell) -> JournalSandbox {
    JournalSandbox {
        id: "sandbox".into(),
        cell: cell.id.clone(),
        pod_uid: cell.pod_uid.clone(),
        ports: None,
        created_unix_nanos: 1,
    }
}

fn recovered(record: store::Cell, has_sandbox: bool, now: Now) -> (Engine, CellId) {
    let cell = CellId::parse(&record.id).unwrap();
    let journal = Journal {
        sandboxes: has_sandbox.then(|| sandbox_of(&record)).into_iter().collect(),
        cells: vec![(cell.to_string(), record)],
        ..Journal::default()
    };
    let seams = Box::new(Counting::default());
    let (engine, _, unusable) =
        Engine::recover(config(), only(capabilities::LOCAL), seams, journal, now);
    assert_eq!(unusable, []);
    (engine, cell)
}

/// Returns the state of a recorded cell after a start, or the reason of its end.
fn resumed(record: store::Cell, has_sandbox: bool) -> Result<State, String> {
    let (engine, cell) = recovered(record, has_sandbox, at(1));
    let Some(cell) = engine.cells.get(&cell) else {
        return Err(engine.gone_reason(&cell).unwrap_or("removed").to_owned());
    };
    match cell.state.reason() {
        Some(reason) => Err(reason.to_string()),
        None => Ok(cell.state.clone()),
    }
}

/// The records are of daemons that did not record launches.
#[test]
fn records_of_earlier_versions_keep_only_bound_cells_with_a_sandbox() {
    assert!(matches!(
        resumed(stored(CellPhase::Bound), true),
        Ok(State::Bound { addresses, .. }) if addresses.len() == 1
    ));
    for phase in [
        CellPhase::Unspecified,
        CellPhase::Requested,
        CellPhase::Launching,
        CellPhase::Booting,
        CellPhase::Enrolled,
    ] {
        let reason = resumed(stored(phase), true).unwrap_err();
        assert!(reason.contains("restarted"), "{phase:?}: {reason}");
    }
    assert!(resumed(stored(CellPhase::Bound), false).unwrap_err().contains("no pod sandbox"));
    assert_eq!(resumed(stored(CellPhase::Terminating), true).unwrap_err(), "stopped");
    assert_eq!(resumed(stored(CellPhase::Gone), true).unwrap_err(), "stopped");
    assert_eq!(resumed(stored(CellPhase::Gone), false).unwrap_err(), "removed");
    let rebooted = store::Cell { boot_id: "before".into(), ..stored(CellPhase::Bound) };
    assert_eq!(resumed(rebooted, true).unwrap_err(), "the node was rebooted");
}

#[test]
fn launch_round_trips_through_the_journal() {
    let mut engine = engine(capabilities::CLOUD);
    let (cell, launch) = launched(&mut engine, "pod", at(1));
    let record = engine.cells[&cell].stored();
    assert_eq!(Launch::from_stored(&cell, &record.launch.unwrap()).as_ref(), Some(&*launch));
    engine.handle(Event::Launched(cell.clone(), Ok(launched_as("i", &cell))), at(2));
    assert_eq!(engine.cells[&cell].stored().launch, None, "its secrets are not kept");
}

#[test]
fn refused_launch_is_placed_again_without_the_refused_offering() {
    let mut engine = engine(capabilities::CLOUD);
    let (first, _) = launched(&mut engine, "pod", at(1));
    let refusal = ProviderError::no_capacity("launch", vec![offering("a")]);
    let effects = engine.handle(Event::Launched(first.clone(), Err(refusal)), at(2));
    let again = effects.into_iter().find_map(|(cell, effect)| match effect {
        Effect::Launch(launch) => Some((cell.unwrap(), launch)),
        _ => None,
    });
    let (second, launch) = again.unwrap();
    assert_ne!(first, second);
    assert_eq!(launch.spec.candidates, [candidate("b")]);
    assert!(!engine.contains(&first));
}

#[test]
fn cell_keeps_the_reason_of_its_offering_and_the_failures_before_it_across_a_restart() {
    let mut engine = engine(capabilities::CLOUD);
    let (first, _) = launched(&mut engine, "pod", at(1));
    let refusal = ProviderError::no_capacity("launch: no hosts", vec![offering("a")]);
    let (launches, _) = outcome(&engine.handle(Event::Launched(first, Err(refusal)), at(2)));
    let second = launches.into_iter().next().unwrap();
    let instance = Instance { offering: offering("b"), ..launched_as("i", &second) };
    engine.handle(Event::Launched(second.clone(), Ok(instance)), at(3));
    let before = engine.cell_view(&second, at(3)).unwrap();
    assert_eq!(before.offering_reason.as_deref(), Some("the only candidate"));
    assert_eq!(before.earlier.failures, 1);
    assert_eq!(before.earlier.last, ["the provider of cells: launch: no hosts"]);
    let record = engine.cells[&second].stored();
    let (engine, second) = recovered(store::Cell { boot_id: "now".into(), ..record }, false, at(4));
    let after = engine.cell_view(&second, at(4)).unwrap();
    assert_eq!((after.offering_reason, after.earlier), (before.offering_reason, before.earlier));
}

/// Verifies A13.
#[test]
fn offerings_are_tried_in_turn_until_an_offering_has_capacity() {
    let mut engine = engine(capabilities::CLOUD);
    let zones = ["a", "b", "c", "d", "e", "f"];
    assert!(
        u32::try_from(zones.len()).unwrap()
            > provider_in(capabilities::CLOUD, None).max_launches + 1
    );
    let order = spec("pod").of(Ok(zones.map(candidate).to_vec()));
    let (_, mut effects) = engine.order(order, at(1));
    for zone in &zones[..zones.len() - 1] {
        let (launches, answer) = outcome(&effects);
        assert_eq!((launches.len(), answer), (1, None), "before {zone}");
        let error = ProviderError::no_capacity("launch", vec![offering(zone)]);
        effects = engine.handle(Event::Launched(launches[0].clone(), Err(error)), at(2));
    }
    let (launches, _) = outcome(&effects);
    let launched = engine.cells[&launches[0]].stored().launch.unwrap();
    assert_eq!(launched.candidates.len(), 1);
    assert_eq!(launched.candidates[0].zone, "f");
}

/// Verifies V94.
#[test]
fn refused_type_gives_way_to_the_next_until_three_types_have_the_same_code() {
    let of_type = |name: &str| {
        let offering = Offering { instance_type: name.into(), ..offering("a") };
        Candidate { offering, ..candidate("a") }
    };
    let types = ["nano", "micro", "small", "medium"];
    for (codes, is_of_request, is_answered) in [
        (["x", "x", "x"], false, true),
        (["x", "y", "x"], false, false),
        (["x", "x", "x"], true, true),
    ] {
        let mut engine = engine(capabilities::CLOUD);
        let order = spec("pod").of(Ok(types.map(of_type).to_vec()));
        let (_, mut effects) = engine.order(order, at(1));
        for (code, name) in codes.iter().zip(types) {
            let (launches, answer) = outcome(&effects);
            assert_eq!((launches.len(), answer), (1, None), "before {name}");
            let error = ProviderError {
                refusal: Some(LaunchRefusal::Type {
                    code: (*code).into(),
                    offerings: ["a", "b"]
                        .map(|zone| Offering { zone: zone.into(), ..of_type(name).offering })
                        .to_vec(),
                }),
                is_of_request,
                ..ProviderError::without_cause(ErrorClass::Invalid, format!("{code} for {name}"))
            };
            effects = engine.handle(Event::Launched(launches[0].clone(), Err(error)), at(2));
            let reason = engine.refusals(ONLY).reason(&of_type(name).offering, at(3).boot);
            // The refusal of a pod's own request does not refuse the type.
            let kept = (!is_of_request).then(|| format!("{code} for {name}").into());
            assert_eq!(reason, kept);
        }
        let (launches, answer) = outcome(&effects);
        assert_eq!((launches.len(), answer.is_some()), (usize::from(!is_answered), is_answered));
        let text = answer.unwrap_or_default();
        assert!(!is_answered || types[..3].iter().all(|it| text.contains(it)), "{text}");
    }
}

/// Returns the launches among effects, and the answer of an order.
fn outcome(effects: &Effects) -> (Vec<CellId>, Option<String>) {
    let (mut launches, mut answer) = (Vec::new(), None);
    for (cell, effect) in effects {
        match effect {
            Effect::Launch(_) => launches.extend(cell.clone()),
            Effect::AnswerOrder(_, Err(error)) => answer = Some(error_chain(error)),
            _ => {}
        }
    }
    (launches, answer)
}

/// Verifies A14.
#[test]
fn error_after_the_last_launch_names_the_errors_of_all_launches() {
    let mut engine = engine(capabilities::CLOUD);
    let (mut cell, _) = launched(&mut engine, "pod", at(1));
    let mut answer = None;
    for (number, refused) in [vec![offering("a")], vec![offering("b")]].into_iter().enumerate() {
        assert_eq!(answer, None);
        let error = ProviderError::no_capacity(format!("try {number}"), refused);
        let (launches, error) =
            outcome(&engine.handle(Event::Launched(cell.clone(), Err(error)), at(2)));
        cell = launches.into_iter().next().unwrap_or(cell);
        answer = error;
    }
    let expected = "2 launches failed: (1) the provider of cells: try 0; (2) the provider of \
                    cells: try 1";
    assert_eq!(answer.as_deref(), Some(expected));
}

/// Verifies A15.
#[test]
fn denied_launch_is_not_repeated_for_a_while() {
    let mut engine = engine(capabilities::CLOUD);
    let (cell, _) = launched(&mut engine, "pod", at(1));
    let denied = ProviderError::without_cause(ErrorClass::Auth, "launch: UnauthorizedOperation");
    let (launches, answer) = outcome(&engine.handle(Event::Launched(cell, Err(denied)), at(2)));
    assert_eq!((launches.len(), answer.is_some()), (0, true));
    let (launches, answer) = outcome(&engine.order(spec("other"), at(181)).1);
    let expected = "no cell is launched for 2 s, because the last launch was not permitted: \
                    launch: UnauthorizedOperation";
    assert_eq!((launches.len(), answer.as_deref()), (0, Some(expected)));
    assert_eq!(outcome(&engine.order(spec("other"), at(182)).1).0.len(), 1);
}

#[test]
fn unanswered_launch_is_replayed_with_the_same_parameters_until_its_token_expires() {
    let mut engine = engine(capabilities::CLOUD);
    let (cell, first) = launched(&mut engine, "pod", at(0));
    let unanswered = || Err(ProviderError::without_cause(ErrorClass::Unanswered, "launch"));
    let (mut replays, mut now) = (0, 0);
    engine.handle(Event::Launched(cell.clone(), unanswered()), at(0));
    while let Some(next) = engine.next_timer().filter(|next| *next < TTL * 2) {
        now = next.as_secs() + 1;
        for (_, effect) in engine.handle(Event::Tick, at(now)) {
            if let Effect::Launch(launch) = effect {
                assert_eq!(launch, first);
                assert!(now <= TTL.as_secs() + 1);
                replays += 1;
            }
        }
        engine.handle(Event::Launched(cell.clone(), unanswered()), at(now));
    }
    assert!(replays > 5, "{replays}");
    // A refusal proves nothing while an earlier call has no answer.
    let refusal = ProviderError::without_cause(ErrorClass::Capacity, "launch");
    engine.handle(Event::Launched(cell.clone(), Err(refusal)), at(now));
    assert!(engine.contains(&cell));
    // The listing shows the instance, by its token.
    let found = Instance { token: Some(first.token.clone()), ..instance("i", &cell, "ours") };
    listed(&mut engine, now + 1, &[found]);
    assert_eq!(engine.cells[&cell].state.instance(), Some(&InstanceId("i".into())));
}

#[test]
fn open_launch_ends_only_after_several_listings_past_the_declared_age() {
    let mut engine = engine(capabilities::CLOUD);
    let (cell, _) = launched(&mut engine, "pod", at(0));
    let expiry = TTL.as_secs();
    for seconds in [0, expiry + 1] {
        engine.handle(Event::Tick, at(seconds));
        let error = ProviderError::without_cause(ErrorClass::Unanswered, "launch");
        engine.handle(Event::Launched(cell.clone(), Err(error)), at(seconds));
    }
    assert!(engine.cells[&cell].state.is_searching());
    let age = capabilities::CLOUD.not_found_believed_after.as_secs();
    for seconds in [10, 60, 10 + age, 70 + age] {
        listed(&mut engine, expiry + seconds, &[]);
        assert!(engine.contains(&cell), "{seconds} s after the token expired");
    }
    listed(&mut engine, expiry + 130 + age, &[]);
    assert!(!engine.contains(&cell));
}

#[test]
fn twin_and_stray_are_ended_after_two_separate_sightings() {
    let mut engine = engine(capabilities::CLOUD);
    let cell = bound(&mut engine, "pod", "i-1");
    let own = instance("i-1", &cell, "ours");
    let twin = instance("i-2", &cell, "ours");
    let stray = instance("i-3", &CellId::mint().unwrap(), "ours");
    let all = [own, twin, stray];
    assert!(!ends_strays(&listed(&mut engine, 100, &all)));
    assert!(!ends_strays(&listed(&mut engine, 101, &all)), "the second sighting is too early");
    let effects = listed(&mut engine, 160, &all);
    let ended = effects.iter().find_map(|(_, effect)| match effect {
        Effect::EndStrays(_, instances) => Some(instances.clone()),
        _ => None,
    });
    assert_eq!(ended.unwrap(), [InstanceId("i-2".into()), InstanceId("i-3".into())]);
    assert!(!ends_strays(&listed(&mut engine, 220, &all)), "the first termination is pending");
}

/// Verifies V37.
#[test]
fn accepted_termination_of_a_stray_is_not_repeated_while_it_ends() {
    let mut engine = engine(capabilities::CLOUD);
    let stray = [instance("i-3", &CellId::mint().unwrap(), "ours")];
    let answer = |is_accepted: bool| {
        let (accepted, failed) = stray.iter().map(|it| it.id.clone()).partition(|_| is_accepted);
        Event::StraysEnded { provider: ONLY, accepted, failed }
    };
    assert!(!ends_strays(&listed(&mut engine, 100, &stray)));
    assert!(ends_strays(&listed(&mut engine, 160, &stray)));
    engine.handle(answer(false), at(161));
    assert!(ends_strays(&listed(&mut engine, 220, &stray)), "the first termination failed");
    engine.handle(answer(true), at(221));
    let again =
        221 + capabilities::CLOUD.listing_period.as_secs() * u64::from(evidence::STRAY_PERIODS);
    for seconds in (280..again).step_by(60) {
        assert!(!ends_strays(&listed(&mut engine, seconds, &stray)), "after {seconds} s");
    }
    assert!(ends_strays(&listed(&mut engine, again, &stray)), "the stray still runs");
}

/// Verifies P17.
#[test]
fn instance_of_another_authority_stops_launches_and_is_not_ended() {
    let mut engine = engine(capabilities::CLOUD);
    let foreign = [instance("i-9", &CellId::mint().unwrap(), "theirs")];
    for seconds in [100, 160, 220] {
        assert!(!ends_strays(&listed(&mut engine, seconds, &foreign)));
    }
    let (_, effects) = engine.order(spec("pod"), at(230));
    assert!(effects.iter().any(|(_, effect)| matches!(
        effect,
        Effect::AnswerOrder(_, Err(CellError::Foreign(InstanceId(id)))) if id == "i-9"
    )));
    listed(&mut engine, 280, &[]);
    launched(&mut engine, "pod", at(290));
    engine.config.take_over = true;
    listed(&mut engine, 340, &foreign);
    assert!(ends_strays(&listed(&mut engine, 400, &foreign)));
}

#[test]
fn order_with_an_unanswered_launch_is_answered_at_its_deadline() {
    for capabilities in [capabilities::LOCAL, capabilities::CLOUD] {
        let mut engine = engine(capabilities);
        let (cell, _) = launched(&mut engine, "pod", at(1));
        let deadline = 1 + config().launch_timeout.as_secs();
        let is_answer = |(_, effect): &(_, Effect)| {
            matches!(effect, Effect::AnswerOrder(_, Err(CellError::NotLaunched { .. })))
        };
        assert!(!engine.handle(Event::Tick, at(deadline - 1)).iter().any(is_answer));
        assert!(engine.handle(Event::Tick, at(deadline)).iter().any(is_answer));
        // The next order waits for the cell's end if the cell holds parts of the node.
        let (_, effects) = engine.order(spec("pod"), at(deadline + 1));
        let is_launched = effects.iter().any(|(_, effect)| matches!(effect, Effect::Launch(_)));
        assert_eq!(is_launched, !capabilities.awaits_ends());
        assert!(engine.contains(&cell));
    }
}

/// Verifies V32.
#[test]
fn launch_without_effect_ends_with_its_order_and_names_the_reason() {
    for (class, stays) in [(ErrorClass::Transient, false), (ErrorClass::Unanswered, true)] {
        let mut engine = engine(capabilities::CLOUD);
        engine.config.launch_timeout = Duration::from_secs(2);
        let (cell, _) = launched(&mut engine, "pod", at(1));
        let error = ProviderError::without_cause(class, "the connection is refused");
        engine.handle(Event::Launched(cell.clone(), Err(error)), at(1));
        let effects = engine.handle(Event::Tick, at(3));
        let error = outcome(&effects).1.unwrap();
        assert!(error.ends_with("the connection is refused"), "{error}");
        assert_eq!(engine.contains(&cell), stays, "{class:?}");
    }
}

/// Verifies V35.
#[test]
fn listed_end_of_an_instance_ends_a_cell_with_a_refused_termination() {
    let mut engine = engine(capabilities::CLOUD);
    let cell = bound(&mut engine, "pod", "i-1");
    let ended = Instance { state: InstanceState::Terminated, ..instance("i-1", &cell, "ours") };
    listed(&mut engine, 100, std::slice::from_ref(&ended));
    let refused = ProviderError::without_cause(ErrorClass::Auth, "terminate");
    let refuse = Event::Terminated {
        cell: cell.clone(),
        outcome: Err(refused.clone()),
        console: String::new(),
    };
    engine.handle(refuse.clone(), at(101));
    for failed in [true, false] {
        assert!(engine.contains(&cell));
        let effects = listed(&mut engine, 102, std::slice::from_ref(&ended));
        // The pod's parts of the node are released with the cell.
        let detaches = |(_, effect): &(_, Effect)| matches!(effect, Effect::Detach(_));
        assert!(effects.iter().any(detaches), "{effects:?}");
        let outcome = if failed { Err(refused.clone()) } else { Ok(()) };
        engine.handle(Event::Detached(cell.clone(), outcome), at(103));
    }
    assert!(!engine.contains(&cell));
}

/// Verifies P15.
#[test]
fn pod_of_a_stray_waits_until_the_stray_has_ended() {
    let mut engine =
        Engine::new(config(), only(capabilities::LOCAL), Box::new(Counting::default()));
    let launches = |effects: &Effects| {
        effects.iter().filter(|(_, effect)| matches!(effect, Effect::Launch(_))).count()
    };
    for pod in ["lost", "other"] {
        assert_eq!(launches(&engine.order(spec(pod), at(1)).1), 0, "nothing is listed yet");
    }
    let of_pod = launched_as("i-1", &CellId::mint().unwrap());
    let stray = [Instance { fingerprint: None, pod_uid: Some("lost".into()), ..of_pod }];
    assert_eq!(launches(&listed(&mut engine, 2, &stray)), 1, "the other pod is launched");
    let effects = listed(&mut engine, 10, &stray);
    assert!(ends_strays(&effects) && launches(&effects) == 0);
    assert_eq!(launches(&listed(&mut engine, 12, &[])), 1);
}

#[test]
fn absent_instance_ends_its_cell_only_by_a_description_past_the_declared_age() {
    let mut engine = engine(capabilities::CLOUD);
    let cell = bound(&mut engine, "pod", "i-1");
    let not_found = || {
        let error = ProviderError::without_cause(ErrorClass::NotFound, "describe");
        Event::Described(cell.clone(), Err(error))
    };
    let effects = listed(&mut engine, 10, &[]);
    assert!(matches!(&effects[..], [(Some(of), Effect::Describe(_))] if *of == cell));
    engine.handle(not_found(), at(11));
    assert!(matches!(engine.cells[&cell].state, State::Bound { .. }), "the instance is too young");
    let age = capabilities::CLOUD.not_found_believed_after.as_secs();
    engine.handle(not_found(), at(2 + age));
    assert!(matches!(engine.cells[&cell].state, State::Bound { .. }), "its agent is connected");
    engine.handle(Event::Disconnected(cell.clone()), at(3 + age));
    engine.handle(not_found(), at(3 + age));
    assert!(matches!(engine.cells[&cell].state, State::Terminating { .. }));
}

#[test]
fn pod_gets_another_launch_if_the_instance_of_a_lost_answer_has_ended() {
    let mut engine = engine(capabilities::CLOUD);
    let (cell, _) = launched(&mut engine, "pod", at(1));
    let error = |class| Err(ProviderError::without_cause(class, "launch"));
    engine.handle(Event::Launched(cell.clone(), error(ErrorClass::Unanswered)), at(2));
    let effects = engine.handle(Event::Launched(cell.clone(), error(ErrorClass::Ended)), at(3));
    assert!(!engine.cells.contains_key(&cell), "{effects:?}");
    let other = effects.iter().find(|(_, effect)| matches!(effect, Effect::Launch(_)));
    assert!(other.is_some_and(|(other, _)| other.as_ref() != Some(&cell)), "{effects:?}");
}

#[test]
fn many_absent_instances_are_an_outage() {
    let mut engine = engine(capabilities::CLOUD);
    engine.config.owner.node = "worker-1".to_owned();
    for (pod, id) in [("a", "i-1"), ("b", "i-2"), ("c", "i-3"), ("d", "i-4")] {
        bound(&mut engine, pod, id);
    }
    let effects = listed(&mut engine, 1000, &[]);
    assert!(matches!(
        &effects[..],
        [(None, Effect::Log(Notice::Outage { absent: 4, expected: 4, node, .. }))]
            if node == "worker-1"
    ));
}

/// Verifies X16.
#[test]
fn clock_jumps_do_not_hide_an_outage() {
    let mut engine = engine(capabilities::CLOUD);
    let pods = [("a", "i-1"), ("b", "i-2"), ("c", "i-3"), ("d", "i-4")];
    let cells = pods.map(|(pod, id)| bound(&mut engine, pod, id));
    let mut now = at(1000);
    for cell in &cells {
        now.unix += YEAR;
        engine.handle(Event::Disconnected(cell.clone()), now);
        let error = ProviderError::without_cause(ErrorClass::NotFound, "describe");
        engine.handle(Event::Described(cell.clone(), Err(error)), now);
    }
    for cell in &cells[2..] {
        assert!(matches!(engine.cells[cell].state, State::Bound { .. }), "{cell}");
    }
}

#[test]
fn orphan_timeout_releases_a_pod_only_where_it_is_proof() {
    for is_proof in [true, false] {
        let capabilities = Capabilities { can_be_paused: !is_proof, ..capabilities::CLOUD };
        let mut engine = engine(capabilities);
        let cell = bound(&mut engine, "pod", "i-1");
        let stop = Event::Terminate { cell: cell.clone(), reason: "stopped".into() };
        engine.handle(stop, at(10));
        let effects = engine.handle(Event::ShutDown(cell.clone(), false), at(20));
        let disconnects = |(_, effect): &(_, Effect)| matches!(effect, Effect::Disconnect);
        assert_eq!(effects.iter().any(disconnects), is_proof);
        let answered = |effects: &Effects| {
            effects.iter().any(|(_, effect)| matches!(effect, Effect::AnswerEnd(Ok(()))))
        };
        assert!(!answered(&engine.handle(Event::Tick, at(1019))));
        assert_eq!(answered(&engine.handle(Event::Tick, at(1020))), is_proof);
    }
}

#[test]
fn last_change_of_an_ended_cell_is_written_until_it_succeeds() {
    let mut engine = engine(capabilities::CLOUD);
    let (cell, _) = launched(&mut engine, "pod", at(1));
    let refusal = ProviderError::without_cause(ErrorClass::Quota, "launch");
    let effects = engine.handle(Event::Launched(cell.clone(), Err(refusal)), at(2));
    let removal = effects.into_iter().find_map(|(_, effect)| match effect {
        Effect::Commit { changes, .. } => Some(changes),
        _ => None,
    });
    let failed = Event::CommitFailed {
        cell: cell.clone(),
        of: CommitOf::Information,
        changes: removal.unwrap(),
        error: Arc::new(crate::StoreError::closed()),
        skipped: Vec::new(),
    };
    assert!(engine.handle(failed, at(3)).is_empty());
    let effects = engine.handle(Event::Tick, at(6));
    assert!(matches!(
        &effects[..],
        [(Some(of), Effect::Commit { changes, .. })]
            if *of == cell && changes.contains(&Change::Cell(cell.clone(), None))
    ));
}
