//! The sweep of deleted nodes' entries, with a played API server and played cells.

use std::{sync::Arc, time::Duration};

use kiyot_kubernetes::BudgetOptions;
use kiyot_testkit::{ApiFault, ApiServer, Verb, log::CapturedLog, wait_for};
use serde_json::{Value, json};
use tokio::time::sleep;

use crate::{
    budgets::{Holder, budgeted, change, keep, put_budget, shares, short_times, start, status},
    world::{Calls, NODE, budget_definition, put_node, with_node},
};

const DELETED: &str = "worker-9";
const HERE: &str = "region eu-west-1, vpc-0abc, cluster production";
/// A date in a month that is not over, and a date in a month that is.
const LATER: &str = "2999-12-30";
const EARLIER: &str = "2020-01-30";

/// Returns a node that finds other nodes' instances in [`HERE`].
fn looking(instances: Option<bool>) -> Arc<Holder> {
    let holder = Holder::with_order(1, 0);
    {
        let mut played = holder.played();
        (played.place, played.instances) = (Some(HERE.to_owned()), instances);
    }
    holder
}

/// Returns the entry of a node with a share of four dollars.
fn entry(node: &str, places: &[&str]) -> Value {
    json!({ "node": node, "hourlyMicros": 4_000_000, "serial": 3, "places": places })
}

fn spent(mut entry: Value, date: &str) -> Value {
    entry["spent"] = json!({ "date": date, "dayMicros": 1, "monthMicros": 2 });
    entry
}

fn without_share(mut entry: Value) -> Value {
    entry["hourlyMicros"] = json!(0);
    entry
}

/// Returns an API server with a budget of ten dollars and these entries.
async fn with_entries(entries: &[Value]) -> ApiServer {
    let api = with_node(budgeted("10").await);
    change(&api, |budget| budget["status"] = json!({ "shares": entries }));
    api
}

fn entries(api: &ApiServer) -> Vec<Value> {
    status(api, "shares").as_array().unwrap().clone()
}

/// Verifies K26.
#[tokio::test]
async fn share_of_a_deleted_node_is_given_back_and_its_cost_stays() {
    let log = CapturedLog::start();
    let deleted = spent(entry(DELETED, &[HERE]), LATER);
    let api = with_entries(std::slice::from_ref(&deleted)).await;
    let (holder, calls) = (looking(Some(false)), Calls::new());
    holder.order(8);
    let _keeper = keep(&api, NODE, &holder, &calls);
    wait_for("the rest is used", || {
        holder.retry();
        holder.cells() == 1
    })
    .await;
    let found = entries(&api);
    assert!(found.contains(&without_share(deleted)), "{found:?}");
    assert_eq!((status(&api, "swept"), status(&api, "left")), (json!(DELETED), json!("2.0000")));
    assert_eq!(holder.played().lists, vec![(DELETED.to_owned(), HERE.to_owned()); 2]);
    assert_eq!((calls.of("sweep", "swept"), calls.of("sweep", "removed")), (1, 0));
    let expected = "share of a deleted node is given back";
    let lines = log.lines();
    let lines: Vec<&String> = lines.iter().filter(|line| line.contains(expected)).collect();
    assert!(lines.len() == 1 && lines[0].contains("$4.0000"), "{lines:?}");
}

/// Verifies K26.
#[tokio::test]
async fn entry_of_a_deleted_node_is_removed_once_it_counts_nothing() {
    let over = without_share(spent(entry("worker-8", &[]), EARLIER));
    let api = with_entries(&[entry(DELETED, &[HERE]), over.clone()]).await;
    let (holder, calls) = (looking(Some(false)), Calls::new());
    let _keeper = keep(&api, NODE, &holder, &calls);
    let over_alone = std::slice::from_ref(&over);
    wait_for("nothing was spent", || entries(&api) == over_alone).await;
    // Only a third node's report shows that a month is over.
    sleep(Duration::from_millis(500)).await;
    assert_eq!(entries(&api), over_alone);
    put_node(&api, "worker-2");
    let third = spent(entry("worker-2", &[]), LATER);
    change(&api, |budget| budget["status"]["shares"] = json!([over.clone(), third]));
    wait_for("its month is over", || entries(&api) == [third.clone()]).await;
    assert_eq!((calls.of("sweep", "swept"), calls.of("sweep", "removed")), (1, 2));
}

