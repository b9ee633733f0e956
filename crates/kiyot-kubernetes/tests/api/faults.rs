//! Failures of the API server.

use std::{fs, sync::Arc, time::Duration};

use kiyot_kubernetes::{Options, Periods, Publisher};
use kiyot_proto::admin::CellPhase::{CellBooting, CellBound, CellTerminating};
use kiyot_testkit::{
    ApiFault, ApiServer, LIMIT, Recorded, Verb, log::CapturedLog, wait_for, wait_until,
};
use serde_json::json;

use crate::world::{
    Calls, Daemon, NODE, api, definition, name, options, publish, wait_for_cells, with_node, writes,
};

/// Waits until the API server has received two further lists.
async fn wait_for_lists(api: &ApiServer) {
    let lists = || {
        let is_list =
            |own: &&Recorded| own.request.verb == Verb::List && own.request.resource == "cells";
        api.recorded().iter().filter(is_list).count()
    };
    let before = lists();
    wait_for("the objects are listed again", || lists() >= before + 2).await;
}

/// Verifies K2, K4, K5.
#[tokio::test]
async fn changes_are_written_within_the_pace_and_nothing_is_written_at_rest() {
    let api = api().await;
    let daemon = Daemon::new();
    let _publisher = publish(&api, &daemon);
    for number in 0..6 {
        daemon.set(number, CellBooting);
    }
    let booting: Vec<_> = (0..6).map(|number| (number, "Booting")).collect();
    wait_for_cells(&api, &booting).await;
    let recorded = api.recorded();
    let writes_before = writes(&recorded);
    assert!(
        writes_before.windows(6).all(|six| six[5].at - six[0].at >= Duration::from_millis(990)),
        "{writes_before:?}"
    );
    wait_for_lists(&api).await;
    // Only the cost has changed.
    daemon.change(3, |shown| shown.cell.cost_micros = 77);
    wait_for_lists(&api).await;
    let recorded = api.recorded();
    let written = writes(&recorded);
    assert_eq!(written.len(), writes_before.len(), "{written:?}");
    daemon.set(0, CellBound);
    (1..6).for_each(|number| daemon.end(number));
    wait_for_cells(&api, &[(0, "Bound")]).await;
}

/// Verifies K6.
#[tokio::test]
async fn publisher_waits_while_the_api_server_is_down_slow_or_denies() {
    let mut api = api().await;
    let daemon = Daemon::new();
    daemon.set(0, CellBooting);
    api.stop().await;
    let _publisher = publish(&api, &daemon);
    api.restart().await;
    wait_for_cells(&api, &[(0, "Booting")]).await;
    for (fault, phase, word) in [
        (ApiFault::Closed, CellBound, "Bound"),
        (ApiFault::Status(500, None), CellBooting, "Booting"),
        (ApiFault::Status(503, None), CellBound, "Bound"),
        (ApiFault::Denied, CellBooting, "Booting"),
        (ApiFault::Status(409, None), CellBound, "Bound"),
        (ApiFault::Slow(Duration::from_millis(300)), CellBooting, "Booting"),
    ] {
        api.fail(Some(Verb::Patch), "cells", 1, fault.clone());
        daemon.set(0, phase);
        wait_for_cells(&api, &[(0, word)]).await;
        api.heal();
    }
}

