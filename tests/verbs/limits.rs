//! Limits of a node's cells, as the kubelet sees them.

use std::{
    sync::{Arc, atomic::Ordering::SeqCst},
    time::Duration,
};

use kiyot::backends::Method;
use kiyot_config::WarmPool;
use kiyot_engine::{
    engine::{BudgetFigures, Limits},
    id::CellId,
    placement::CatalogueFile,
    request::{Architecture, keys::ARCHITECTURE},
};
use kiyot_proto::{cri, store::BudgetShare};
use kiyot_testkit::wait_for;
use kiyot_values::{budget_key::BudgetKey, price::Price};
use tokio::task::JoinHandle;
use tonic::{Code, Status};

use crate::kit::Fixture;

/// The price of the only instance type.
const TYPE_PRICE: Price = Price::from_micros(200_000);
/// A price between the price of one cell and of two cells.
const PRICE_LIMIT: Price = Price::from_micros(300_000);
/// The time after which the fixture of a queue gives up a launch, even a queued launch.
const LAUNCH_TIMEOUT: Duration = Duration::from_secs(10);

/// Sets the provider's only instance type, at [`TYPE_PRICE`].
fn set_price(kiyot: &Fixture) {
    let (of_node, price) = (Architecture::of_node(), TYPE_PRICE.micros());
    let architecture = if of_node == Architecture::Amd64 { "x86_64" } else { "arm64" };
    let text = format!(
        "instance_type,vcpus,memory_mib,architectures,on_demand_usd_per_hour\n\
         a,2,4096,{architecture},0.{price:06}\n"
    );
    *kiyot.provider.catalogue.lock().unwrap() =
        CatalogueFile::parse(text.as_bytes()).unwrap().catalogue;
}

/// Calls RunPodSandbox for a pod of a namespace.
async fn run(kiyot: &Fixture, namespace: &str, name: &str) -> Result<String, Status> {
    let mut request = kiyot.sandbox_request(name);
    let config = request.config.as_mut().unwrap();
    config.metadata.as_mut().unwrap().namespace = namespace.to_owned();
    config.annotations.insert(ARCHITECTURE.to_owned(), Architecture::of_node().to_string());
    let ran = kiyot.call::<cri::RunPodSandboxResponse>(Method::RunPodSandbox, request);
    ran.await.map(|answer| answer.pod_sandbox_id)
}

/// Calls RunPodSandbox in a task of its own.
fn spawn(
    kiyot: &Arc<Fixture>,
    namespace: &'static str,
    name: String,
) -> JoinHandle<Result<String, Status>> {
    let kiyot = Arc::clone(kiyot);
    tokio::spawn(async move { run(&kiyot, namespace, &name).await })
}

fn only_cell(kiyot: &Fixture) -> CellId {
    let cells = kiyot.daemon.cells.all();
    assert_eq!(cells.len(), 1, "{cells:?}");
    cells.into_iter().next().unwrap()
}

fn assert_exhausted(refused: Result<String, Status>, message: &str) {
    let refused = refused.unwrap_err();
    assert_eq!((refused.code(), refused.message()), (Code::ResourceExhausted, message));
}

/// Verifies A18.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pod_over_the_limit_of_cells_is_refused_with_the_limit_and_its_holders() {
    let kiyot = Fixture::start().await;
    kiyot.daemon.cells.set_limits(Limits { max_cells: 1, ..Limits::default() });
    let first = run(&kiyot, "shop", "first").await.unwrap();
    assert_exhausted(
        run(&kiyot, "other", "second").await,
        "1 cell has not ended, and max_cells allows no more than 1; most of them are of \
         namespace shop (1)",
    );
    kiyot.stop_sandbox(&first).await;
    run(&kiyot, "other", "second").await.unwrap();
}

/// Verifies A18.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pod_over_the_price_limit_of_the_node_is_refused_with_the_limit_and_its_holders() {
    let kiyot = Fixture::start().await;
    set_price(&kiyot);
    kiyot.daemon.cells.set_limits(Limits { price: Some(PRICE_LIMIT), ..Limits::default() });
    let first = run(&kiyot, "shop", "first").await.unwrap();
    let holder = only_cell(&kiyot);
    assert_exhausted(
        run(&kiyot, "other", "second").await,
        &format!(
            "the cells of the node may cost $0.3000 an hour, and the cheapest offering for the \
             pod costs $0.2000; held by 1 cell: $0.2000 an hour (the most expensive: {holder} \
             $0.2000)"
        ),
    );
    kiyot.stop_sandbox(&first).await;
    run(&kiyot, "other", "second").await.unwrap();
}

