//! Shares of CellBudgets.

use kiyot_values::budget_key::BudgetKey;

use super::{
    limits::{answer, dollars, launches, priced, refusals},
    pools::{self, attaches, pool, taking, warm},
    *,
};

fn key(namespace: &str) -> BudgetKey {
    BudgetKey { namespace: namespace.to_owned(), name: "cells".to_owned() }
}

/// Returns an engine with a budget of web, of which this node has a share in dollars.
fn budgeted(share: u64) -> Engine {
    let mut engine = engine(capabilities::CLOUD);
    engine.keep_budgets([(key("web"), dollars(share))]);
    engine
}

fn figures(limit: u64, reserved: u64) -> BudgetFigures {
    BudgetFigures { limit: dollars(limit), reserved: dollars(reserved) }
}

/// Returns the sandboxes of the orders that ask for a larger share.
fn asking(engine: &mut Engine) -> Vec<SandboxId> {
    let needs = engine.budget_needs().into_iter();
    needs.flat_map(|need| need.orders).map(|order| order.sandbox).collect()
}

/// Ends a cell whose launch is answered, by a proof.
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
    let needs = engine.budget_needs();
    let order = OrderNeed { sandbox: second, cheapest: dollars(2), dearest: dollars(2) };
    let namespace = "web".to_owned();
    assert_eq!(needs, [NamespaceNeed { namespace, held: dollars(3), orders: vec![order] }]);
    // Without an answer, without an end.
    answer(&mut engine, &cell, 1, 2);
    assert_eq!(engine.budget_needs()[0].held, dollars(1));
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
fn order_for_which_no_share_grows_takes_what_fits_or_is_refused_with_the_figures() {
    let mut engine = budgeted(2);
    engine.set_budget(&key("web"), figures(10, 9));
    let (fits, _) = engine.order(priced("web", "fits", &[2, 3]), at(1));
    let effects = engine.refuse_growth(vec![fits], at(2));
    assert_eq!(launches(&effects)[0].1, [2]);
    let (over, _) = engine.order(priced("web", "over", &[1, 3]), at(3));
    let effects = engine.refuse_growth(vec![over], at(4));
    let expected = "CellBudget web/cells allows $10.0000 an hour on all nodes: $9.0000 are \
                    reserved, $1.0000 are left; the cheapest offering for the pod costs $1.0000, \
                    and the node's share is $2.0000, of which its cells hold $2.0000";
    assert_eq!((launches(&effects), refusals(&effects)), (vec![], vec![expected.to_owned()]));
    // An order that was not asked for yet waits.
    engine.order(priced("web", "later", &[1]), at(5));
    assert_eq!(asking(&mut engine).len(), 1);
}

/// Verifies K20.
#[test]
fn namespace_waits_until_all_budgets_are_known_and_is_not_limited_without_one() {
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
    // A budget that appears has no share for further launches.
    engine.set_budget(&key("batch"), figures(9, 0));
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
                    web/cells; its share is $1.0000, of which its cells hold $0.0000";
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
    // An administrator removed it: nothing is launched, and what runs goes on.
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
    assert_eq!(engine.budget_needs()[0].held, dollars(3));
    assert_eq!(launches(&end(&mut engine, &cell, 5)).len(), 1);
}

/// Verifies K20.
#[test]
fn pod_takes_a_warm_cell_within_the_share_alone() {
    let mut engine = engine(capabilities::CLOUD);
    engine.keep_budgets([(key("default"), Price::from_micros(PRICE.micros() - 1))]);
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
