//! The object `CellBudget`, as `deploy/crds/cellbudgets.kiyot.elotl.co.yaml` defines it.

use std::collections::BTreeMap;

use jiff::civil::Date;
use kiyot_values::{
    budget_key::BudgetKey,
    price::{Cost, Price},
    spending::{Period, Spending, SpendingLimits},
};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// A budget with the shares of all nodes.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct CellBudget {
    metadata: Metadata,
    spec: Spec,
    #[serde(default)]
    status: Option<Status>,
}

#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Metadata {
    namespace: String,
    name: String,
    uid: String,
    resource_version: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Spec {
    dollars_per_hour: Option<String>,
    dollars_per_day: Option<String>,
    dollars_per_month: Option<String>,
    on_exhausted: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
#[serde(default)]
struct Status {
    shares: Vec<Share>,
}

/// The share of a node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Share {
    node: String,
    hourly_micros: u64,
    serial: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    spent: Option<Spent>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    places: Option<Vec<String>>,
    /// Fields of a later version.
    #[serde(flatten)]
    further: Map<String, Value>,
}

impl Share {
    fn places(&self) -> &[String] {
        self.places.as_deref().unwrap_or_default()
    }

    fn month(&self) -> Option<Date> {
        Some(self.spent.as_ref()?.read()?.date.first_of_month())
    }

    /// Returns whether the entry counts nothing any more: it has no share, and no cost since
    /// `month`.
    fn is_over(&self, month: Option<Date>) -> bool {
        self.hourly_micros == 0
            && (self.spent.is_none() || self.month().is_some_and(|own| Some(own) < month))
    }
}

/// The cost of a node's cells on a date and in its month.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Spent {
    date: String,
    day_micros: u64,
    month_micros: u64,
}

impl Spent {
    fn read(&self) -> Option<Spending> {
        let (day, month) = (self.day_micros, self.month_micros);
        let (day, month) = (Cost::from_micros(day), Cost::from_micros(month));
        Some(Spending { date: self.date.parse().ok()?, day, month })
    }

    fn of(Spending { date, day, month }: Spending) -> Self {
        let (day_micros, month_micros) = (day.micros(), month.micros());
        Self { date: date.to_string(), day_micros, month_micros }
    }
}

/// The amounts of a budget from the view of a node. Shares are in millionths of a dollar an hour.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Amounts {
    /// The limit; `None` if the budget has no limit.
    pub limit: Option<u64>,
    /// The shares of other nodes.
    pub others: u64,
    /// The share of the node; `None` if it has no entry.
    pub own: Option<u64>,
    /// The limits of cells' cost.
    pub spending_limits: SpendingLimits,
    /// True if cells end once a limit of their cost is reached.
    pub ends_cells: bool,
    /// The summed cost of other nodes' cells, for each date of a report.
    pub others_spent: Vec<Spending>,
    /// The number of other nodes that have reported a cost.
    pub spenders: u64,
    /// The cost that the node has reported.
    pub own_spent: Option<Spending>,
    /// The places of the node's instances, by its entry.
    pub places: Vec<String>,
}

/// Another node's entry that may be swept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct OtherEntry {
    /// The node.
    pub(super) node: String,
    /// The number of the node's last write.
    pub(super) serial: u64,
    /// The share.
    pub(super) hourly_micros: u64,
    /// The places of the node's instances.
    pub(super) places: Vec<String>,
}

impl Amounts {
    /// Returns the sum of all shares.
    pub fn reserved(&self) -> u64 {
        self.others.saturating_add(self.own.unwrap_or(0))
    }

    /// Returns the cost of all nodes' cells that the node knows.
    pub(super) fn spent(&self, own: Spending) -> Spending {
        own.plus_all(&self.others_spent)
    }