/// Verifies A18.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pod_over_the_price_limit_of_its_namespace_is_refused_with_the_limit_and_its_holders() {
    let kiyot = Fixture::start().await;
    set_price(&kiyot);
    let limits = Limits { namespace_price: Some(PRICE_LIMIT), ..Limits::default() };
    kiyot.daemon.cells.set_limits(limits);
    let first = run(&kiyot, "shop", "first").await.unwrap();
    let holder = only_cell(&kiyot);
    // Another namespace has a limit of its own.
    run(&kiyot, "other", "elsewhere").await.unwrap();
    assert_exhausted(
        run(&kiyot, "shop", "second").await,
        &format!(
            "the cells of namespace shop may cost $0.3000 an hour, and the cheapest offering for \
             the pod costs $0.2000; held by 1 cell: $0.2000 an hour (the most expensive: \
             {holder} $0.2000)"
        ),
    );
    kiyot.stop_sandbox(&first).await;
    run(&kiyot, "shop", "second").await.unwrap();
}

/// Verifies K20, K21.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pod_beyond_the_share_of_its_namespaces_budget_waits_and_is_refused_with_the_figures() {
    let key = BudgetKey { namespace: "shop".to_owned(), name: "cells".to_owned() };
    let kiyot = Fixture::start().await;
    let share = BudgetShare {
        uid: "uid".to_owned(),
        hourly_micros: PRICE_LIMIT.micros(),
        ..BudgetShare::default()
    };
    kiyot.daemon.cells.record_share(&key, &share).await.unwrap();
    let kiyot = Arc::new(kiyot.restart().await);
    set_price(&kiyot);
    let cells = &kiyot.daemon.cells;
    cells.keep_budgets().await.unwrap();
    // The Kubernetes API was not read yet: the recorded share counts.
    let first = run(&kiyot, "shop", "first").await.unwrap();
    let asking = || cells.budget_needs().into_iter().flat_map(|need| need.orders).next();
    let second = spawn(&kiyot, "shop", "second".to_owned());
    wait_for("the pod asks", || asking().is_some()).await;
    cells.share_asked().await;
    let limit = Some(PRICE_LIMIT);
    cells.set_budget(
        &key,
        BudgetFigures { limit, reserved: PRICE_LIMIT, ..BudgetFigures::default() },
    );
    cells.refuse_growth(vec![asking().unwrap().sandbox]);
    assert_exhausted(
        second.await.unwrap(),
        "CellBudget shop/cells allows $0.3000 an hour on all nodes: $0.3000 are reserved, $0.0000 \
         are left; the cheapest offering for the pod costs $0.2000, the node's share is \
         $0.3000, and its cells hold $0.2000",
    );
    let third = spawn(&kiyot, "shop", "third".to_owned());
    wait_for("the pod asks", || asking().is_some()).await;
    kiyot.stop_sandbox(&first).await;
    third.await.unwrap().unwrap();
    // The budgets of other namespaces are unknown.
    let other = spawn(&kiyot, "other", "other".to_owned());
    wait_for("the pod asks", || asking().is_some()).await;
    cells.set_budgets_known(true);
    other.await.unwrap().unwrap();
}

/// Verifies A19.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pod_over_the_limit_of_boots_waits_and_is_refused_with_the_cells_that_boot() {
    let boots = |boots| Limits { boots: Some(boots), ..Limits::default() };
    let kiyot = Arc::new(Fixture::with_launch_timeout(LAUNCH_TIMEOUT).await);
    kiyot.daemon.cells.set_limits(boots(1));
    kiyot.provider.hold_launches();
    let first = spawn(&kiyot, "shop", "first".to_owned());
    wait_for("the launch of the first pod", || kiyot.provider.called.load(SeqCst) == 1).await;
    let cell_of_first = only_cell(&kiyot);
    let queued = spawn(&kiyot, "shop", "queued".to_owned());
    wait_for("the pod's place in the queue", || kiyot.waiting_orders() >= 1.0).await;
    // A namespace without boots is next. Its launch outlasts the deadline of the queue.
    let later = spawn(&kiyot, "other", "later".to_owned());
    wait_for("the later pod", || kiyot.waiting_orders() >= 2.0).await;
    kiyot.daemon.cells.set_limits(boots(2));
    wait_for("the launch of the later pod", || kiyot.daemon.cells.all().len() == 2).await;
    kiyot.daemon.cells.set_limits(boots(1));
    kiyot.provider.gate.add_permits(1);
    first.await.unwrap().unwrap();

    let refused = queued.await.unwrap().unwrap_err();
    let cells = kiyot.daemon.cells.all();
    let holder = cells.into_iter().find(|cell| *cell != cell_of_first).unwrap();
    let (begin, end) = (
        format!("no cell was launched for {}", LAUNCH_TIMEOUT.as_secs() / 10),
        format!(
            " s, because 1 cell boots ({holder}) and limits.boots allows no more; 1 pod waits in \
             turn"
        ),
    );
    assert_eq!(refused.code(), Code::ResourceExhausted, "{refused}");
    let message = refused.message();
    assert!(message.starts_with(&begin) && message.ends_with(&end), "{message}");
    kiyot.provider.gate.add_permits(1);
    drop(later.await.unwrap());
}

