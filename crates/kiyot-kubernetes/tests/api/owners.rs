//! Node objects, which own the objects of their cells.

use std::{sync::Arc, time::Duration};

use kiyot_kubernetes::{Options, Periods, Publisher};
use kiyot_proto::admin::CellPhase::{CellBooting, CellBound};
use kiyot_testkit::{ApiServer, LIMIT, Recorded, Verb, log::CapturedLog, wait_for, wait_until};
use serde_json::{Value, json};

use crate::world::{
    Calls, Daemon, NODE, api, definition, name, options, publish, put_node, wait_for_cells,
};

/// Returns the requests for Node objects.
fn reads(api: &ApiServer) -> Vec<Recorded> {
    let is_read = |own: &Recorded| own.request.verb == Verb::Get && own.request.resource == "nodes";
    api.recorded().into_iter().filter(is_read).collect()
}

/// Returns the owners of a cell's object.
fn owners(api: &ApiServer, name: &str) -> Option<Value> {
    Some(api.objects("cells").get(name)?["metadata"]["ownerReferences"].clone())
}

/// Returns the list of owners with a Node object alone.
fn node_as_owner(api: &ApiServer, name: &str) -> Value {
    let uid = &api.objects("nodes")[name]["metadata"]["uid"];
    json!([{ "apiVersion": "v1", "kind": "Node", "name": name, "uid": uid }])
}

/// Verifies K11.
#[tokio::test]
async fn cells_of_a_dead_node_are_kept_until_its_node_object_is_deleted() {
    let api = api().await;
    put_node(&api, "worker-2");
    let node = |name: &str, number: usize| {
        let daemon = Daemon::new();
        daemon.set(number, CellBound);
        daemon.change(number, |shown| name.clone_into(&mut shown.cell.node));
        let options = Options { node: name.to_owned(), ..options(&api) };
        Publisher::start(options, daemon, Calls::new())
    };
    let (_living, dead) = (node(NODE, 1), node("worker-2", 2));
    wait_for_cells(&api, &[(1, "Bound"), (2, "Bound")]).await;
    assert_eq!(owners(&api, &name(1)), Some(node_as_owner(&api, NODE)));
    drop(dead);
    let lists = || {
        let is_list = |own: &&Recorded| own.request.verb == Verb::List;
        api.recorded().iter().filter(is_list).count()
    };
    let before = lists();
    wait_for("the living node lists its objects", || lists() > before + 2).await;
    wait_for_cells(&api, &[(1, "Bound"), (2, "Bound")]).await;
    api.delete("nodes", "worker-2");
    wait_for_cells(&api, &[(1, "Bound")]).await;
    assert!(reads(&api).len() <= lists() + 2, "a read for a list");
}

/// Verifies K11.
#[tokio::test]
async fn node_object_that_is_made_again_owns_the_cells_again() {
    let api = api().await;
    let daemon = Daemon::new();
    daemon.set(0, CellBooting);
    // Longer than the test runs: only a write finds that the object is absent.
    let periods = Periods { list: LIMIT * 2, ..options(&api).periods };
    let options = Options { periods, ..options(&api) };
    let _publisher = Publisher::start(options, Arc::clone(&daemon) as _, Calls::new());
    wait_for_cells(&api, &[(0, "Booting")]).await;
    let before = node_as_owner(&api, NODE);
    api.delete("nodes", NODE);
    assert!(api.objects("cells").is_empty());
    put_node(&api, NODE);
    daemon.set(0, CellBound);
    wait_for_cells(&api, &[(0, "Bound")]).await;
    let owner = owners(&api, &name(0));
    assert_eq!(owner, Some(node_as_owner(&api, NODE)));
    assert_ne!(owner, Some(before));
}

/// Verifies K11.
#[tokio::test]
async fn absent_node_object_is_logged_once_shows_no_cell_and_holds_up_no_event() {
    let log = CapturedLog::start();
    let logged = |text: &str| log.lines().iter().filter(|line| line.contains(text)).count();
    let not_shown = "cells are not shown in the Kubernetes API, pods";
    let api = ApiServer::start(&[definition()]).await;
    let daemon = Daemon::new();
    daemon.set(0, CellBound);
    // Without an object, a pause is at least 30 times the first pause.
    let pause = Duration::from_millis(5);
    let periods = Periods { first_pause: pause, ..options(&api).periods };
    let options = Options { periods, ..options(&api) };
    let _publisher = Publisher::start(options, Arc::clone(&daemon) as _, Calls::new());
    daemon.tell(0, "LaunchFailed", "no capacity");
    wait_until("the event is reported", LIMIT, async || {
        (api.objects("events").len() == 1).then_some(())
    })
    .await;
    wait_for("the Node object is read again", || reads(&api).len() > 3).await;
    for two in reads(&api).windows(2) {
        assert!(two[1].at.duration_since(two[0].at) >= pause * 30, "{two:?}");
    }
    assert!(api.recorded().iter().all(|own| own.request.resource != "cells"));
    assert_eq!((logged(not_shown), logged("again")), (1, 0), "{:?}", log.lines());
    assert_eq!(logged("object of the node \"worker-1\", which owns its cells"), 1);

    put_node(&api, NODE);
    wait_for_cells(&api, &[(0, "Bound")]).await;
    wait_for("the end of the failures is logged", || logged("again") == 1).await;
    assert_eq!(logged(not_shown), 1, "{:?}", log.lines());
}

/// Verifies K11.
#[tokio::test]
async fn object_without_its_owner_gets_it_again() {
    let api = api().await;
    let daemon = Daemon::new();
    daemon.set(0, CellBound);
    let _publisher = publish(&api, &daemon);
    wait_for_cells(&api, &[(0, "Bound")]).await;
    let mut without = api.objects("cells").remove(&name(0)).unwrap();
    without["metadata"].as_object_mut().unwrap().remove("ownerReferences");
    api.put("cells", without);
    wait_until("the object has its owner", LIMIT, async || {
        (owners(&api, &name(0))? == node_as_owner(&api, NODE)).then_some(())
    })
    .await;
}
