//! Shares of CellBudgets.

use jiff::civil::{Date, date};
use kiyot_values::{
    budget_key::BudgetKey,
    price::Cost,
    spending::{Spending, SpendingLimits, midnight},
};

use super::{
    limits::{answer, dollars, launches, priced, refusals},
    pools::{self, attaches, pool, taking, warm},
    *,
};

fn key(namespace: &str) -> BudgetKey {
    BudgetKey { namespace: namespace.to_owned(), name: "cells".to_owned() }
}

/// Returns an engine with a budget of namespace web, and the node's share in dollars.
fn budgeted(share: u64) -> Engine {
    let mut engine = engine(capabilities::CLOUD);
    engine.keep_budgets([(key("web"), recorded(dollars(share)))]);
    engine
}

fn recorded(hourly: Price) -> RecordedShare {
    RecordedShare { hourly, limits_spending: false }
}

fn figures(limit: u64, reserved: u64) -> BudgetFigures {
    let (limit, reserved) = (Some(dollars(limit)), dollars(reserved));
    BudgetFigures { limit, reserved, ..BudgetFigures::default() }
}

fn needs(engine: &mut Engine, now: Now) -> Vec<NamespaceNeed> {
    engine.needs(&BTreeMap::new(), now)
}

/// Returns the sandboxes of the orders that ask for a larger share.
fn asking(engine: &mut Engine) -> Vec<SandboxId> {
    let needs = needs(engine, at(1)).into_iter();
    needs.flat_map(|need| need.orders).map(|order| order.sandbox).collect()
}

/// Ends a cell whose launch is answered, and confirms the end.
fn end(engine: &mut Engine, cell: &CellId, seconds: u64) -> Effects {
    engine.handle(Event::Terminate { cell: cell.clone(), reason: "".into() }, at(seconds));
    engine.handle(Event::ShutDown(cell.clone(), true), at(seconds));
    engine.handle(Event::Detached(cell.clone(), Ok(())), at(seconds));
    let outcome = Ok(Termination::Confirmed);
    engine.handle(
        Event::Terminated { cell: cell.clone(), outcome, console: String::new() },
        at(seconds),
    )
}

/// Verifies K20.
#[test]
fn launch_within_the_recorded_share_begins_at_once_and_counts_as_its_dearest_candidate() {
    let mut engine = budgeted(4);
    let (_, effects) = engine.order(priced("web", "one", &[1, 3]), at(1));
    let (cell, prices) = launches(&effects).remove(0);
    assert_eq!(prices, [1, 3]);
    let (second, effects) = engine.order(priced("web", "two", &[2]), at(1));
    assert_eq!((launches(&effects), refusals(&effects)), (vec![], vec![]));
    assert!(engine.has_new_ask() && !engine.has_new_ask());
    let found = needs(&mut engine, at(1));
    let order = OrderNeed { sandbox: second, cheapest: dollars(2), dearest: dollars(2) };
    let [NamespaceNeed { namespace, held, orders, .. }] = &found[..] else { panic!("{found:?}") };
    assert_eq!((namespace.as_str(), *held, orders), ("web", dollars(3), &vec![order]));
    // The launch is answered, and the cell holds the price of its offering.
    answer(&mut engine, &cell, 1, 2);
    assert_eq!(needs(&mut engine, at(2))[0].held, dollars(1));
    let effects = engine.grant_share(&key("web"), dollars(4), at(3));
    assert_eq!(launches(&effects)[0].1, [2]);
    let free = priced("web", "free", &[0]);
    assert_eq!(launches(&engine.order(free, at(3)).1).len(), 1);
}

/// Verifies K20.
#[test]
fn order_beyond_the_share_is_launched_once_it_is_granted() {
    let mut engine = budgeted(0);
    engine.order(priced("web", "pod", &[2, 3]), at(1));
    let effects = engine.grant_share(&key("web"), dollars(2), at(2));
    assert_eq!(launches(&effects), [], "it asks for its dearest candidate");
    let effects = engine.grant_share(&key("web"), dollars(3), at(3));
    assert_eq!(launches(&effects)[0].1, [2, 3]);
    assert_eq!(asking(&mut engine), []);
}

