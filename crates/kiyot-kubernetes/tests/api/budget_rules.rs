//! The rules of `deploy/budgets.yaml` and of the definition of budgets, evaluated like the API
//! server does.

use kiyot_kubernetes::{budgets::CellBudget, object::GROUP};
use kiyot_values::{price::Cost, spending::Spending};
use proptest::{collection::vec, prelude::*};
use serde_json::{Value, json};

use crate::{
    policy::{Review, Row, assert_each_part_denies, denying, kubelet, refused_by, token, wrong},
    rights::assert_schema_has_every_field_of,
    world::budget_definition,
};

const POLICY: &str = include_str!("../../../../deploy/budgets.yaml");

/// Returns a budget with the shares of worker-1, worker-2 and so on; 0 stands for no entry.
fn budget(dollars: &str, shares: &[u64]) -> Value {
    let share = |(share, number): (&u64, u32)| {
        let node = format!("worker-{number}");
        (*share > 0).then(|| json!({ "node": node, "hourlyMicros": share, "serial": 1 }))
    };
    let shares: Vec<Value> = shares.iter().zip(1..).filter_map(share).collect();
    json!({
        "metadata": { "namespace": "web", "name": "cells", "resourceVersion": "7" },
        "spec": { "dollarsPerHour": dollars },
        "status": { "shares": shares },
    })
}

/// Returns a budget after the patch of a node.
fn patched(object: &Value, node: &str, share: u64) -> Value {
    let budget: CellBudget = serde_json::from_value(object.clone()).unwrap();
    let mut object = object.clone();
    object["status"] = budget.patch(node, share, Spending::default(), None)["status"].clone();
    object
}

/// Returns a budget whose writer names an entry as swept, after a change of the entries.
fn swept(object: &Value, number: usize, change: impl FnOnce(&mut Vec<Value>)) -> Value {
    let mut object = object.clone();
    let status = &mut object["status"];
    status["swept"] = status["shares"][number]["node"].clone();
    change(status["shares"].as_array_mut().unwrap());
    object
}

/// Returns a budget whose entries have reported a cost on these dates; an empty date stands for no
/// report.
fn reported(shares: &[u64], dates: &[&str]) -> Value {
    let mut object = budget("1", &vec![1; shares.len()]);
    for (number, (share, date)) in shares.iter().zip(dates).enumerate() {
        let entry = &mut object["status"]["shares"][number];
        entry["hourlyMicros"] = json!(share);
        if !date.is_empty() {
            entry["spent"] = json!({ "date": date, "dayMicros": 1, "monthMicros": 2 });
        }
    }
    object
}

/// Verifies K4, K21.
#[test]
fn definition_of_budgets_is_structural_and_has_every_field_of_the_patch() {
    let definition = budget_definition();
    let names = &definition["spec"]["names"];
    assert_eq!(definition["metadata"]["name"], "cellbudgets.kiyot.elotl.co");
    assert_eq!(
        (&definition["spec"]["scope"], &names["kind"]),
        (&json!("Namespaced"), &json!("CellBudget"))
    );
    let version = &definition["spec"]["versions"][0];
    let mut object = budget("1", &[]);
    object["spec"] = json!({
        "dollarsPerHour": "1", "dollarsPerDay": "1", "dollarsPerMonth": "1", "onExhausted": "end",
    });
    let budget: CellBudget = serde_json::from_value(object.clone()).unwrap();
    let (day, month) = (Cost::from_micros(1), Cost::from_micros(2));
    let spent = Spending { date: "2026-11-30".parse().unwrap(), day, month };
    let place = ["region eu-west-1, vpc-0abc, cluster production".to_owned()];
    object["status"] = budget.patch("worker-1", 1, spent, Some(&place))["status"].clone();
    object["status"]["swept"] = json!("worker-2");
    object.as_object_mut().unwrap().remove("metadata");
    let head = [".apiVersion", ".kind"];
    assert_schema_has_every_field_of(version, &object, &head);
    let schema = &version["schema"]["openAPIV3Schema"];
    // The number of shares bounds the cost of the rule.
    let shares = &schema["properties"]["status"]["properties"]["shares"];
    assert_eq!(shares["maxItems"], 1000);
    let places = &shares["items"]["properties"]["places"];
    assert_eq!((&places["maxItems"], &places["items"]["maxLength"]), (&json!(8), &json!(512)));
}