/// Verifies K6.
#[tokio::test]
async fn writes_that_fail_while_lists_succeed_are_logged_once_and_repeated_after_growing_pauses() {
    let log = CapturedLog::start();
    let logged = |text: &str| log.lines().iter().filter(|line| line.contains(text)).count();
    let not_shown = "cells are not shown in the Kubernetes API, pods";
    let (api, daemon) = (api().await, Daemon::new());
    let patches = || {
        let is_patch =
            |own: &Recorded| own.request.verb == Verb::Patch && own.request.resource == "cells";
        api.recorded().into_iter().filter(is_patch).collect::<Vec<_>>()
    };
    let pause = Duration::from_millis(150);
    let periods = Periods { first_pause: pause, ..options(&api).periods };
    let options = Options { periods, ..options(&api) };
    api.fail(Some(Verb::Patch), "cells", usize::MAX, ApiFault::Status(500, None));
    daemon.set(0, CellBooting);
    let _publisher = Publisher::start(options, Arc::clone(&daemon) as _, Calls::new());
    let failed = wait_until("the write is repeated", LIMIT, async || {
        let patches = patches();
        (patches.len() > 4).then_some(patches)
    })
    .await;
    for (number, two) in failed.windows(2).take(4).enumerate() {
        let between = two[1].at.duration_since(two[0].at);
        assert!(between >= pause * (1 << number), "{number}: {between:?}");
    }
    assert_eq!((logged(not_shown), logged("again")), (1, 0), "{:?}", log.lines());
    let is_listed = |own: &Recorded| {
        own.request.verb == Verb::List && own.request.resource == "cells" && own.at > failed[1].at
    };
    assert!(api.recorded().iter().any(is_listed), "lists succeed meanwhile");

    api.heal();
    wait_for_cells(&api, &[(0, "Booting")]).await;
    wait_for("the end of the failures is logged", || logged("again") == 1).await;
    assert_eq!(logged(not_shown), 1, "{:?}", log.lines());
}

/// Starts a publisher with pauses longer than the test runs.
fn publish_with_long_pauses(api: &ApiServer, daemon: &Arc<Daemon>) -> Publisher {
    let periods = Periods { first_pause: LIMIT, ..options(api).periods };
    let options = Options { periods, ..options(api) };
    Publisher::start(options, Arc::clone(daemon) as _, Calls::new())
}

/// Verifies K6.
#[tokio::test]
async fn denied_object_holds_up_no_other_and_is_logged_once() {
    let log = CapturedLog::start();
    let logged = |text: &str| log.lines().iter().filter(|line| line.contains(text)).count();
    let not_shown = "cells are not shown in the Kubernetes API, pods";
    let (api, daemon) = (api().await, Daemon::new());
    let _publisher = publish_with_long_pauses(&api, &daemon);
    api.fail(Some(Verb::Patch), "cells", 1, ApiFault::Denied);
    daemon.set(0, CellBound);
    let is_denied = || api.recorded().iter().any(|own| own.status == 403);
    wait_for("the object is denied", is_denied).await;
    daemon.set(1, CellBound);
    wait_for_cells(&api, &[(1, "Bound")]).await;
    wait_for_lists(&api).await;
    assert_eq!((logged(not_shown), logged("again")), (1, 0), "{:?}", log.lines());

    daemon.end(0);
    wait_for("the end of the failures is logged", || logged("again") == 1).await;
    assert_eq!(logged(not_shown), 1, "{:?}", log.lines());
}

/// Verifies K6.
#[tokio::test]
async fn denial_of_all_objects_ends_their_writes_after_a_few_until_the_pause_is_over() {
    let log = CapturedLog::start();
    let logged = |text: &str| log.lines().iter().filter(|line| line.contains(text)).count();
    let not_shown = "cells are not shown in the Kubernetes API, pods";
    let (api, daemon) = (api().await, Daemon::new());
    let _publisher = publish_with_long_pauses(&api, &daemon);
    api.fail(Some(Verb::Patch), "cells", usize::MAX, ApiFault::Denied);
    (0..20).for_each(|number| daemon.set(number, CellBound));
    let denied = || api.recorded().iter().filter(|own| own.status == 403).count();
    // Four objects wait alone. After the fifth denial, all others wait too.
    wait_for("objects are denied", || denied() >= 5).await;
    // Events and cells take turns: an object would be written between two events.
    for message in ["first", "second", "third"] {
        daemon.tell(0, "LaunchFailed", message);
    }
    wait_until("events are reported", LIMIT, async || {
        (api.objects("events").len() == 3).then_some(())
    })
    .await;
    assert_eq!(denied(), 5);
    assert_eq!((logged(not_shown), logged("again")), (1, 0), "{:?}", log.lines());
}

