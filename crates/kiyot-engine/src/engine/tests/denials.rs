//! Denied launches.

use crate::{
    engine::{
        providers::Denials,
        tests::{pools::pool, *},
    },
    placement,
    provider::LaunchSpec,
};

/// Verifies A15.
#[test]
fn launch_denied_by_policy_stops_only_launches_with_its_parameters_and_type() {
    let mut engine = engine(capabilities::CLOUD);
    let with_role = |pod: &str| {
        let parameters = BTreeMap::from([("role".to_owned(), "admin".to_owned())]);
        spec(pod).with_parameters(parameters)
    };
    let cell = outcome(&engine.order(with_role("pod"), at(1)).1).0.remove(0);
    let denied = ProviderError {
        is_of_request: true,
        ..ProviderError::without_cause(ErrorClass::Auth, "launch: UnauthorizedOperation")
    };
    let (launches, answer) = outcome(&engine.handle(Event::Launched(cell, Err(denied)), at(2)));
    assert_eq!((launches.len(), answer.is_some()), (0, true));
    let (launches, answer) = outcome(&engine.order(with_role("pod"), at(181)).1);
    let expected = "no cell is launched for 2 s with this instance type and these annotations, \
                    because the last launch was not permitted: launch: UnauthorizedOperation";
    assert_eq!((launches.len(), answer.as_deref()), (0, Some(expected)));
    // Launches without the role, and launches with another type, go on.
    assert_eq!(outcome(&engine.order(spec("other"), at(3)).1).0.len(), 1);
    let another = with_role("third").of(Ok(vec![candidate("b")]));
    assert_eq!(outcome(&engine.order(another, at(3)).1).0.len(), 1);
    assert_eq!(outcome(&engine.order(with_role("fourth"), at(182)).1).0.len(), 1);
}

/// Verifies A15.
#[test]
fn launch_of_a_pool_denied_by_policy_is_not_repeated_for_a_while() {
    let mut engine = engine(capabilities::CLOUD);
    let cell = outcome(&engine.set_pools(vec![pool("small", 1)], at(1))).0.remove(0);
    let denied = ProviderError {
        is_of_request: true,
        ..ProviderError::without_cause(ErrorClass::Auth, "launch: UnauthorizedOperation")
    };
    engine.handle(Event::Launched(cell, Err(denied)), at(2));
    assert_eq!(outcome(&engine.handle(Event::Tick, at(181))).0, []);
    assert_eq!(outcome(&engine.handle(Event::Tick, at(182))).0.len(), 1);
}

/// Verifies A15.
#[test]
fn denied_kinds_of_launches_are_bounded() {
    let (mut denials, cell) = (Denials::default(), CellId::mint().unwrap());
    let launch = |number: usize| LaunchSpec {
        candidates: vec![candidate("a")],
        tags: BTreeMap::new(),
        bootstrap: Counting::default().bootstrap(&cell, "", false).unwrap(),
        cell: cell.clone(),
        parameters: BTreeMap::from([("role".to_owned(), number.to_string())]),
    };
    let denied = ProviderError {
        is_of_request: true,
        ..ProviderError::without_cause(ErrorClass::Auth, "denied")
    };
    for number in 0..1000 {
        let until = Duration::from_secs(100 + u64::try_from(number).unwrap());
        denials.add(&launch(number), denied.clone(), until);
    }
    let is_kept = |number: usize| {
        let LaunchSpec { parameters, candidates, .. } = launch(number);
        denials.of_kind(&parameters, &candidates, at(1)).is_some()
    };
    assert_eq!((0..1000).filter(|number| is_kept(*number)).count(), 256);
    assert!(is_kept(999) && !is_kept(0));
}

/// Verifies A14.
#[test]
fn refusal_of_a_request_of_a_pod_does_not_affect_other_pods() {
    for class in [ErrorClass::Quota, ErrorClass::Capacity] {
        let mut engine = engine(capabilities::CLOUD);
        let (cell, _) = launched(&mut engine, "pod", at(1));
        let error = ProviderError {
            refusal: Some(LaunchRefusal::Offerings(vec![offering("a"), offering("b")])),
            is_of_request: true,
            ..ProviderError::without_cause(class, "the volume is too large")
        };
        let (launches, answer) = outcome(&engine.handle(Event::Launched(cell, Err(error)), at(2)));
        assert_eq!((launches.len(), answer.is_some()), (0, true), "{class:?}");
        assert_eq!(outcome(&engine.order(spec("other"), at(3)).1).0.len(), 1, "{class:?}");
    }
}

