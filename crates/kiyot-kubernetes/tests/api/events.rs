//! Events of pods.

use std::{sync::Arc, time::Duration};

use kiyot_kubernetes::{Options, Periods, Publisher};
use kiyot_proto::admin::CellPhase::CellBound;
use kiyot_testkit::{ApiFault, LIMIT, Verb, log::CapturedLog, wait_for, wait_until};
use serde_json::json;

use crate::world::{Calls, Daemon, api, name, options, publish, wait_for_cells};

/// Verifies K8.
#[tokio::test]
async fn events_of_a_pod_are_reported_and_counted() {
    let api = api().await;
    let daemon = Daemon::new();
    let _publisher = publish(&api, &daemon);
    daemon.set(0, CellBound);
    wait_for_cells(&api, &[(0, "Bound")]).await;
    daemon.tell(0, "Launched", "instance i-1");
    for _ in 0..3 {
        daemon.tell(0, "LaunchFailed", "no capacity");
    }
    let reported = wait_until("events are reported and counted", LIMIT, async || {
        let events = api.objects("events");
        let is_counted = events.values().any(|event| event["count"] == 3);
        (events.len() == 3 && is_counted).then_some(events)
    })
    .await;
    for event in reported.values() {
        assert_eq!(event["involvedObject"]["uid"], "uid-0");
        assert_eq!(event["involvedObject"]["name"], "web-0");
        assert_eq!(event["metadata"]["namespace"], "default");
    }
    let mut reasons: Vec<_> =
        reported.values().map(|event| event["reason"].as_str().unwrap()).collect();
    reasons.sort_unstable();
    assert_eq!(reasons, ["CellLaunched", "LaunchRefused", "OfferingChosen"]);
    // The API server removes events; the next equal event is a new object.
    reported.keys().for_each(|key| api.delete("events", key));
    daemon.tell(0, "LaunchFailed", "no capacity");
    wait_until("the event is reported anew", LIMIT, async || {
        let events = api.objects("events");
        events.values().any(|event| event["reason"] == json!("LaunchRefused")).then_some(())
    })
    .await;
    assert!(api.objects("cells").contains_key(&name(0)));
}

/// Verifies K6, K8.
#[tokio::test]
async fn events_that_a_namespace_denies_are_dropped_and_hold_up_no_others() {
    let log = CapturedLog::start();
    let logged = |text: &str| log.lines().iter().filter(|line| line.contains(text)).count();
    let not_reported = "events of pods are not reported, pods";
    let api = api().await;
    let (daemon, calls) = (Daemon::new(), Calls::new());
    let counter = Arc::clone(&calls) as _;
    let _publisher = Publisher::start(options(&api), Arc::clone(&daemon) as _, counter);
    api.fail_in("quota", "events", ApiFault::Denied);
    daemon.set(0, CellBound);
    daemon.set(1, CellBound);
    daemon.change(1, |shown| "quota".clone_into(&mut shown.cell.pod_namespace));
    wait_for_cells(&api, &[(0, "Bound"), (1, "Bound")]).await;
    for message in ["first", "second", "third"] {
        daemon.tell(1, "LaunchFailed", message);
        daemon.tell(0, "LaunchFailed", message);
    }
    let reported = wait_until("the events of the other pod are reported", LIMIT, async || {
        let events = api.objects("events");
        (events.len() == 3).then_some(events)
    })
    .await;
    assert!(reported.keys().all(|key| key.starts_with("default/")), "{reported:?}");
    wait_for("the denied events are dropped", || calls.of("create events", "dropped") == 3).await;
    assert_eq!((logged(not_reported), logged("again")), (1, 0), "{:?}", log.lines());

    api.heal();
    daemon.tell(1, "LaunchFailed", "fourth");
    wait_for("the end of the failures is logged", || logged("again") == 1).await;
    assert_eq!(api.objects("events").keys().filter(|key| key.starts_with("quota/")).count(), 1);
    assert_eq!(logged(not_reported), 1, "{:?}", log.lines());
}

/// Verifies K8.
#[tokio::test]
async fn event_whose_write_always_fails_is_dropped_after_its_last_try() {
    let api = api().await;
    let (daemon, calls) = (Daemon::new(), Calls::new());
    let counter = Arc::clone(&calls) as _;
    let periods = Periods { first_pause: Duration::from_millis(1), ..options(&api).periods };
    let options = Options { periods, ..options(&api) };
    let _publisher = Publisher::start(options, Arc::clone(&daemon) as _, counter);
    daemon.set(0, CellBound);
    wait_for_cells(&api, &[(0, "Bound")]).await;
    api.fail(Some(Verb::Create), "events", 12, ApiFault::Status(500, None));
    daemon.tell(0, "LaunchFailed", "first");
    daemon.tell(0, "LaunchFailed", "second");
    let reported = wait_until("the next event is reported", LIMIT, async || {
        let events = api.objects("events");
        (!events.is_empty()).then_some(events)
    })
    .await;
    let counts = ["server_error", "dropped"].map(|outcome| calls.of("create events", outcome));
    assert_eq!((reported.len(), counts), (1, [12, 1]));
    let message = reported.values().next().unwrap()["message"].as_str().unwrap();
    assert!(message.ends_with("second"), "{message}");
}
