//! The account of a pod's cell, for `crictl inspectp`.

use kiyot_engine::{
    engine::{Account, Histogram},
    placement::Accuracy,
};
use serde_json::{Map, Value, json};

/// Returns the entries of a cell: its instance with price and cost, the steps of its start, the
/// starts of all cells of its kind since the daemon started, and the cells of its namespace on this
/// node.
pub(super) fn entries(account: &Account) -> Map<String, Value> {
    let id = account.instance.as_ref().map(|instance| instance.0.as_str()).unwrap_or_default();
    let mut instance = Map::from_iter([("id".to_owned(), id.into())]);
    if let Some(candidate) = &account.offering {
        let offering = &candidate.offering;
        let is = |accuracy| candidate.accuracy == accuracy;
        instance.insert("type".to_owned(), offering.instance_type.as_str().into());
        instance.insert("zone".to_owned(), offering.zone.as_str().into());
        instance.insert("market".to_owned(), offering.market.to_string().into());
        instance.insert("pricePerHour".to_owned(), candidate.price.to_string().into());
        instance.insert("priceIsAtMost".to_owned(), is(Accuracy::AtMost).into());
        instance.insert("priceIsEstimate".to_owned(), is(Accuracy::Estimate).into());
        instance.insert("cost".to_owned(), account.cost.to_string().into());
    }
    let steps = account.timeline.since(account.created_unix_nanos);
    let start: Map<String, Value> =
        steps.map(|(step, millis)| (format!("{step}Ms"), millis.into())).collect();
    let (kind, starts) = &account.starts;
    let steps: Map<String, Value> =
        starts.steps().map(|(step, times)| (format!("{step}Ms"), histogram(times))).collect();
    let namespace = account.namespace;
    Map::from_iter([
        ("instance".to_owned(), instance.into()),
        ("createdUnixNanos".to_owned(), account.created_unix_nanos.into()),
        ("start".to_owned(), start.into()),
        (
            "starts".to_owned(),
            json!({
                "cells": kind.to_string(),
                "steps": steps,
                "costMicros": histogram(starts.cost()),
            }),
        ),
        (
            "namespace".to_owned(),
            json!({
                "cells": namespace.cells,
                "pricePerHour": namespace.price.to_string(),
                "cost": namespace.cost.to_string(),
            }),
        ),
    ])
}

/// Returns a histogram with the number of values up to each bound.
fn histogram(histogram: &Histogram) -> Value {
    let bound = |bound: Option<u64>| bound.map_or("+Inf".to_owned(), |bound| bound.to_string());
    let buckets: Map<String, Value> =
        histogram.buckets().map(|(le, count)| (bound(le), count.into())).collect();
    json!({ "count": histogram.count(), "sum": histogram.sum(), "le": buckets })
}
