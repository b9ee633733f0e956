//! The keeper of shares with a played API server and played cells.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use kiyot_kubernetes::{
    BudgetKeeper, BudgetOptions, ShareHolder,
    budgets::{Amounts, OrderWish, Places, RecordedShare, Wish},
};
use kiyot_testkit::{ApiFault, ApiServer, Verb, log::CapturedLog, wait_for};
use kiyot_values::{
    budget_key::BudgetKey,
    price::Cost,
    spending::{Spending, SpendingLimits},
};
use serde_json::{Value, json};
use tokio::sync::Notify;

use crate::world::{Calls, NODE, budget_definition, options, writes};

/// Makes a budget of a namespace, without shares.
pub(crate) fn put_budget(api: &ApiServer, namespace: &str, dollars: &str, uid: &str) {
    let object = json!({
        "apiVersion": "kiyot.elotl.co/v1",
        "kind": "CellBudget",
        "metadata": { "namespace": namespace, "name": "cells", "uid": uid },
        "spec": { "dollarsPerHour": dollars },
    });
    api.put("cellbudgets", object);
}

fn key() -> BudgetKey {
    BudgetKey { namespace: "web".to_owned(), name: "cells".to_owned() }
}

#[derive(Debug, Default)]
pub(crate) struct Played {
    /// The prices of the cells of namespace web, in dollars.
    cells: Vec<u64>,
    orders: Vec<u64>,
    refused: Vec<u64>,
    /// The share of each known budget, in millionths of a dollar.
    shares: BTreeMap<String, u64>,
    disk: BTreeMap<String, RecordedShare>,
    pub(crate) spent: Spending,
    shown: Amounts,
    are_known: bool,
    /// The place in which the node looks.
    pub(crate) place: Option<String>,
    /// The lists of other nodes' instances, and whether they show some.
    pub(crate) lists: Vec<(String, String)>,
    pub(crate) instances: Option<bool>,
    /// The number of lists that show no instances although some exist.
    pub(crate) stale_lists: usize,
}

/// Played cells of a node.
#[derive(Debug, Default)]
pub(crate) struct Holder {
    played: Mutex<Played>,
    asked: Notify,
    has_strays: AtomicBool,
}

impl Holder {
    /// Returns a node with orders of namespace web at this price, in dollars.
    pub(crate) fn with_order(price: u64, number: usize) -> Arc<Self> {
        let holder = Self::default();
        holder.played().orders = vec![price; number];
        Arc::new(holder)
    }

    pub(crate) fn played(&self) -> MutexGuard<'_, Played> {
        self.played.lock().unwrap()
    }

    pub(crate) fn order(&self, price: u64) {
        self.played().orders.push(price);
        self.launch();
        self.asked.notify_one();
    }

    /// Launches the orders that fit the shares.
    fn launch(&self) {
        let mut played = self.played();
        let Played { cells, orders, shares, are_known, .. } = &mut *played;
        let share = shares.get(&key().to_string()).copied();
        let most = share.or(are_known.then_some(u64::MAX)).unwrap_or(0);
        orders.retain(|price| {
            let fits = (cells.iter().sum::<u64>() + price).saturating_mul(1_000_000) <= most;
            if fits {
                cells.push(*price);
            }
            !fits
        });
    }

    /// Repeats the refused orders, as kubelets do.
    pub(crate) fn retry(&self) {
        let refused = std::mem::take(&mut self.played().refused);
        refused.into_iter().for_each(|price| self.order(price));
    }

    pub(crate) fn end(&self, number: usize) {
        self.played().cells.truncate(number);
    }

    pub(crate) fn cells(&self) -> usize {
        self.played().cells.len()
    }

    pub(crate) fn refused(&self) -> usize {
        self.played().refused.len()
    }

    pub(crate) fn share(&self) -> Option<u64> {
        self.played().shares.get(&key().to_string()).copied()
    }
}

#[async_trait]
impl ShareHolder for Holder {
    async fn recorded(&self) -> Result<Vec<RecordedShare>, String> {
        Ok(self.played().disk.values().cloned().collect())
    }

    async fn record(&self, share: RecordedShare) -> Result<(), String> {
        let disk = &mut self.played().disk;
        let name = share.key.to_string();
        if share.hourly_micros == 0 {
            disk.remove(&name);
        } else {
            disk.insert(name, share);
        }
        Ok(())
    }

    async fn asked(&self) {
        self.asked.notified().await;
    }

