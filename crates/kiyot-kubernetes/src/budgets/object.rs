//! The object `CellBudget`, as `deploy/crds/cellbudgets.kiyot.elotl.co.yaml` has it.

use kiyot_values::{budget_key::BudgetKey, price::Price};
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
    dollars_per_hour: String,
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
    /// Fields of a later version.
    #[serde(flatten)]
    further: Map<String, Value>,
}

/// The amounts of a budget as a node sees them, in millionths of a dollar an hour.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Amounts {
    /// The limit.
    pub limit: u64,
    /// The shares of other nodes.
    pub others: u64,
    /// The share of the node; `None` without one.
    pub own: Option<u64>,
}

impl Amounts {
    /// Returns the sum of all shares.
    pub fn reserved(&self) -> u64 {
        self.others.saturating_add(self.own.unwrap_or(0))
    }
}

impl CellBudget {
    /// Returns the namespace and the name.
    pub fn key(&self) -> BudgetKey {
        let Metadata { namespace, name, .. } = &self.metadata;
        BudgetKey { namespace: namespace.clone(), name: name.clone() }
    }

    /// Returns the uid, by which a budget differs from a former one of its name.
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

    /// Returns the amounts as a node sees them. A limit that is no price is 0, so that no share
    /// grows: the schema allows none.
    pub fn amounts(&self, node: &str) -> Amounts {
        let limit = self.spec.dollars_per_hour.parse().unwrap_or(Price::FREE).micros();
        let mut amounts = Amounts { limit, others: 0, own: None };
        for share in self.shares() {
            if share.node == node {
                amounts.own = Some(share.hourly_micros);
            } else {
                amounts.others = amounts.others.saturating_add(share.hourly_micros);
            }
        }
        amounts
    }

    /// Returns the patch of the status with another share of a node, of none for 0. It has the
    /// version that was read, so that the API server refuses it once another write came between,
    /// and differs from what was read by its serial at least.
    pub fn patch(&self, node: &str, hourly_micros: u64) -> Value {
        let mut shares = self.shares().to_vec();
        match shares.iter().position(|share| share.node == node) {
            Some(at) if hourly_micros == 0 => {
                shares.remove(at);
            }
            Some(at) => {
                if let Some(share) = shares.get_mut(at) {
                    share.hourly_micros = hourly_micros;
                    share.serial = share.serial.saturating_add(1);
                }
            }
            None if hourly_micros == 0 => {}
            None => {
                let (node, further) = (node.to_owned(), Map::new());
                shares.push(Share { node, hourly_micros, serial: 1, further });
            }
        }
        let amounts = self.amounts(node);
        let reserved = amounts.others.saturating_add(hourly_micros);
        let left = amounts.limit.saturating_sub(reserved);
        // Without the sign of a currency, which columns have.
        let shown = |micros| Price::from_micros(micros).to_string().replace('$', "");
        json!({
            "metadata": { "resourceVersion": self.metadata.resource_version },
            "status": { "shares": shares, "reserved": shown(reserved), "left": shown(left) },
        })
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
    fn patch_changes_the_own_share_alone_and_keeps_fields_of_later_versions() {
        let other = json!({ "node": "b", "hourlyMicros": 500_000, "serial": 4, "later": true });
        let own = |micros, serial| json!({ "node": "a", "hourlyMicros": micros, "serial": serial });
        let both = budget(json!([own(1_000_000, 7), other]));
        let amounts = Amounts { limit: 2_500_000, others: 500_000, own: Some(1_000_000) };
        assert_eq!((both.amounts("a"), both.amounts("a").reserved()), (amounts, 1_500_000));
        let status = |shares, reserved, left| {
            json!({
                "metadata": { "resourceVersion": "7" },
                "status": { "shares": shares, "reserved": reserved, "left": left },
            })
        };
        let grown = status(json!([own(2_000_000, 8), other]), "2.5000", "0.0000");
        assert_eq!(both.patch("a", 2_000_000), grown);
        // A write without another amount is a change too.
        let same = status(json!([own(1_000_000, 8), other]), "1.5000", "1.0000");
        assert_eq!(both.patch("a", 1_000_000), same);
        let none = status(json!([other]), "0.5000", "2.0000");
        assert_eq!(both.patch("a", 0), none);
        let first = status(json!([other, own(1, 1)]), "0.500001", "1.999999");
        assert_eq!(budget(json!([other])).patch("a", 1), first);
    }

    #[test]
    fn budget_without_a_status_has_no_shares_and_one_with_a_wrong_limit_grows_none() {
        let object = |dollars: &str| -> CellBudget {
            serde_json::from_value(json!({
                "metadata": { "namespace": "web", "name": "cells" },
                "spec": { "dollarsPerHour": dollars },
            }))
            .unwrap()
        };
        let none = Amounts { limit: 1_000_000, others: 0, own: None };
        assert_eq!(object("1").amounts("a"), none);
        assert_eq!(object("1e9").amounts("a").limit, 0);
    }
}