/// Verifies K21.
#[test]
fn definition_of_budgets_refuses_growth_beyond_the_limit_and_admits_shrinking() {
    const REFUSED: &str = "shares exceed dollarsPerHour";
    let definition = budget_definition();
    let bare = json!({ "spec": { "dollarsPerHour": "1" } });
    let full: &[u64] = &[400_000, 600_000];
    for (name, old, new, words) in [
        ("first share", bare.clone(), budget("1", &[1_000_000]), ""),
        ("first share beyond", bare.clone(), budget("1", &[1_000_001]), REFUSED),
        ("no status", bare.clone(), bare, ""),
        ("up to the limit", budget("1", &[400_000]), budget("1", full), ""),
        ("a millionth beyond", budget("1", full), budget("1", &[400_001, 600_000]), REFUSED),
        ("all decimals", budget("0.3", &[]), budget("0.300001", &[300_001]), ""),
        ("all decimals, beyond", budget("0.3", &[]), budget("0.300001", &[300_002]), REFUSED),
        ("highest", budget("99999.999999", &[]), budget("99999.999999", &[99_999_999_999]), ""),
        ("limit lowered", budget("1", full), budget("0.5", full), ""),
        ("shrinks above it", budget("0.5", full), budget("0.5", &[399_999, 600_000]), ""),
        ("grows above it", budget("0.5", full), budget("0.5", &[400_001, 600_000]), REFUSED),
        ("first above it", budget("0.5", full), budget("0.5", &[400_000, 600_000, 1]), REFUSED),
        ("limit raised", budget("0.5", full), budget("2", full), ""),
        ("removed by hand", budget("0.5", full), budget("0.5", &[0, 600_000]), ""),
    ] {
        let refused = refused_by(&definition, &old, &new);
        let is_right = refused
            .as_ref()
            .map_or(words.is_empty(), |refused| !words.is_empty() && refused.starts_with(words));
        assert!(is_right, "{name}: {refused:?}");
    }
}

/// Verifies K24.
#[test]
fn definition_of_budgets_requires_a_limit_and_for_ends_a_limit_of_a_period() {
    let definition = budget_definition();
    let no_limit = Some("budget has no limit");
    let no_period = Some("onExhausted is end");
    for (spec, words) in [
        (json!({}), no_limit),
        (json!({ "onExhausted": "keep" }), no_limit),
        (json!({ "dollarsPerHour": "1" }), None),
        (json!({ "dollarsPerDay": "1" }), None),
        (json!({ "dollarsPerMonth": "1" }), None),
        (json!({ "dollarsPerHour": "1", "onExhausted": "keep" }), None),
        (json!({ "dollarsPerHour": "1", "onExhausted": "end" }), no_period),
        (json!({ "dollarsPerDay": "1", "onExhausted": "end" }), None),
        (json!({ "dollarsPerMonth": "1", "onExhausted": "end" }), None),
    ] {
        let object = json!({ "spec": spec });
        let refused = refused_by(&definition, &object, &object);
        assert_eq!(refused.is_some(), words.is_some(), "{spec}: {refused:?}");
        assert!(refused.is_none_or(|it| it.starts_with(words.unwrap())), "{spec}");
    }
    let without = |shares| {
        let mut object = budget("1", shares);
        object["spec"] = json!({ "dollarsPerDay": "1" });
        object
    };
    assert_eq!(refused_by(&definition, &without(&[1]), &without(&[9_000_000])), None);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Verifies K21.
    #[test]
    fn definition_of_budgets_refuses_sums_beyond_the_limit_and_earlier_shares(
        limit in 0_u64..40, before in vec(0_u64..15, 0..6), after in vec(0_u64..15, 0..6),
    ) {
        let dollars = format!("0.{limit:06}");
        let sum = |shares: &[u64]| shares.iter().sum::<u64>();
        let (old, new) = (budget(&dollars, &before), budget(&dollars, &after));
        let refused = refused_by(&budget_definition(), &old, &new);
        prop_assert_eq!(refused.is_some(), sum(&after) > limit.max(sum(&before)), "{:?}", refused);
    }
}