/// Verifies A15.
#[test]
fn quota_that_every_launch_needs_stops_all_launches_for_a_while() {
    let mut engine = engine(capabilities::CLOUD);
    let (cell, _) = launched(&mut engine, "pod", at(1));
    let error = ProviderError {
        refusal: Some(LaunchRefusal::All(vec![offering("a")])),
        ..ProviderError::without_cause(ErrorClass::Quota, "launch: AddressLimitExceeded")
    };
    let (launches, answer) = outcome(&engine.handle(Event::Launched(cell, Err(error)), at(2)));
    assert_eq!((launches.len(), answer.is_some()), (0, true));
    // Neither pods with other candidates nor the same pod make a call.
    let other = spec("other").of(Ok(vec![candidate("z")]));
    for (spec, seconds) in [(other.clone(), 3), (spec("third"), 100), (other.clone(), 181)] {
        let (launches, answer) = outcome(&engine.order(spec, at(seconds)).1);
        let expected = format!(
            "no cell is launched for {} s, because the last launch was over a quota: launch: \
             AddressLimitExceeded",
            183 - seconds
        );
        assert_eq!((launches.len(), answer), (0, Some(expected)));
    }
    assert_eq!(outcome(&engine.order(other, at(182)).1).0.len(), 1);
}

/// Verifies A13.
#[test]
fn refused_market_is_avoided_by_launches_of_other_offerings() {
    let mut engine = engine(capabilities::CLOUD);
    let (cell, _) = launched(&mut engine, "pod", at(1));
    let error = ProviderError {
        refusal: Some(LaunchRefusal::Market(Market::OnDemand)),
        ..ProviderError::without_cause(ErrorClass::Quota, "launch: InstanceLimitExceeded")
    };
    engine.handle(Event::Launched(cell, Err(error)), at(2));
    let refusals = engine.refusals(ONLY);
    let is_refused = |market, seconds| {
        let at = refusals.at(Duration::from_secs(seconds));
        placement::Refused::is_refused(&at, "never-tried", "another-zone", market)
    };
    assert!(is_refused(Market::OnDemand, 181) && !is_refused(Market::OnDemand, 183));
    assert!(!is_refused(Market::Spot, 3));
}

/// Verifies A13.
#[test]
fn full_quota_is_tried_again_only_with_smaller_types() {
    let named = |name: &str| Candidate {
        offering: Offering {
            instance_type: name.into(),
            zone: "a".into(),
            market: Market::OnDemand,
        },
        price: PRICE,
        accuracy: Accuracy::Exact,
    };
    let full = |launch: &[&str], types: &[&str]| ProviderError {
        refusal: Some(LaunchRefusal::Quota {
            quota: Arc::new(placement::RefusedQuota {
                market: Market::OnDemand,
                types: types.iter().map(|name| (*name).to_owned()).collect(),
            }),
            offerings: launch.iter().map(|name| named(name).offering).collect(),
        }),
        ..ProviderError::without_cause(ErrorClass::Quota, "launch: VcpuLimitExceeded")
    };
    let mut engine = engine(capabilities::CLOUD);
    let candidates = Ok(["large", "larger", "medium"].map(named).to_vec());
    let (launches, _) = outcome(&engine.order(spec("pod").of(candidates), at(1)).1);
    let error = full(&["large", "larger"], &["large", "larger", "largest"]);
    let effects = engine.handle(Event::Launched(launches[0].clone(), Err(error)), at(2));
    // The same pod goes on with types that may fit.
    let (launches, answer) = outcome(&effects);
    assert_eq!((launches.len(), answer), (1, None));
    let is_refused = |engine: &Engine, name: &str, market, seconds| {
        let refusals = engine.refusals(ONLY);
        let at = refusals.at(Duration::from_secs(seconds));
        let zone = "another-zone".into();
        let offering = Offering { instance_type: name.into(), zone, market };
        placement::Refused::is_over_quota(&at, &offering)
    };
    assert!(is_refused(&engine, "largest", Market::OnDemand, 181), "the type was never tried");
    assert!(!is_refused(&engine, "largest", Market::OnDemand, 183));
    assert!(!is_refused(&engine, "largest", Market::Spot, 3));
    assert!(!is_refused(&engine, "medium", Market::OnDemand, 3));
    // The refusal of a smaller type covers larger types.
    let error = full(&["medium"], &["large", "larger", "largest", "medium"]);
    engine.handle(Event::Launched(launches[0].clone(), Err(error)), at(100));
    for name in ["medium", "largest"] {
        assert!(is_refused(&engine, name, Market::OnDemand, 279), "{name}");
        assert!(!is_refused(&engine, name, Market::OnDemand, 280), "{name}");
    }
    let reason = engine.refusals(ONLY).reason(&named("largest").offering, at(101).boot);
    assert!(reason.unwrap().contains("VcpuLimitExceeded"));
}