    fn wishes(&self) -> BTreeMap<String, Wish> {
        let played = self.played();
        let order = |(price, number): (&u64, usize)| OrderWish {
            id: number.to_string(),
            cheapest: price * 1_000_000,
            dearest: price * 1_000_000,
        };
        let orders = played.orders.iter().zip(0..).map(order).collect();
        let held = played.cells.iter().sum::<u64>() * 1_000_000;
        [("web".to_owned(), Wish { held, spent: played.spent, orders })].into()
    }

    fn places(&self) -> Option<Places> {
        let played = self.played();
        let places = played.place.iter().cloned();
        Some(Places { looks_in: places.collect(), elsewhere: Vec::new() })
    }

    async fn has_instances_of(&self, node: &str, place: &str) -> Result<bool, String> {
        let mut played = self.played();
        played.lists.push((node.to_owned(), place.to_owned()));
        let is_stale = played.stale_lists > 0;
        played.stale_lists = played.stale_lists.saturating_sub(1);
        let found = played.instances.ok_or_else(|| "denied".to_owned())?;
        Ok(found && !is_stale)
    }

    fn counts_all_instances(&self) -> bool {
        !self.has_strays.load(Ordering::Relaxed)
    }

    fn show(&self, key: &BudgetKey, amounts: Amounts) {
        let mut played = self.played();
        played.shares.entry(key.to_string()).or_default();
        played.shown = amounts;
    }

    fn remove(&self, key: &BudgetKey) {
        self.played().shares.remove(&key.to_string());
        self.launch();
    }

    fn set_known(&self, are_known: bool) {
        self.played().are_known = are_known;
        self.launch();
    }

    fn lower(&self, key: &BudgetKey, share: u64, most: u64) -> u64 {
        let mut played = self.played();
        let held = played.cells.iter().sum::<u64>() * 1_000_000;
        let own = played.shares.entry(key.to_string()).or_default();
        *own = (*own).min(share.max(held)).min(most);
        *own
    }

    fn grant(&self, key: &BudgetKey, share: u64) {
        {
            let mut played = self.played();
            let disk = played.disk.get(&key.to_string()).map(|share| share.hourly_micros);
            assert_eq!(disk, Some(share), "it is recorded");
            played.shares.insert(key.to_string(), share);
        }
        self.launch();
    }

    fn refuse(&self, _orders: Vec<String>) {
        self.launch();
        let mut played = self.played();
        let orders = std::mem::take(&mut played.orders);
        played.refused.extend(orders);
    }
}

/// Starts the keeper of a node, with short times.
pub(crate) fn keep(
    api: &ApiServer,
    node: &str,
    holder: &Arc<Holder>,
    calls: &Arc<Calls>,
) -> BudgetKeeper {
    start(short_times(api, node), holder, calls)
}

pub(crate) fn start(
    options: BudgetOptions,
    holder: &Arc<Holder>,
    calls: &Arc<Calls>,
) -> BudgetKeeper {
    BudgetKeeper::start(options, Arc::clone(holder) as _, Arc::clone(calls) as _)
}

/// Returns the options of a node's keeper, with short times.
pub(crate) fn short_times(api: &ApiServer, node: &str) -> BudgetOptions {
    BudgetOptions {
        period: Duration::from_millis(100),
        write_pause: Duration::from_millis(20),
        patience: Duration::from_millis(200),
        scarce_patience: Duration::from_millis(50),
        report_period: Duration::from_millis(500),
        sweep_period: Duration::from_millis(50),
        deleted_for: Duration::from_millis(200),
        first_pause: Duration::from_millis(20),
        ..BudgetOptions::new(options(api).access, node.to_owned())
    }
}

pub(crate) async fn budgeted(dollars: &str) -> ApiServer {
    let api = ApiServer::start(&[budget_definition()]).await;
    put_budget(&api, "web", dollars, "u");
    api
}

/// Returns a field of the status of the budget of web.
pub(crate) fn status(api: &ApiServer, field: &str) -> Value {
    api.objects("cellbudgets")["web/cells"]["status"][field].clone()
}

/// Returns the shares of nodes, in millionths of a dollar.
pub(crate) fn shares(api: &ApiServer) -> Vec<(String, u64)> {
    let shares = status(api, "shares");
    let shares = shares.as_array().into_iter().flatten();
    let share = |share: &Value| {
        (share["node"].as_str().unwrap().to_owned(), share["hourlyMicros"].as_u64().unwrap())
    };
    shares.map(share).collect()
}