/// Verifies K20, K21.
#[test]
fn order_without_a_larger_share_takes_what_fits_or_is_refused_with_the_figures() {
    let mut engine = budgeted(2);
    engine.set_budget(&key("web"), figures(10, 9), at(0));
    let (fits, _) = engine.order(priced("web", "fits", &[2, 3]), at(1));
    let effects = engine.refuse_growth(vec![fits], at(2));
    assert_eq!(launches(&effects)[0].1, [2]);
    let (over, _) = engine.order(priced("web", "over", &[1, 3]), at(3));
    let effects = engine.refuse_growth(vec![over], at(4));
    let expected = "CellBudget web/cells allows $10.0000 an hour on all nodes: $9.0000 are \
                    reserved, $1.0000 are left; the cheapest offering for the pod costs $1.0000, \
                    the node's share is $2.0000, and its cells hold $2.0000";
    assert_eq!((launches(&effects), refusals(&effects)), (vec![], vec![expected.to_owned()]));
    // An order waits until its need was reported.
    engine.order(priced("web", "later", &[1]), at(5));
    assert_eq!(asking(&mut engine).len(), 1);
}

/// Verifies K20.
#[test]
fn namespace_waits_until_all_budgets_are_known_and_is_unlimited_without_a_budget() {
    let mut engine = budgeted(9);
    let timeout = Some(Duration::from_secs(10));
    engine.order(OrderSpec { timeout, ..priced("batch", "one", &[1]) }, at(1));
    let (waiting, _) = engine.order(priced("batch", "two", &[1]), at(1));
    assert_eq!(launches(&engine.refuse_growth(vec![waiting], at(2))), []);
    let effects = engine.handle(Event::Tick, at(11));
    let refused = refusals(&effects).remove(0);
    let expected = "for 10 s, because the CellBudgets of namespace batch are not known";
    assert!(refused.contains(expected), "{refused}");
    let effects = engine.set_budgets_known(true, at(12));
    assert_eq!(launches(&effects).len(), 1);
    // A new budget has no share for further launches.
    engine.set_budget(&key("batch"), figures(9, 0), at(12));
    let (_, effects) = engine.order(priced("batch", "three", &[1]), at(13));
    assert_eq!(launches(&effects), []);
    assert_eq!(launches(&engine.remove_budget(&key("batch"), at(14))).len(), 1);
}

/// Verifies K20.
#[test]
fn order_whose_share_is_not_granted_in_time_names_the_budget() {
    let mut engine = budgeted(1);
    let timeout = Some(Duration::from_secs(10));
    engine.order(OrderSpec { timeout, ..priced("web", "pod", &[2]) }, at(1));
    let refused = refusals(&engine.handle(Event::Tick, at(11))).remove(0);
    let expected = "the Kubernetes API did not grant the node a larger share of CellBudget \
                    web/cells; its share is $1.0000, and its cells hold $0.0000";
    assert!(refused.contains(expected), "{refused}");
}

/// Verifies K20.
#[test]
fn share_is_not_lowered_below_the_cells_that_hold_it_unless_it_is_lost() {
    let mut engine = budgeted(5);
    let (_, effects) = engine.order(priced("web", "pod", &[3]), at(1));
    let (cell, _) = launches(&effects).remove(0);
    assert_eq!(engine.lower_share(&key("web"), dollars(1), dollars(5)), dollars(3));
    assert_eq!(engine.lower_share(&key("web"), dollars(9), dollars(9)), dollars(3));
    answer(&mut engine, &cell, 3, 2);
    // An administrator removed the share: no cell is launched, and running cells go on.
    assert_eq!(engine.lower_share(&key("web"), dollars(3), dollars(0)), dollars(0));
    end(&mut engine, &cell, 3);
    let (_, effects) = engine.order(priced("web", "next", &[1]), at(4));
    assert_eq!(launches(&effects), []);
}

/// Verifies K20.
#[test]
fn cell_holds_its_price_until_its_end_is_proven() {
    let mut engine = budgeted(3);
    let (_, effects) = engine.order(priced("web", "one", &[3]), at(1));
    let (cell, _) = launches(&effects).remove(0);
    answer(&mut engine, &cell, 3, 2);
    engine.order(priced("web", "two", &[3]), at(3));
    engine.handle(Event::Terminate { cell: cell.clone(), reason: "".into() }, at(4));
    assert_eq!(needs(&mut engine, at(4))[0].held, dollars(3));
    assert_eq!(launches(&end(&mut engine, &cell, 5)).len(), 1);
}