/// Verifies O3.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn metrics_have_prices_and_costs_of_namespaces_takes_of_pools_and_the_queue() {
    let kiyot = Arc::new(Fixture::start().await);
    set_price(&kiyot);
    kiyot.daemon.cells.set_limits(Limits { boots: Some(2), ..Limits::default() });
    kiyot.daemon.cells.set_warm(&[WarmPool { count: 1, ..WarmPool::default() }]);
    let sample = |name: &str| kiyot.sample(name).unwrap_or_default();
    let idle = || sample("kiyot_warm_pool_cells{state=\"idle\"}");
    wait_for("a cell is warm", || idle() == 1.0).await;
    let takes =
        |result: &str| sample(&format!("kiyot_warm_pool_orders_total{{result={result:?}}}"));
    assert_eq!((takes("hit"), takes("miss")), (0.0, 0.0));

    // The pool's next cell does not boot, so that the second pod finds none.
    kiyot.provider.hold_launches();
    run(&kiyot, "shop", "first").await.unwrap();
    wait_for("the pool's next launch", || kiyot.provider.called.load(SeqCst) == 2).await;
    assert_eq!((takes("hit"), takes("miss")), (1.0, 0.0));
    let missed = spawn(&kiyot, "other", "second".to_owned());
    wait_for("the pod's own launch", || kiyot.provider.called.load(SeqCst) == 3).await;
    assert_eq!((takes("hit"), takes("miss")), (1.0, 1.0));
    let queued = spawn(&kiyot, "other", "third".to_owned());
    wait_for("the pod's place in the queue", || kiyot.waiting_orders() == 1.0).await;

    let price = |namespace: &str| {
        sample(&format!("kiyot_cells_price_dollars_per_hour{{namespace={namespace:?}}}"))
    };
    let cost = |namespace: &str| {
        sample(&format!("kiyot_cells_cost_dollars_total{{namespace={namespace:?}}}"))
    };
    assert_eq!((price("shop"), price("other"), price("absent")), (0.2, 0.2, 0.0));
    let before = cost("shop");
    wait_for("the cost grows", || cost("shop") > before).await;
    kiyot.provider.gate.add_permits(8);
    missed.await.unwrap().unwrap();
    queued.await.unwrap().unwrap();
    assert_eq!((kiyot.waiting_orders(), price("shop")), (0.0, 0.2));
    assert_eq!(price("other"), 0.4);
    wait_for("the cost of the other namespace", || cost("other") > 0.0).await;
}

/// Verifies A19.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queue_of_a_namespace_does_not_starve_the_pod_of_another() {
    const QUEUE: usize = 50;
    let kiyot = Arc::new(Fixture::start().await);
    kiyot.daemon.cells.set_limits(Limits { boots: Some(2), ..Limits::default() });
    kiyot.provider.hold_launches();
    let of_queue: Vec<_> =
        (0..2 + QUEUE).map(|number| spawn(&kiyot, "shop", format!("pod-{number}"))).collect();
    wait_for("the queue", || kiyot.waiting_orders() >= QUEUE as f64).await;
    let of_other = spawn(&kiyot, "other", "only".to_owned());
    wait_for("the other pod", || kiyot.waiting_orders() > QUEUE as f64).await;
    // Each permit allows a launch: first the two pending launches, then a launch of the other
    // namespace. Records of cells that are placed together may be written in another order.
    let is_of_other = || kiyot.provider.tags.lock().unwrap().values().any(|tag| tag == "other");
    let mut launches = 0;
    while !is_of_other() {
        launches += 1;
        assert!(launches <= 5, "pods of the queue come before that of another namespace");
        kiyot.provider.gate.add_permits(1);
        wait_for("the next launch", || kiyot.provider.running() == launches).await;
    }
    kiyot.provider.gate.add_permits(QUEUE);
    of_other.await.unwrap().unwrap();
    for pod in of_queue {
        pod.await.unwrap().unwrap();
    }
}