/// Verifies K6.
#[tokio::test]
async fn rotated_token_is_read_again_after_a_denial() {
    let api = api().await;
    let token = api.directory().join("token");
    let mut kubeconfig: serde_json::Value =
        serde_json::from_slice(&fs::read(api.kubeconfig()).unwrap()).unwrap();
    kubeconfig["users"][0]["user"] = json!({ "tokenFile": token });
    fs::write(api.kubeconfig(), kubeconfig.to_string()).unwrap();
    fs::write(&token, "first-token").unwrap();
    api.accept_only("first-token");
    let daemon = Daemon::new();
    daemon.set(0, CellBooting);
    let _publisher = publish(&api, &daemon);
    wait_for_cells(&api, &[(0, "Booting")]).await;
    api.accept_only("second-token");
    daemon.set(0, CellBound);
    let is_denied = || api.recorded().iter().any(|own| own.status == 401);
    wait_for("the first token is denied", is_denied).await;
    fs::write(&token, "second-token").unwrap();
    wait_for_cells(&api, &[(0, "Bound")]).await;
}

/// Verifies K6.
#[tokio::test]
async fn unanswered_call_is_given_up_and_repeated() {
    let api = api().await;
    let (daemon, calls) = (Daemon::new(), Calls::new());
    daemon.set(0, CellBooting);
    let periods = Periods { call: Duration::from_secs(1), ..options(&api).periods };
    let options = Options { periods, ..options(&api) };
    let _publisher = Publisher::start(options, Arc::clone(&daemon) as _, Arc::clone(&calls) as _);
    wait_for_cells(&api, &[(0, "Booting")]).await;
    let before = calls.of("patch cells/status", "timed_out");
    api.fail(Some(Verb::Patch), "cells", 1, ApiFault::Slow(LIMIT * 10));
    daemon.set(0, CellBound);
    wait_for_cells(&api, &[(0, "Bound")]).await;
    let after = ["patch cells", "patch cells/status"].map(|call| calls.of(call, "timed_out"));
    assert!(after.iter().sum::<usize>() > before, "{calls:?}");
}

/// Verifies K6.
#[tokio::test]
async fn throttled_write_waits_as_long_as_the_api_server_asks() {
    let api = api().await;
    let daemon = Daemon::new();
    api.fail(Some(Verb::Patch), "cells", 1, ApiFault::Status(429, Some(2)));
    daemon.set(0, CellBooting);
    let _publisher = publish(&api, &daemon);
    wait_for_cells(&api, &[(0, "Booting")]).await;
    let recorded = api.recorded();
    let patches = recorded
        .iter()
        .filter(|own| own.request.verb == Verb::Patch && own.request.resource == "cells");
    let patches: Vec<_> = patches.collect();
    assert_eq!(patches[0].status, 429);
    assert!(patches[1].at - patches[0].at >= Duration::from_secs(2), "{patches:?}");
}

/// Verifies K2, K6.
#[tokio::test]
async fn own_stale_objects_are_removed_at_the_start_and_others_are_kept() {
    let api = api().await;
    let object = |name: &str, node: &str| {
        json!({
            "apiVersion": "kiyot.elotl.co/v1",
            "kind": "Cell",
            "metadata": { "name": name, "labels": { "kiyot.elotl.co/node": node } },
            "spec": { "nodeName": node, "backend": "milpa" },
        })
    };
    // More objects than a part of a list has.
    for number in 0..255 {
        api.put("cells", object(&format!("other-{number:03}"), "worker-2"));
        api.put("cells", object(&format!("same-{number:03}"), "worker-1"));
    }
    // The position of the second part expires once.
    api.fail(Some(Verb::List), "cells", 1, ApiFault::Passed);
    api.fail(Some(Verb::List), "cells", 1, ApiFault::Status(410, None));
    for number in 4..255 {
        api.delete("cells", &format!("same-{number:03}"));
    }
    let daemon = Daemon::new();
    daemon.set(0, CellBound);
    let _publisher = publish(&api, &daemon);
    wait_until("only own objects are removed", LIMIT, async || {
        let cells = api.objects("cells");
        let count = |prefix: &str| cells.keys().filter(|name| name.starts_with(prefix)).count();
        ((count("same"), count("other"), count("cell")) == (0, 255, 1)).then_some(())
    })
    .await;
}