/// Verifies K20.
#[test]
fn pod_takes_a_warm_cell_only_within_the_share() {
    let mut engine = engine(capabilities::CLOUD);
    let share = Price::from_micros(PRICE.micros() - 1);
    engine.keep_budgets([(key("default"), recorded(share))]);
    let cell = pools::launches(&engine.set_pools(vec![pool("small", 1)], at(1))).remove(0);
    warm(&mut engine, &cell, 2);
    let (_, effects) = engine.order(taking("pod"), at(3));
    assert_eq!((attaches(&effects), pools::launches(&effects)), (vec![], vec![]));
    assert_eq!(attaches(&engine.grant_share(&key("default"), PRICE, at(4))), [cell]);
}

/// Verifies K22.
#[test]
fn instances_without_a_cell_are_not_counted() {
    let mut engine = budgeted(3);
    assert!(engine.counts_all_instances());
    let stray = launched_as("i", &CellId::mint().unwrap());
    listed(&mut engine, 100, std::slice::from_ref(&stray));
    assert!(!engine.counts_all_instances());
    listed(&mut engine, 200, &[]);
    assert!(engine.counts_all_instances());
    let providers = only(capabilities::CLOUD);
    let unlisted = Engine::new(config(), providers, Box::new(Counting::default()));
    assert!(!unlisted.counts_all_instances());
}

const NOON: Duration = Duration::from_hours(12);

/// Returns a time after noon of a date, the node being up since then.
fn after_noon(date: Date, seconds: u64) -> Now {
    let boot = Duration::from_secs(seconds);
    Now { boot, unix: midnight(date) + NOON + boot }
}

fn micros_of(dollars: u64) -> Cost {
    Cost::from_micros(dollars * 1_000_000)
}

/// Returns the figures of a budget that allows dollars a day and a month.
fn spending(day: u64, month: u64) -> BudgetFigures {
    let spending_limits =
        SpendingLimits { day: Some(micros_of(day)), month: Some(micros_of(month)) };
    BudgetFigures { spending_limits, ..BudgetFigures::default() }
}

fn spent(date: Date, day: u64, month: u64) -> Spending {
    Spending { date, day: micros_of(day), month: micros_of(month) }
}

/// Returns an engine with a cell of web since noon of a date. It costs 3600 dollars an hour, a
/// dollar a second.
fn spender(date: Date, figures: BudgetFigures) -> (Engine, CellId) {
    let mut engine = engine(capabilities::CLOUD);
    engine.keep_budgets([]);
    engine.set_budget(&key("web"), figures, after_noon(date, 0));
    engine.set_budgets_known(true, after_noon(date, 0));
    let (_, effects) = engine.order(priced("web", "pod", &[3600]), after_noon(date, 0));
    let (cell, _) = launches(&effects).remove(0);
    let instance = Instance { offering: offering("3600"), ..launched_as("i", &cell) };
    engine.handle(Event::Launched(cell.clone(), Ok(instance)), after_noon(date, 0));
    (engine, cell)
}

fn spent_by(engine: &mut Engine, now: Now) -> Spending {
    let needs = needs(engine, now);
    needs.into_iter().find(|need| need.namespace == "web").map(|need| need.spent).unwrap()
}

/// Orders a further cell of web, and returns the reason of a refusal.
fn refused(engine: &mut Engine, pod: &str, now: Now) -> Option<String> {
    engine.budget_needs(now);
    let effects = engine.order(priced("web", pod, &[1]), now).1;
    refusals(&effects).pop()
}