/// Verifies K26.
#[tokio::test]
async fn entry_is_not_swept_while_its_node_or_an_instance_may_be_there() {
    let elsewhere = "region us-east-1, vpc-0def, cluster production";
    let of = |places: &[&str]| entry(DELETED, places);
    let mut without_places = of(&[]);
    without_places.as_object_mut().unwrap().remove("places");
    let here = || of(&[HERE]);
    let none = Some(false);
    for (name, entry, has_node, instances, looks) in [
        ("node is there", here(), true, none, true),
        ("instance is there", here(), false, Some(true), true),
        ("list fails", here(), false, None, true),
        ("another place", of(&[elsewhere]), false, none, false),
        ("another place too", of(&[HERE, elsewhere]), false, none, false),
        ("no place", of(&[]), false, none, false),
        ("entry of an earlier version", without_places, false, none, false),
    ] {
        let api = with_entries(std::slice::from_ref(&entry)).await;
        if has_node {
            put_node(&api, DELETED);
        }
        let (holder, calls) = (looking(instances), Calls::new());
        let _keeper = keep(&api, NODE, &holder, &calls);
        let lists = || holder.played().lists.len();
        wait_for(name, || calls.of("list cellbudgets", "ok") > 0).await;
        match (looks, has_node) {
            (true, true) => wait_for(name, || calls.of("get nodes", "ok") > 8).await,
            (true, false) => wait_for(name, || lists() > 1).await,
            (false, _) => {
                sleep(Duration::from_millis(400)).await;
                assert_eq!(calls.of("get nodes", "ok"), 0, "{name}: nothing is asked for");
            }
        }
        assert_eq!(entries(&api), [entry], "{name}");
        assert_eq!(calls.of("sweep", "failed") > 0, instances.is_none(), "{name}");
        assert!(looks && !has_node || lists() == 0, "{name}");
    }
}

/// Verifies K26.
#[tokio::test]
async fn list_that_lacks_an_instance_once_sweeps_nothing() {
    let deleted = entry(DELETED, &[HERE]);
    let api = with_entries(std::slice::from_ref(&deleted)).await;
    let (holder, calls) = (looking(Some(true)), Calls::new());
    holder.played().stale_lists = 1;
    let _keeper = keep(&api, NODE, &holder, &calls);
    wait_for("it is listed again", || holder.played().lists.len() > 3).await;
    assert_eq!((entries(&api), calls.of("sweep", "swept")), (vec![deleted], 0));
}

/// Verifies K26.
#[tokio::test]
async fn node_without_an_object_of_its_own_or_that_reads_no_others_sweeps_nothing() {
    let log = CapturedLog::start();
    for is_denied in [false, true] {
        let entry = entry(DELETED, &[HERE]);
        let api = with_entries(std::slice::from_ref(&entry)).await;
        if is_denied {
            api.fail(Some(Verb::Get), "nodes", usize::MAX, ApiFault::Status(403, None));
        } else {
            api.delete("nodes", NODE);
        }
        let (holder, calls) = (looking(Some(false)), Calls::new());
        let _keeper = keep(&api, NODE, &holder, &calls);
        let outcome = if is_denied { "denied" } else { "not_found" };
        wait_for(outcome, || calls.of("get nodes", outcome) > 8).await;
        assert_eq!((entries(&api), holder.played().lists.len()), (vec![entry], 0));
    }
    let is_warning = |line: &&String| line.contains("shares of deleted nodes are not swept");
    assert_eq!(log.lines().iter().filter(is_warning).count(), 1, "once");
}