/// Verifies K2.
#[tokio::test]
async fn restarted_daemon_shows_a_lost_cell_without_another_write() {
    let api = api().await;
    let daemon = Daemon::new();
    daemon.set(0, CellTerminating);
    daemon.change(0, |shown| shown.cell.lost_unix_nanos = 1_795_662_000_000_000_000);
    let lost = || {
        let mut cell = api.objects("cells").remove(&name(0))?;
        let conditions = cell["status"]["conditions"].as_array_mut()?;
        conditions.iter().find(|own| own["type"] == "Lost").cloned()
    };
    let publisher = publish(&api, &daemon);
    wait_for_cells(&api, &[(0, "Terminating")]).await;
    let before = lost().unwrap();
    assert_eq!(before["status"], "True", "{before}");
    assert_eq!(before["lastTransitionTime"], "2026-11-26T03:00:00Z");
    drop(publisher);
    let written = writes(&api.recorded()).len();
    let _restarted = publish(&api, &daemon);
    wait_for_lists(&api).await;
    assert_eq!(lost(), Some(before));
    let recorded = api.recorded();
    let since = &writes(&recorded)[written..];
    assert!(since.is_empty(), "{since:?}");
}

/// Verifies K2.
#[tokio::test]
async fn object_that_another_client_deletes_or_changes_is_restored() {
    let api = api().await;
    let daemon = Daemon::new();
    daemon.set(0, CellBound);
    let _publisher = publish(&api, &daemon);
    wait_for_cells(&api, &[(0, "Bound")]).await;
    api.delete("cells", &name(0));
    wait_until("the object exists again", LIMIT, async || {
        (api.objects("cells").get(&name(0))?["status"]["phase"] == "Bound").then_some(())
    })
    .await;
    let mut changed = api.objects("cells").remove(&name(0)).unwrap();
    changed["status"]["phase"] = json!("Terminating");
    changed["metadata"]["labels"]["app"] = json!("other");
    changed["metadata"]["labels"]["added"] = json!("kept");
    api.put("cells", changed);
    wait_until("fields are set again", LIMIT, async || {
        let cell = api.objects("cells").remove(&name(0))?;
        let labels = &cell["metadata"]["labels"];
        (cell["status"]["phase"] == "Bound" && labels["app"] == "web" && labels["added"] == "kept")
            .then_some(())
    })
    .await;
}