/// Verifies K24.
#[test]
fn limits_of_day_and_month_count_ended_and_running_cells_from_midnight() {
    const TO_MIDNIGHT: u64 = 12 * 3600;
    let last = date(2026, 11, 30);
    let (mut engine, _) = spender(last, spending(50_000, 60_000));
    assert_eq!(spent_by(&mut engine, after_noon(last, 10)), spent(last, 10, 10));
    assert_eq!(refused(&mut engine, "a", after_noon(last, 20)), None);
    let first = date(2026, 12, 1);
    let found = spent_by(&mut engine, after_noon(last, TO_MIDNIGHT + 30));
    assert_eq!(found, spent(first, 30, 30));
    let later = after_noon(last, TO_MIDNIGHT + 50_000);
    let found = refused(&mut engine, "b", later).unwrap();
    assert!(found.starts_with("CellBudget web/cells allows $50000.0000 a day"), "{found}");
    assert!(found.ends_with("gets cells again on 2026-12-02 (UTC), or once the budget is raised"));
    let free = engine.order(priced("web", "free", &[0]), later).1;
    assert_eq!(launches(&free).len(), 1, "a free cell is within every budget");
    let raised = BudgetFigures { others: vec![spent(first, 1, 9_000)], ..spending(70_000, 60_000) };
    engine.set_budget(&key("web"), raised, later);
    assert_eq!(refused(&mut engine, "c", later), None);
    let month = after_noon(last, TO_MIDNIGHT + 51_000);
    let found = refused(&mut engine, "d", month).unwrap();
    assert!(found.contains("a month on all nodes, and $60000.0000"), "{found}");
    assert!(found.contains("again on 2027-01-01"), "{found}");
}

/// Verifies K24.
#[test]
fn cost_of_ended_cells_and_of_other_nodes_counts_for_the_day_and_the_month() {
    let day = date(2026, 11, 30);
    let (mut engine, cell) = spender(day, spending(100, 1000));
    engine.handle(Event::Terminate { cell: cell.clone(), reason: "".into() }, after_noon(day, 9));
    engine.handle(Event::ShutDown(cell.clone(), true), after_noon(day, 10));
    engine.handle(Event::Detached(cell.clone(), Ok(())), after_noon(day, 10));
    let outcome = Ok(Termination::Confirmed);
    let ended = Event::Terminated { cell, outcome, console: String::new() };
    let effects = engine.handle(ended, after_noon(day, 10));
    let records = effects.iter().find_map(|(_, effect)| match effect {
        Effect::Commit { changes, .. } => changes.iter().find_map(|change| match change {
            Change::Cost(namespace, record) => Some((namespace.as_str(), record.clone())),
            _ => None,
        }),
        _ => None,
    });
    let micros = 10_000_000;
    let record = store::NamespaceCost {
        micros,
        date: "2026-11-30".to_owned(),
        day_micros: micros,
        month_micros: micros,
    };
    assert_eq!(records, Some(("web", record.clone())));
    let yesterday = date(2026, 11, 29);
    let others = vec![spent(yesterday, 900, 900), spent(day, 89, 89)];
    let with = |others| BudgetFigures { others, ..spending(100, 1000) };
    engine.set_budget(&key("web"), with(others.clone()), after_noon(day, 11));
    assert_eq!(refused(&mut engine, "a", after_noon(day, 11)), None);
    let more = [others, vec![spent(date(2026, 12, 1), 1, 1)]].concat();
    engine.set_budget(&key("web"), with(more), after_noon(day, 11));
    assert!(
        refused(&mut engine, "b", after_noon(day, 11)).is_some(),
        "the report of a node whose clock is ahead counts"
    );
    // The node's next daemon reads the cost from the journal.
    let journal = Journal { costs: vec![("web".to_owned(), record)], ..Journal::default() };
    let seams = Box::new(Counting::default());
    let providers = only(capabilities::CLOUD);
    let (mut next, ..) = Engine::recover(config(), providers, seams, journal, after_noon(day, 20));
    assert_eq!(spent_by(&mut next, after_noon(day, 20)), spent(day, 10, 10));
}