fn own(share: u64) -> Vec<(String, u64)> {
    vec![(NODE.to_owned(), share)]
}

/// Changes the budget of web as another client.
pub(crate) fn change(api: &ApiServer, change: impl FnOnce(&mut Value)) {
    let mut budget = api.objects("cellbudgets")["web/cells"].clone();
    change(&mut budget);
    api.put("cellbudgets", budget);
}

/// Verifies K20, K21.
#[tokio::test]
async fn share_is_reserved_for_what_waits_shown_and_given_back() {
    let api = budgeted("10").await;
    let (holder, calls) = (Holder::with_order(1, 3), Calls::new());
    let _keeper = keep(&api, NODE, &holder, &calls);
    wait_for("all are launched", || holder.cells() == 3).await;
    assert_eq!(shares(&api), own(3_750_000), "with a cushion");
    assert_eq!(
        (status(&api, "reserved"), status(&api, "left")),
        (json!("3.7500"), json!("6.2500"))
    );
    let patches = calls.of("patch cellbudgets/status", "ok");
    holder.end(1);
    wait_for("the surplus is given back", || shares(&api) == own(1_000_000)).await;
    // Without a change, nothing is read or written.
    let reads = calls.of("get cellbudgets", "ok");
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(calls.of("patch cellbudgets/status", "ok"), patches + 1);
    assert_eq!(calls.of("get cellbudgets", "ok"), reads);
    holder.end(0);
    wait_for("all is given back", || shares(&api).is_empty() && holder.played().disk.is_empty())
        .await;
    assert_eq!(status(&api, "left"), "10.0000");
}

/// Verifies K20, K21.
#[tokio::test]
async fn order_beyond_the_rest_is_refused_and_launched_once_the_limit_is_raised() {
    let api = budgeted("2").await;
    let holder = Holder::with_order(3, 1);
    let _keeper = keep(&api, NODE, &holder, &Calls::new());
    wait_for("it is refused", || holder.refused() == 1).await;
    assert_eq!(writes(&api.recorded()).len(), 0);
    holder.order(2);
    wait_for("what fits is launched", || holder.cells() == 1).await;
    change(&api, |budget| budget["spec"]["dollarsPerHour"] = json!("5"));
    wait_for("the rest is launched", || {
        holder.retry();
        holder.cells() == 2
    })
    .await;
    assert_eq!(shares(&api), own(5_000_000));
    // The limit is below the price of running cells: no cell ends, no order is launched, and the
    // share shrinks with each end.
    change(&api, |budget| budget["spec"]["dollarsPerHour"] = json!("1"));
    holder.order(1);
    wait_for("it is refused", || holder.refused() == 1).await;
    assert_eq!((holder.cells(), shares(&api)), (2, own(5_000_000)));
    holder.end(1);
    wait_for("it shrinks", || shares(&api) == own(2_000_000)).await;
}

/// Verifies K20.
#[tokio::test]
async fn deleted_budget_limits_nothing_and_another_of_its_name_counts_what_runs() {
    let api = budgeted("2").await;
    let holder = Holder::with_order(2, 1);
    let _keeper = keep(&api, NODE, &holder, &Calls::new());
    wait_for("it is launched", || holder.cells() == 1).await;
    api.delete("cellbudgets", "web/cells");
    wait_for("its share is dropped", || holder.share().is_none()).await;
    assert!(holder.played().disk.is_empty());
    holder.order(3);
    wait_for("it is launched without a limit", || holder.cells() == 2).await;
    // The new budget reserves as much as possible of the running cells' price, and allows no
    // launch.
    put_budget(&api, "web", "4", "v");
    wait_for("what runs is counted", || shares(&api) == own(4_000_000)).await;
    holder.order(1);
    wait_for("further cells are refused", || holder.refused() == 1).await;
    holder.end(1);
    wait_for("it shrinks", || shares(&api) == own(2_000_000)).await;
    holder.order(1);
    wait_for("it fits again", || holder.cells() == 2).await;
}

/// Verifies K20, K21.
#[tokio::test]
async fn ten_nodes_share_a_budget_to_its_last_dollar() {
    let api = budgeted("7").await;
    let nodes: Vec<_> = (0..10).map(|_| Holder::with_order(1, 1)).collect();
    let keepers = nodes.iter().zip(0..);
    let _keepers: Vec<_> = keepers
        .map(|(holder, number)| keep(&api, &format!("worker-{number}"), holder, &Calls::new()))
        .collect();
    let cells = || nodes.iter().map(|holder| holder.cells()).sum::<usize>();
    wait_for("all of it is used", || {
        nodes.iter().for_each(|node| node.retry());
        assert!(cells() <= 7);
        cells() == 7
    })
    .await;
    assert_eq!(status(&api, "left"), "0.0000");
}