fn status(user: Value, old: &Value, new: Value) -> Review {
    let resource = "cellbudgets/status";
    Review { user, group: GROUP, operation: "UPDATE", resource, old: old.clone(), new }
}

fn rows() -> Vec<Row> {
    let me = || token("worker-1");
    let both = budget("1", &[400_000, 500_000]);
    let by_me = |share| patched(&both, "worker-1", share);
    let only = |numbers: &[u64]| budget("1", numbers);
    let of_no_node = "credentials name no node";
    let of_others = "shares of other nodes are not written by node worker-1";
    let unbound = json!({ "username": "system:serviceaccount:kiyot:kiyot" });
    let administrator = json!({ "username": "kubernetes-admin", "groups": ["system:masters"] });
    let mut later = both.clone();
    later["status"]["shares"][1]["later"] = json!(true);
    let bare = json!({ "metadata": {}, "spec": { "dollarsPerHour": "1" } });
    vec![
        ("own grows", status(me(), &both, by_me(500_000)), ""),
        ("own shrinks", status(me(), &both, by_me(1)), ""),
        ("own removed", status(me(), &both, by_me(0)), ""),
        ("own by a kubelet", status(kubelet("worker-1"), &both, by_me(1)), ""),
        ("own is the first", status(me(), &bare, only(&[1])), ""),
        ("own is the last", status(me(), &only(&[1]), bare.clone()), ""),
        (
            "own beside fields of a later version",
            status(me(), &later, patched(&later, "worker-1", 1)),
            "",
        ),
        ("other grows", status(me(), &both, patched(&both, "worker-2", 600_000)), of_others),
        ("other shrinks", status(me(), &both, patched(&both, "worker-2", 1)), of_others),
        ("other removed", status(me(), &both, only(&[400_000])), of_others),
        ("other made", status(me(), &both, only(&[400_000, 500_000, 1])), of_others),
        ("other's field", status(me(), &both, later), of_others),
        ("all removed", status(me(), &both, bare), of_others),
        (
            "limit by a node",
            Review {
                resource: "cellbudgets",
                ..status(me(), &both, budget("2", &[400_000, 500_000]))
            },
            "budget is not changed by a node",
        ),
        ("no node", status(unbound, &both, both.clone()), of_no_node),
        ("kubelet without a name", status(kubelet(""), &both, both.clone()), of_no_node),
        ("administrator", status(administrator, &both, only(&[0, 500_000])), ""),
    ]
}