/// Verifies K4, K5.
#[tokio::test]
async fn definition_of_an_older_version_shows_what_it_has_without_repeated_writes() {
    let mut older = definition();
    let schema = &mut older["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
    let status = schema["properties"]["status"]["properties"].as_object_mut().unwrap();
    status.retain(|name, _| ["phase", "podName"].contains(&name.as_str()));
    let api = with_node(ApiServer::start(&[older]).await);
    let daemon = Daemon::new();
    daemon.set(0, CellBound);
    let _publisher = publish(&api, &daemon);
    wait_for_cells(&api, &[(0, "Bound")]).await;
    let before = writes(&api.recorded()).len();
    wait_for_lists(&api).await;
    assert_eq!(writes(&api.recorded()).len(), before);
}

/// Verifies K5, K6.
#[tokio::test]
async fn definition_without_the_status_is_logged_once_and_tried_after_growing_pauses() {
    let log = CapturedLog::start();
    let logged = |text: &str| log.lines().iter().filter(|line| line.contains(text)).count();
    let not_shown = "cells are not shown in the Kubernetes API, pods";
    let mut lacking = definition();
    lacking["spec"]["versions"][0].as_object_mut().unwrap().remove("subresources");
    let (api, daemon) = (with_node(ApiServer::start(&[lacking]).await), Daemon::new());
    // Without the kind, a pause is at least 30 times the first pause.
    let pause = Duration::from_millis(10);
    let periods = Periods { first_pause: pause, ..options(&api).periods };
    let options = Options { periods, ..options(&api) };
    daemon.set(0, CellBooting);
    daemon.set(1, CellBooting);
    let _publisher = Publisher::start(options, Arc::clone(&daemon) as _, Calls::new());
    wait_for("the objects are listed after a pause", || logged(not_shown) > 0).await;
    let before = api.recorded().len();
    wait_for_lists(&api).await;
    wait_for_lists(&api).await;
    let since = &api.recorded()[before..];
    let lists = since.iter().filter(|own| own.request.verb == Verb::List).count();
    // A write after each pause, and the first write of the second object.
    assert!(writes(since).len() <= lists + 4, "{since:?}");
    assert_eq!((logged(not_shown), logged("again")), (1, 0), "{:?}", log.lines());
    api.define(&definition());
    wait_for_cells(&api, &[(0, "Booting"), (1, "Booting")]).await;
    wait_for("the end of the failures is logged", || logged("again") == 1).await;
}

/// Verifies K6.
#[tokio::test]
async fn publisher_waits_for_the_definition_and_the_kubeconfig() {
    let api = with_node(ApiServer::start(&[]).await);
    let daemon = Daemon::new();
    daemon.set(0, CellBound);
    let kubeconfig = std::fs::read(api.kubeconfig()).unwrap();
    std::fs::remove_file(api.kubeconfig()).unwrap();
    let _publisher = publish(&api, &daemon);
    std::fs::write(api.kubeconfig(), kubeconfig).unwrap();
    wait_for("a call finds the kind absent", || {
        api.recorded().iter().any(|own| own.request.resource == "cells" && own.status == 404)
    })
    .await;
    api.define(&definition());
    wait_for_cells(&api, &[(0, "Bound")]).await;
}

/// Verifies K6.
#[tokio::test]
async fn refused_object_does_not_hold_up_others() {
    let api = api().await;
    let daemon = Daemon::new();
    daemon.set(0, CellBound);
    daemon.change(0, |shown| shown.cell.pod_namespace = "x".repeat(64));
    daemon.set(1, CellBound);
    let _publisher = publish(&api, &daemon);
    wait_for_cells(&api, &[(0, ""), (1, "Bound")]).await;
    let before = writes(&api.recorded()).len();
    wait_for_lists(&api).await;
    let recorded = api.recorded();
    let again = &writes(&recorded)[before..];
    assert!(again.len() <= 1, "{again:?}");
    daemon.set(0, CellBooting);
    wait_for_cells(&api, &[(0, "Booting"), (1, "Bound")]).await;
}

/// Verifies K6.
#[tokio::test]
async fn kubeconfig_with_a_proxy_is_refused_without_showing_it() {
    let api = ApiServer::start(&[]).await;
    let file = fs::read(api.kubeconfig()).unwrap();
    let mut kubeconfig: serde_json::Value = serde_json::from_slice(&file).unwrap();
    kubeconfig["clusters"][0]["cluster"]["proxy-url"] = json!("http://user:hush@proxy:3128");
    fs::write(api.kubeconfig(), kubeconfig.to_string()).unwrap();
    let made = kiyot_kubernetes::Client::new(&options(&api).access, Calls::new()).await;
    let error = made.unwrap_err().to_string();
    assert!(error.contains("proxy-url") && !error.contains("hush"), "{error}");
}

/// Verifies K2.
#[tokio::test]
async fn api_server_is_reached_over_tls_by_the_authority_of_the_kubeconfig() {
    let api = with_node(ApiServer::start_tls(&[definition()]).await);
    let daemon = Daemon::new();
    daemon.set(0, CellBound);
    let publisher = publish(&api, &daemon);
    wait_for_cells(&api, &[(0, "Bound")]).await;
    drop(publisher);
    // The server of another authority is not trusted.
    let foreign = ApiServer::start_tls(&[definition()]).await;
    let file = std::fs::read_to_string(foreign.kubeconfig()).unwrap();
    let directory = |api: &ApiServer| api.directory().display().to_string();
    let crossed = file.replace(&directory(&foreign), &directory(&api));
    std::fs::write(foreign.kubeconfig(), crossed).unwrap();
    let client =
        kiyot_kubernetes::Client::new(&options(&foreign).access, Calls::new()).await.unwrap();
    let failure = client.call(&kiyot_kubernetes::call::Call::list_cells(NODE, None)).await;
    let failure = failure.unwrap_err().to_string();
    assert!(failure.contains("unreachable"), "{failure}");
    assert!(foreign.recorded().is_empty());
}