/// Verifies K20.
#[tokio::test]
async fn share_within_which_cells_are_launched_needs_no_api_server_after_a_restart() {
    let mut api = budgeted("10").await;
    let holder = Holder::with_order(1, 1);
    let keeper = keep(&api, NODE, &holder, &Calls::new());
    wait_for("it is launched", || holder.cells() == 1).await;
    drop(keeper);
    api.stop().await;
    // The daemon begins with the recorded share.
    let recorded: Vec<_> = holder.played().disk.values().cloned().collect();
    assert_eq!(recorded.len(), 1);
    holder.end(0);
    holder.order(1);
    assert_eq!(holder.cells(), 1);
    let calls = Calls::new();
    let _keeper = keep(&api, NODE, &holder, &calls);
    holder.order(5);
    wait_for("it asks", || calls.of("list cellbudgets", "unreachable") > 1).await;
    assert_eq!((holder.cells(), holder.refused()), (1, 0), "what is beyond it waits");
    api.restart().await;
    wait_for("it is granted", || holder.cells() == 2).await;
}

/// Verifies K22.
#[tokio::test]
async fn share_without_a_record_is_not_used_while_instances_are_not_counted() {
    let api = budgeted("4").await;
    change(&api, |budget| {
        let share = json!({ "node": NODE, "hourlyMicros": 3_000_000, "serial": 4 });
        budget["status"] = json!({ "shares": [share] });
    });
    let (holder, calls) = (Holder::with_order(2, 1), Calls::new());
    holder.has_strays.store(true, Ordering::Relaxed);
    let _keeper = keep(&api, NODE, &holder, &calls);
    wait_for("it was read", || calls.of("get cellbudgets", "ok") > 2).await;
    assert_eq!((holder.cells(), shares(&api)), (0, own(3_000_000)));
    holder.has_strays.store(false, Ordering::Relaxed);
    wait_for("it is the node's", || holder.cells() == 1).await;
    wait_for("it shrinks", || shares(&api) == own(2_000_000)).await;
}

/// Verifies K22.
#[tokio::test]
async fn share_that_an_administrator_removes_is_lost_and_asked_for_again() {
    let api = budgeted("4").await;
    let holder = Holder::with_order(3, 1);
    let _keeper = keep(&api, NODE, &holder, &Calls::new());
    wait_for("it is launched", || holder.cells() == 1).await;
    // Another node takes the rest meanwhile.
    change(&api, |budget| {
        let share = json!({ "node": "worker-2", "hourlyMicros": 4_000_000, "serial": 1 });
        budget["status"] = json!({ "shares": [share] });
    });
    wait_for("it is lost", || holder.share() == Some(0)).await;
    change(&api, |budget| budget["status"] = json!({ "shares": [] }));
    wait_for("what runs is reserved again", || shares(&api) == own(3_000_000)).await;
}

/// Verifies K6, K20.
#[tokio::test]
async fn failures_are_logged_once_and_orders_wait_meanwhile() {
    let log = CapturedLog::start();
    let api = budgeted("4").await;
    api.fail(Some(Verb::Patch), "cellbudgets", 3, ApiFault::Status(500, None));
    api.fail(Some(Verb::Patch), "cellbudgets", 1, ApiFault::Cut);
    let (holder, calls) = (Holder::with_order(1, 1), Calls::new());
    let _keeper = keep(&api, NODE, &holder, &calls);
    wait_for("it is launched", || holder.cells() == 1).await;
    assert_eq!(calls.of("patch cellbudgets/status", "server_error"), 3);
    let logged = |text: &str| log.lines().iter().filter(|line| line.contains(text)).count();
    wait_for("the end is logged", || logged("are written again") == 1).await;
    assert!(logged("is not written") <= 2, "once a class: {:?}", log.lines());
}

/// Verifies K20.
#[tokio::test]
async fn rule_of_the_api_server_refuses_orders() {
    let api = budgeted("4").await;
    api.fail(Some(Verb::Patch), "cellbudgets", 1, ApiFault::Status(422, None));
    let holder = Holder::with_order(1, 1);
    let _keeper = keep(&api, NODE, &holder, &Calls::new());
    wait_for("it is refused", || holder.refused() == 1).await;
    assert_eq!(shares(&api), vec![]);
}