/// Verifies K26.
#[tokio::test]
async fn node_whose_daemon_writes_is_not_swept_without_its_object() {
    let api = with_entries(&[entry(DELETED, &[HERE])]).await;
    let (holder, calls) = (looking(Some(false)), Calls::new());
    let deleted_for = Duration::from_hours(1);
    let options = BudgetOptions { deleted_for, ..short_times(&api, NODE) };
    let _keeper = start(options, &holder, &calls);
    // Each write makes the next look the first one.
    for serial in 4..12 {
        let looks = calls.of("get nodes", "not_found");
        change(&api, |budget| budget["status"]["shares"][0]["serial"] = json!(serial));
        wait_for("it is looked at again", || calls.of("get nodes", "not_found") > looks).await;
    }
    assert_eq!((shares(&api).len(), holder.played().lists.len()), (1, 0));
}

/// Verifies K26.
#[tokio::test]
async fn node_that_comes_back_after_a_sweep_asks_again_for_what_runs() {
    let api = with_entries(&[]).await;
    let (back, holder) = (looking(Some(false)), looking(Some(false)));
    back.order(4);
    let keeper = keep(&api, DELETED, &back, &Calls::new());
    wait_for("it has a share and places", || {
        entries(&api).first().is_some_and(|entry| entry["places"] == json!([HERE]))
    })
    .await;
    wait_for("it is launched", || back.cells() == 1).await;
    drop(keeper);
    let _keeper = keep(&api, NODE, &holder, &Calls::new());
    wait_for("it is swept", || shares(&api).is_empty()).await;
    holder.order(8);
    wait_for("another node takes what it had", || holder.cells() == 1).await;
    put_node(&api, DELETED);
    let _back = keep(&api, DELETED, &back, &Calls::new());
    // The running cell goes on, and as much as possible is reserved for it.
    wait_for("the rest is reserved", || back.share() == Some(2_000_000)).await;
    back.order(1);
    wait_for("nothing more is launched", || back.refused() == 1).await;
    assert_eq!((back.cells(), status(&api, "left")), (1, json!("0.0000")));
    holder.end(0);
    wait_for("what runs is reserved", || back.share() == Some(4_000_000)).await;
}

/// Verifies K26.
#[tokio::test]
async fn nodes_that_race_sweep_an_entry_once() {
    let deleted = spent(entry(DELETED, &[HERE]), LATER);
    let api = with_entries(std::slice::from_ref(&deleted)).await;
    put_node(&api, "worker-2");
    api.fail(Some(Verb::Patch), "cellbudgets", 1, ApiFault::Status(409, None));
    let nodes = [NODE, "worker-2"].map(|node| (node, looking(Some(false)), Calls::new()));
    let _keepers = nodes.each_ref().map(|(node, holder, calls)| keep(&api, node, holder, calls));
    wait_for("it is swept", || entries(&api) == [without_share(deleted.clone())]).await;
    sleep(Duration::from_millis(500)).await;
    let count =
        |outcome| nodes.iter().map(|(_, _, calls)| calls.of("sweep", outcome)).sum::<usize>();
    assert_eq!((count("swept"), count("failed")), (1, 0));
    let conflicts =
        |(_, _, calls): &(_, _, Arc<Calls>)| calls.of("patch cellbudgets/status", "conflict");
    assert!(nodes.iter().map(conflicts).sum::<usize>() > 0);
}

/// Verifies K26.
#[tokio::test]
async fn places_that_the_api_server_does_not_know_are_written_once() {
    let mut definition = budget_definition();
    let schema = &mut definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
    let entry = &mut schema["properties"]["status"]["properties"]["shares"]["items"]["properties"];
    entry.as_object_mut().unwrap().remove("places").unwrap();
    let api = ApiServer::start(&[definition]).await;
    put_budget(&api, "web", "10", "u");
    let (holder, calls) = (looking(Some(false)), Calls::new());
    holder.order(1);
    let _keeper = keep(&api, NODE, &holder, &calls);
    wait_for("it is launched", || holder.cells() == 1).await;
    sleep(Duration::from_millis(700)).await;
    assert!(calls.of("patch cellbudgets/status", "ok") <= 2, "{calls:?}");
    assert_eq!(entries(&api)[0]["places"], Value::Null);
}