    /// Returns the cost in the form of the status; null without a limit of cost.
    fn shown(&self, own: Spending) -> Value {
        if self.spending_limits.is_empty() {
            return Value::Null;
        }
        // A hundredth of a cent is precise enough.
        let shown = |micros: u64| dollars(micros / 100 * 100);
        let spent = self.spent(own);
        let left = |period| {
            let limit = self.spending_limits.of(period)?;
            Some(shown(limit.micros().saturating_sub(spent.of(period).micros())))
        };
        json!({
            "date": spent.date.to_string(),
            "day": shown(spent.day.micros()),
            "dayLeft": left(Period::Day),
            "month": shown(spent.month.micros()),
            "monthLeft": left(Period::Month),
        })
    }
}

/// Returns dollars without the currency sign, because columns have none.
fn dollars(micros: u64) -> String {
    Cost::from_micros(micros).to_string().replace('$', "")
}

impl CellBudget {
    /// Returns the namespace and the name.
    pub fn key(&self) -> BudgetKey {
        let Metadata { namespace, name, .. } = &self.metadata;
        BudgetKey { namespace: namespace.clone(), name: name.clone() }
    }

    /// Returns the uid, which tells a budget from a former budget of its name.
    pub fn uid(&self) -> &str {
        &self.metadata.uid
    }

    /// Returns the version.
    pub fn version(&self) -> &str {
        &self.metadata.resource_version
    }

    fn shares(&self) -> &[Share] {
        self.status.as_ref().map(|status| status.shares.as_slice()).unwrap_or_default()
    }

    /// Returns the amounts from the view of a node. A limit that is not a price counts as 0, so
    /// that no share grows. The schema allows only prices.
    pub fn amounts(&self, node: &str) -> Amounts {
        let Spec { dollars_per_hour, dollars_per_day, dollars_per_month, on_exhausted } =
            &self.spec;
        let limit = dollars_per_hour.as_ref().map(|it| it.parse().unwrap_or(Price::FREE).micros());
        let cost = |limit: &String| limit.parse().unwrap_or_default();
        let spending_limits = SpendingLimits {
            day: dollars_per_day.as_ref().map(cost),
            month: dollars_per_month.as_ref().map(cost),
        };
        let ends_cells = on_exhausted.as_deref() == Some("end");
        let mut amounts = Amounts { limit, spending_limits, ends_cells, ..Amounts::default() };
        let mut others: BTreeMap<Date, Spending> = BTreeMap::new();
        for share in self.shares() {
            let spent = share.spent.as_ref().and_then(Spent::read);
            if share.node == node {
                amounts.own = Some(share.hourly_micros);
                amounts.own_spent = spent;
                amounts.places = share.places().to_vec();
                continue;
            }
            amounts.others = amounts.others.saturating_add(share.hourly_micros);
            if let Some(spent) = spent {
                let none = Spending { date: spent.date, ..Spending::default() };
                let sum = others.entry(spent.date).or_insert(none);
                *sum = sum.plus(spent);
                amounts.spenders += 1;
            }
        }
        amounts.others_spent = others.into_values().collect();
        amounts
    }

    /// Returns the patch of the status with a new share of a node and the cost of its cells.
    ///
    /// The cost is kept while a limit counts it. Without a share and a cost, the patch removes the
    /// node's entry. An entry with a share has the places of the node's instances, if they are
    /// known.
    ///
    /// The patch has the version that was read, so that the API server refuses it after another
    /// write. It always changes the object, at least the entry's serial.
    pub fn patch(
        &self,
        node: &str,
        hourly_micros: u64,
        spent: Spending,
        places: Option<&[String]>,
    ) -> Value {
        let amounts = self.amounts(node);
        let counts = !amounts.spending_limits.is_empty() && spent.month > Cost::default();
        let own = counts.then(|| Spent::of(spent));
        let places = places.unwrap_or(&amounts.places);
        let is_placed = hourly_micros > 0 && !places.is_empty();
        let places = is_placed.then(|| places.to_vec());
        let mut shares = self.shares().to_vec();
        match shares.iter().position(|share| share.node == node) {
            Some(at) if hourly_micros == 0 && own.is_none() => {
                shares.remove(at);
            }
            Some(at) => {
                if let Some(share) = shares.get_mut(at) {
                    share.hourly_micros = hourly_micros;
                    share.serial = share.serial.saturating_add(1);
                    share.spent = own;
                    share.places = places;
                }
            }
            None if hourly_micros == 0 && own.is_none() => {}
            None => {
                let (node, further) = (node.to_owned(), Map::new());
                let serial = 1;
                shares.push(Share { node, hourly_micros, serial, spent: own, places, further });
            }
        }
        let reserved = amounts.others.saturating_add(hourly_micros);
        self.patch_of(&shares, (&amounts, reserved), ("spent", amounts.shown(spent)))
    }