/// Verifies K20.
#[tokio::test]
async fn namespaces_without_a_budget_wait_for_the_list_alone() {
    let api = ApiServer::start(&[]).await;
    let (holder, calls) = (Holder::with_order(1, 1), Calls::new());
    let _keeper = keep(&api, NODE, &holder, &calls);
    // The kind is not defined yet.
    wait_for("it is listed", || calls.of("list cellbudgets", "not_found") > 0).await;
    assert_eq!(holder.cells(), 0);
    api.define(&budget_definition());
    wait_for("it is launched", || holder.cells() == 1).await;
    assert_eq!(writes(&api.recorded()).len(), 0);
}

pub(crate) fn spent(date: &str, micros: u64) -> Spending {
    let cost = Cost::from_micros(micros);
    Spending { date: date.parse().unwrap(), day: cost, month: cost }
}

/// Verifies K24.
#[tokio::test]
async fn cost_of_all_nodes_is_reported_in_few_writes_and_outlives_the_share() {
    let api = budgeted("10").await;
    change(&api, |budget| budget["spec"]["dollarsPerDay"] = json!("1"));
    let (holder, other, calls) = (Holder::with_order(1, 1), Holder::with_order(1, 1), Calls::new());
    let _keepers =
        [keep(&api, NODE, &holder, &calls), keep(&api, "worker-2", &other, &Calls::new())];
    wait_for("both are launched", || holder.cells() + other.cells() == 2).await;
    let writes = calls.of("patch cellbudgets/status", "ok");
    other.played().spent = spent("2026-11-30", 100_000);
    for micros in (0..=300_000).step_by(1_000) {
        holder.played().spent = spent("2026-11-30", micros);
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    let day = |field: &str| status(&api, "spent")[field].as_str().map(str::to_owned);
    wait_for("both are reported", || day("dayLeft") == Some("0.6000".to_owned())).await;
    let reports = calls.of("patch cellbudgets/status", "ok") - writes;
    assert!((2..25).contains(&reports), "{reports}");
    let limits = SpendingLimits { day: Some(Cost::from_micros(1_000_000)), month: None };
    let shown = |holder: &Holder| {
        let Amounts { spending_limits, others_spent, own_spent, .. } =
            holder.played().shown.clone();
        (spending_limits, others_spent, own_spent)
    };
    let (mine, theirs) = (spent("2026-11-30", 300_000), spent("2026-11-30", 100_000));
    wait_for("each knows the other's", || {
        shown(&holder) == (limits, vec![theirs], Some(mine))
            && shown(&other) == (limits, vec![mine], Some(theirs))
    })
    .await;
    assert!(holder.played().disk["web/cells"].limits_spending);
    change(&api, |budget| budget["spec"]["dollarsPerDay"] = json!("2"));
    wait_for("the limit is raised", || day("dayLeft") == Some("1.6000".to_owned())).await;
    holder.end(0);
    other.end(0);
    let are_given_back = || {
        let shares = shares(&api);
        shares.len() == 2 && shares.iter().all(|(_, share)| *share == 0)
    };
    wait_for("shares are given back, and costs stay", are_given_back).await;
    // The next month.
    for holder in [&holder, &other] {
        holder.played().spent = spent("2026-12-01", 0);
    }
    wait_for("nothing is kept", || shares(&api).is_empty()).await;
}

/// Verifies K24.
#[tokio::test]
async fn budget_without_a_limit_of_an_hour_needs_no_share_and_refuses_no_growth() {
    let api = budgeted("9").await;
    change(&api, |budget| budget["spec"] = json!({ "dollarsPerMonth": "100" }));
    let holder = Arc::new(Holder::default());
    let calls = Calls::new();
    let _keeper = keep(&api, NODE, &holder, &calls);
    wait_for("it is known", || holder.played().are_known).await;
    holder.order(1);
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!((holder.refused(), writes(&api.recorded()).len()), (0, 0));
    // The share of a former limit is kept while cells hold it.
    change(&api, |budget| budget["spec"]["dollarsPerHour"] = json!("5"));
    wait_for("it is launched", || holder.cells() == 1).await;
    change(&api, |budget| budget["spec"] = json!({ "dollarsPerMonth": "100" }));
    wait_for("the rest is given back", || shares(&api) == own(1_000_000)).await;
    let reads = calls.of("get cellbudgets", "ok");
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(calls.of("get cellbudgets", "ok"), reads);
}