fn sweeps() -> Vec<Row> {
    const NO_SWEEP: &str = "is not swept by node worker-1";
    let me = || token("worker-1");
    let both = budget("1", &[400_000, 500_000, 600_000]);
    let of_two = |change: fn(&mut Value)| {
        let mut placed = both.clone();
        placed["status"]["shares"][1]["places"] = json!(["here"]);
        placed["status"]["shares"][1]["spent"] = json!({ "date": "2026-11-30", "dayMicros": 1 });
        let new = swept(&placed, 1, |shares| change(&mut shares[1]));
        status(me(), &placed, new)
    };
    let removed = |old: &Value| status(me(), old, swept(old, 1, |shares| drop(shares.remove(1))));
    let spent = |dates: &[&str]| reported(&[0, 0, 0], dates);
    let mut named = both.clone();
    named["status"]["swept"] = json!("worker-2");
    let after_a_sweep = |share| patched(&named, "worker-1", share);
    vec![
        ("share to 0", of_two(|entry| entry["hourlyMicros"] = json!(0)), ""),
        ("share to less", of_two(|entry| entry["hourlyMicros"] = json!(1)), NO_SWEEP),
        ("share to more", of_two(|entry| entry["hourlyMicros"] = json!(600_000)), NO_SWEEP),
        ("serial alone", of_two(|entry| entry["serial"] = json!(2)), NO_SWEEP),
        (
            "share to 0 with another cost",
            of_two(|entry| {
                entry["hourlyMicros"] = json!(0);
                entry["spent"]["dayMicros"] = json!(0);
            }),
            NO_SWEEP,
        ),
        (
            "share to 0 without a cost",
            of_two(|entry| {
                entry["hourlyMicros"] = json!(0);
                entry.as_object_mut().unwrap().remove("spent");
            }),
            NO_SWEEP,
        ),
        (
            "share to 0 with another field",
            of_two(|entry| {
                entry["hourlyMicros"] = json!(0);
                entry["later"] = json!(1);
            }),
            NO_SWEEP,
        ),
        (
            "two shares to 0",
            status(me(), &both, {
                swept(&both, 1, |shares| {
                    shares[1]["hourlyMicros"] = json!(0);
                    shares[2]["hourlyMicros"] = json!(0);
                })
            }),
            "shares of other nodes are not written",
        ),
        (
            "a new entry",
            status(
                me(),
                &both,
                swept(&both, 1, |shares| {
                    shares.remove(1);
                    shares.push(json!({ "node": "worker-2", "hourlyMicros": 1, "serial": 1 }));
                }),
            ),
            NO_SWEEP,
        ),
        (
            "an entry that was not there",
            status(me(), &budget("1", &[1]), {
                let mut made = budget("1", &[1, 1]);
                made["status"]["swept"] = json!("worker-2");
                made
            }),
            NO_SWEEP,
        ),
        ("own after a sweep", status(me(), &named, after_a_sweep(1)), ""),
        (
            "own after a sweep of itself",
            status(token("worker-2"), &named, patched(&named, "worker-2", 1)),
            "",
        ),
        (
            "own and the share to 0",
            status(me(), &both, {
                swept(&patched(&both, "worker-1", 1), 1, |shares| {
                    shares[1]["hourlyMicros"] = json!(0);
                })
            }),
            "",
        ),
        ("removed with a share", removed(&both), NO_SWEEP),
        ("removed without a cost", removed(&spent(&["2026-11-30", "", "2026-11-30"])), ""),
        (
            "removed in its month",
            { removed(&spent(&["2026-11-30", "2026-11-01", "2026-11-30"])) },
            NO_SWEEP,
        ),
        (
            "removed in the next month of a third node",
            { removed(&spent(&["", "2026-11-30", "2026-12-01"])) },
            "",
        ),
        ("removed in the next year", removed(&spent(&["", "2026-12-31", "2027-01-01"])), ""),
        (
            "removed by the own word alone",
            { removed(&spent(&["2027-01-01", "2026-11-30", "2026-11-30"])) },
            NO_SWEEP,
        ),
        (
            "removed with a share in the next month",
            { removed(&reported(&[0, 1, 0], &["", "2026-11-30", "2026-12-01"])) },
            NO_SWEEP,
        ),
    ]
}

/// Verifies K26.
#[test]
fn policy_of_budgets_admits_a_sweep_of_one_entry_that_keeps_its_cost() {
    let wrong = wrong(&denying(POLICY), &sweeps());
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Verifies K22.
#[test]
fn policy_of_budgets_admits_only_changes_of_the_own_nodes_share() {
    let wrong = wrong(&denying(POLICY), &rows());
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Verifies K22.
#[test]
fn each_part_of_the_policy_of_budgets_denies_what_no_other_part_denies() {
    let policies = denying(POLICY);
    let [policy] = &policies[..] else { panic!("{policies:?}") };
    let parts = ["/spec/validations", "/spec/matchConstraints/resourceRules/0/resources"];
    assert_each_part_denies(policy, &parts, &[rows(), sweeps()].concat());
}