    fn patch_of(
        &self,
        shares: &[Share],
        (amounts, reserved): (&Amounts, u64),
        (field, value): (&str, Value),
    ) -> Value {
        let left = amounts.limit.map(|limit| dollars(limit.saturating_sub(reserved)));
        json!({
            "metadata": { "resourceVersion": self.metadata.resource_version },
            "status": {
                "shares": shares,
                "reserved": dollars(reserved),
                "left": left,
                field: value,
            },
        })
    }

    /// Returns the latest month in which another node has reported a cost.
    fn latest_month(&self, node: &str) -> Option<Date> {
        self.shares().iter().filter(|share| share.node != node).filter_map(Share::month).max()
    }

    /// Returns the entries of other nodes that may be swept: entries with a share and known places,
    /// and entries that count nothing any more. A third node's report must show that a month is
    /// over, as the policy requires.
    pub(super) fn sweepable(&self, node: &str) -> impl Iterator<Item = OtherEntry> {
        let latest = self.latest_month(node);
        let may_be = move |share: &&Share| {
            share.node != node
                && (share.hourly_micros > 0 && !share.places().is_empty() || share.is_over(latest))
        };
        self.shares().iter().filter(may_be).map(|share| OtherEntry {
            node: share.node.clone(),
            serial: share.serial,
            hourly_micros: share.hourly_micros,
            places: share.places().to_vec(),
        })
    }