/// Verifies K24.
#[test]
fn clock_set_back_does_not_lift_a_reached_limit() {
    let day = date(2026, 11, 30);
    let set_back = |seconds: u64| {
        let now = after_noon(day, seconds);
        Now { unix: now.unix.saturating_sub(Duration::from_hours(40 * 24)), ..now }
    };
    let (mut engine, cell) = spender(day, spending(100, 1000));
    engine.budget_needs(after_noon(day, 50));
    assert_eq!(spent_by(&mut engine, set_back(99)), spent(day, 99, 99));
    assert_eq!(refused(&mut engine, "a", set_back(99)), None);
    assert!(refused(&mut engine, "b", set_back(100)).is_some());
    // The node's next daemon reads the cost from the report of this daemon.
    let record = engine.cells[&cell].stored();
    let journal = Journal { cells: vec![(cell.to_string(), record)], ..Journal::default() };
    let seams = Box::new(Counting::default());
    let providers = only(capabilities::CLOUD);
    let (mut next, ..) = Engine::recover(config(), providers, seams, journal, set_back(110));
    next.keep_budgets([(
        key("web"),
        RecordedShare { hourly: dollars(9000), limits_spending: true },
    )]);
    let timeout = Some(Duration::from_secs(10));
    let waiting = OrderSpec { timeout, ..priced("web", "c", &[1]) };
    assert_eq!(
        launches(&next.order(waiting, set_back(111)).1),
        [],
        "the order waits until the budget is read"
    );
    let reported = BudgetFigures { own: Some(spent(day, 100, 100)), ..spending(100, 1000) };
    let effects = next.set_budget(&key("web"), reported, set_back(112));
    assert_eq!((launches(&effects), refusals(&effects).len()), (vec![], 1));
}

/// Verifies K24.
#[test]
fn report_within_the_known_cost_opens_no_account() {
    let day = date(2026, 11, 30);
    let (mut engine, _) = spender(day, spending(100, 1000));
    for (own, accounts) in [(10, 0), (11, 1)] {
        let reported = BudgetFigures { own: Some(spent(day, own, own)), ..spending(100, 1000) };
        engine.set_budget(&key("web"), reported, after_noon(day, 10));
        assert_eq!(spent_by(&mut engine, after_noon(day, 10)), spent(day, own, own));
        assert_eq!(engine.costs.accounts().len(), accounts, "{own}");
    }
}

/// Verifies K25.
#[test]
fn cells_of_a_spent_budget_end_if_the_budget_demands_it() {
    let day = date(2026, 11, 30);
    for ends_cells in [false, true] {
        let figures = BudgetFigures { ends_cells, ..spending(100, 1000) };
        let (mut engine, cell) = spender(day, figures);
        let mut cell_of = |namespace, pod, price| {
            let spec = priced(namespace, pod, &[price]);
            launches(&engine.order(spec, after_noon(day, 1)).1).remove(0).0
        };
        let (free, other) = (cell_of("web", "free", 0), cell_of("batch", "other", 9));
        engine.budget_needs(after_noon(day, 99));
        assert!(engine.cells[&cell].state.end().is_none());
        engine.budget_needs(after_noon(day, 100));
        let end = |cell: &CellId| engine.cells[cell].state.end().map(|end| end.reason.to_string());
        assert_eq!((end(&free), end(&other)), (None, None));
        let reason = end(&cell);
        assert_eq!(reason.is_some(), ends_cells);
        let expected = "CellBudget web/cells allows $100.0000 a day on all nodes, and $100.0000";
        assert!(reason.is_none_or(|reason| reason.starts_with(expected)));
    }
}

#[test]
fn metrics_of_budgets_are_shares_waiting_namespaces_and_refusals_by_limit() {
    assert_eq!(engine(capabilities::CLOUD).metrics(at(1)).budgets, None);
    let mut engine = budgeted(2);
    engine.set_budget(&key("web"), figures(2, 2), at(1));
    let found = |engine: &Engine, limit: &str| {
        let budgets = engine.metrics(at(1)).budgets.unwrap();
        (budgets.shares, budgets.waiting, budgets.refusals[limit])
    };
    for (pod, price) in [("one", 1), ("two", 3), ("three", 4)] {
        engine.order(priced("web", pod, &[price]), at(1));
    }
    assert_eq!(found(&engine, "hour"), (dollars(2), 1, 0));
    let asking = asking(&mut engine);
    engine.refuse_growth(asking, at(1));
    assert_eq!(found(&engine, "hour"), (dollars(2), 0, 2));
    let spent_out = SpendingLimits { day: Some(Cost::default()), month: None };
    let figures = BudgetFigures { spending_limits: spent_out, ..figures(2, 2) };
    engine.set_budget(&key("web"), figures, at(1));
    engine.order(priced("web", "four", &[1]), at(1));
    assert_eq!((found(&engine, "day").2, found(&engine, "month").2), (1, 0));
}