    /// Returns the patch that sweeps another node's entry. It sets the share to 0 and keeps the
    /// cost. It removes an entry that counts nothing any more.
    pub(super) fn sweep(&self, entry: &OtherEntry, today: Date) -> Option<Value> {
        let mut shares = self.shares().to_vec();
        let at = shares.iter().position(|share| share.node == entry.node)?;
        let share = shares.get_mut(at)?;
        if share.hourly_micros > 0 {
            share.hourly_micros = 0;
        } else if share.is_over(Some(today.first_of_month())) {
            shares.remove(at);
        } else {
            return None;
        }
        let amounts = self.amounts(&entry.node);
        Some(self.patch_of(&shares, (&amounts, amounts.others), ("swept", json!(entry.node))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn budget(shares: Value) -> CellBudget {
        let metadata = json!({
            "namespace": "web", "name": "cells", "uid": "u", "resourceVersion": "7",
        });
        let (spec, status) = (json!({ "dollarsPerHour": "2.50" }), json!({ "shares": shares }));
        let object = json!({ "metadata": metadata, "spec": spec, "status": status });
        serde_json::from_value(object).unwrap()
    }

    /// Verifies K22.
    #[test]
    fn patch_changes_only_the_own_share_and_keeps_fields_of_later_versions() {
        let other = json!({ "node": "b", "hourlyMicros": 500_000, "serial": 4, "later": true });
        let own = |micros, serial| json!({ "node": "a", "hourlyMicros": micros, "serial": serial });
        let both = budget(json!([own(1_000_000, 7), other]));
        assert_eq!((both.uid(), both.version()), ("u", "7"));
        let amounts = Amounts {
            limit: Some(2_500_000),
            others: 500_000,
            own: Some(1_000_000),
            ..Amounts::default()
        };
        assert_eq!((both.amounts("a"), both.amounts("a").reserved()), (amounts, 1_500_000));
        let status = |shares, reserved, left| {
            json!({
                "metadata": { "resourceVersion": "7" },
                "status": { "shares": shares, "reserved": reserved, "left": left, "spent": null },
            })
        };
        let patch =
            |budget: &CellBudget, share| budget.patch("a", share, Spending::default(), None);
        let grown = status(json!([own(2_000_000, 8), other]), "2.5000", "0.0000");
        assert_eq!(patch(&both, 2_000_000), grown);
        // A write of the same amount is a change, too.
        let same = status(json!([own(1_000_000, 8), other]), "1.5000", "1.0000");
        assert_eq!(patch(&both, 1_000_000), same);
        let none = status(json!([other]), "0.5000", "2.0000");
        assert_eq!(patch(&both, 0), none);
        let first = status(json!([other, own(1, 1)]), "0.500001", "1.999999");
        assert_eq!(patch(&budget(json!([other])), 1), first);
    }

    /// Verifies K24.
    #[test]
    fn patch_reports_the_cost_of_cells_while_a_limit_counts_it() {
        let spent = |date: &str, day, month| Spending {
            date: date.parse().unwrap(),
            day: Cost::from_micros(day),
            month: Cost::from_micros(month),
        };
        let entry = |node, micros, date, day, month| {
            let spent = json!({ "date": date, "dayMicros": day, "monthMicros": month });
            json!({ "node": node, "hourlyMicros": micros, "serial": 1, "spent": spent })
        };
        let shares = json!([
            entry("b", 5, "2026-11-29", 7_000_000, 8_000_000),
            entry("c", 6, "2026-11-30", 500_000, 600_000),
            entry("d", 0, "2026-11-30", 500_000, 600_000),
            entry("e", 0, "2026-02-30", 1, 1),
        ]);
        let mut object = budget(shares.clone());
        object.spec = Spec {
            dollars_per_day: Some("10".to_owned()),
            dollars_per_month: Some("9.5".to_owned()),
            on_exhausted: Some("end".to_owned()),
            ..Spec::default()
        };
        let (day, month) = (Cost::from_micros(10_000_000), Cost::from_micros(9_500_000));
        let expected = Amounts {
            others: 11,
            spending_limits: SpendingLimits { day: Some(day), month: Some(month) },
            ends_cells: true,
            others_spent: vec![
                spent("2026-11-29", 7_000_000, 8_000_000),
                spent("2026-11-30", 1_000_000, 1_200_000),
            ],
            spenders: 3,
            ..Amounts::default()
        };
        assert_eq!(object.amounts("a"), expected);
        let status = &object.patch("a", 0, spent("2026-11-30", 250_000, 750_000), None)["status"];
        let shown = json!({
            "date": "2026-11-30",
            "day": "1.2500", "dayLeft": "8.7500",
            "month": "9.9500", "monthLeft": "0.0000",
        });
        assert_eq!((&status["spent"], &status["left"]), (&shown, &Value::Null));
        assert_eq!(status["shares"][4], entry("a", 0, "2026-11-30", 250_000, 750_000));
        // Nothing was spent in this month, and there is no limit.
        let none = spent("2026-12-01", 0, 0);
        let left = object.patch("d", 0, none, None)["status"]["shares"].clone();
        assert_eq!(left.as_array().unwrap().len(), 3);
        let status = &budget(shares).patch("d", 1, spent("2026-11-30", 1, 1), None)["status"];
        assert_eq!(status["shares"][2], json!({ "node": "d", "hourlyMicros": 1, "serial": 2 }));
        assert_eq!(status["spent"], Value::Null);
    }

    /// Verifies K26.
    #[test]
    fn entry_has_the_places_of_its_node_while_it_has_a_share() {
        let none = Spending::default();
        let entry = |places: Value| {
            let mut entry = json!({ "node": "a", "hourlyMicros": 1, "serial": 1 });
            entry["places"] = places;
            entry
        };
        let places = |budget: &CellBudget, share, places: Option<&[String]>| {
            budget.patch("a", share, none, places)["status"]["shares"][0]["places"].clone()
        };
        let (here, there) = (["here".to_owned()], ["there".to_owned()]);
        let placed = budget(json!([entry(json!(here))]));
        assert_eq!(placed.amounts("a").places, here);
        assert_eq!(places(&budget(json!([])), 1, Some(&here)), json!(here));
        assert_eq!(places(&placed, 2, Some(&there)), json!(there));
        assert_eq!(places(&placed, 2, None), json!(here), "places are unknown for a moment");
        assert_eq!(places(&placed, 2, Some(&[])), Value::Null);
        // The entry of another node stays as it is, even if it is empty.
        let shares = placed.patch("b", 1, none, Some(&there))["status"]["shares"].clone();
        assert_eq!(shares[0], entry(json!(here)));
        let empty = budget(json!([entry(json!([]))]));
        assert_eq!(empty.patch("b", 1, none, None)["status"]["shares"][0], entry(json!([])));
    }

    /// Verifies K26.
    #[test]
    fn sweep_gives_back_the_share_and_keeps_the_cost() {
        let entry = |node: &str, micros: u64, date: Option<&str>| {
            let mut entry = json!({
                "node": node, "hourlyMicros": micros, "serial": 3, "places": ["here"], "later": 1,
            });
            if let Some(date) = date {
                entry["spent"] = json!({ "date": date, "dayMicros": 1, "monthMicros": 2 });
            }
            entry
        };
        let before = [
            entry("me", 5, Some("2027-03-01")),
            entry("b", 7, Some("2026-11-30")),
            entry("c", 0, Some("2026-11-30")),
            entry("d", 0, Some("2026-12-01")),
            entry("e", 0, None),
        ];
        let object = budget(json!(before));
        let nodes = |object: &CellBudget| -> Vec<String> {
            object.sweepable("me").map(|entry| entry.node).collect()
        };
        // For c, the month of d is a third node's report. For d, no node has reported a later
        // month.
        assert_eq!(nodes(&object), ["b", "c", "e"]);
        let without_a_third = budget(json!([before[0], before[2]]));
        assert!(nodes(&without_a_third).is_empty(), "a node's own month proves nothing");
        let mut without_places = before[1].clone();
        without_places.as_object_mut().unwrap().remove("places");
        assert!(nodes(&budget(json!([without_places]))).is_empty());
        let swept = |node: &str, today: &str| {
            let (serial, hourly_micros, places) = (3, 0, Vec::new());
            let entry = OtherEntry { node: node.to_owned(), serial, hourly_micros, places };
            object.sweep(&entry, today.parse().unwrap())
        };
        let patch = swept("b", "2026-11-30").unwrap();
        let mut expected = before.to_vec();
        expected[1]["hourlyMicros"] = json!(0);
        assert_eq!(
            patch["status"],
            json!({
                "shares": expected, "reserved": "0.000005", "left": "2.499995", "swept": "b",
            })
        );
        assert_eq!(patch["metadata"]["resourceVersion"], "7");
        assert_eq!(swept("c", "2026-11-30"), None, "its month goes on here");
        for (node, at) in [("c", 2), ("e", 4)] {
            let mut left = before.to_vec();
            left.remove(at);
            assert_eq!(swept(node, "2026-12-01").unwrap()["status"]["shares"], json!(left));
        }
        assert_eq!(swept("unknown", "2026-12-01"), None);
    }

    #[test]
    fn budget_without_a_status_has_no_shares_and_a_wrong_limit_counts_as_zero() {
        let object = |dollars: &str| -> CellBudget {
            serde_json::from_value(json!({
                "metadata": { "namespace": "web", "name": "cells" },
                "spec": { "dollarsPerHour": dollars },
            }))
            .unwrap()
        };
        let none = Amounts { limit: Some(1_000_000), ..Amounts::default() };
        assert_eq!(object("1").amounts("a"), none);
        assert_eq!(object("1e9").amounts("a").limit, Some(0));
    }
}
