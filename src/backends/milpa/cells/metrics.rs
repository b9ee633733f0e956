//! Metrics of cells: each scrape asks the engine.

use std::{fmt, sync::Arc};

use kiyot_engine::engine::Metrics;

use super::shared::{Shared, now};
use crate::metrics::{
    BOOTS, BOOTS_LIMIT, BUDGET_REFUSALS, BUDGET_SHARES, BUDGET_WAITING, CELL_START, CELLS,
    CELLS_LIMIT, CORDONED, COST, LAUNCH_PAUSES, ORDERS_WAITING, POOL_CELLS, POOL_CELLS_WANTED,
    POOL_TAKES, PRICE, PRICE_LIMIT, PROVIDER_CELLS, Page, Source, StableLabels,
};

/// Bounds the namespaces with labels of their own.
const MAX_NAMESPACES: usize = 50;
/// The namespace label of cells without a pod.
const POOLS: &str = "(pools)";

#[derive(Debug)]
pub(crate) struct CellMetrics {
    shared: Arc<Shared>,
    namespaces: StableLabels,
}

impl CellMetrics {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self { shared, namespaces: StableLabels::new(MAX_NAMESPACES) }
    }
}

impl Source for CellMetrics {
    fn write(&self, page: &mut Page<'_>) -> fmt::Result {
        self.shared.launches.write(page)?;
        // The lock is released before writing.
        let metrics = self.shared.core().engine.metrics(now());
        let providers = self.shared.core().engine.provider_views();
        let Metrics { limits, pools, namespaces, .. } = &metrics;
        let mut family = page.family(&CELLS)?;
        for (state, count) in &metrics.cells {
            family.gauge(&[state], *count as f64)?;
        }
        let mut family = page.family(&PROVIDER_CELLS)?;
        for provider in providers {
            family.gauge(&[&provider.key, provider.state.name()], provider.cells as f64)?;
        }
        page.family(&CORDONED)?.gauge(&[], f64::from(u8::from(metrics.is_cordoned)))?;
        page.family(&LAUNCH_PAUSES)?.counter(&[], metrics.launch_pauses)?;
        page.family(&CELLS_LIMIT)?.gauge(&[], limits.max_cells as f64)?;
        page.family(&BOOTS)?.gauge(&[], metrics.boots as f64)?;
        if let Some(limit) = limits.boots {
            page.family(&BOOTS_LIMIT)?.gauge(&[], limit as f64)?;
        }
        page.family(&ORDERS_WAITING)?.gauge(&[], metrics.orders_waiting as f64)?;
        let mut family = page.family(&POOL_CELLS)?;
        family.gauge(&["idle"], pools.idle as f64)?;
        family.gauge(&["booting"], pools.booting as f64)?;
        let mut family = page.family(&POOL_TAKES)?;
        family.counter(&["hit"], pools.hits)?;
        family.counter(&["miss"], pools.misses)?;
        page.family(&POOL_CELLS_WANTED)?.gauge(&[], pools.wanted as f64)?;
        let mut family = page.family(&PRICE_LIMIT)?;
        for (of, limit) in [("node", limits.price), ("namespace", limits.namespace_price)] {
            if let Some(limit) = limit {
                family.gauge(&[of], dollars(limit.micros()))?;
            }
        }
        if let Some(budgets) = &metrics.budgets {
            page.family(&BUDGET_SHARES)?.gauge(&[], dollars(budgets.shares.micros()))?;
            page.family(&BUDGET_WAITING)?.gauge(&[], budgets.waiting as f64)?;
            let mut family = page.family(&BUDGET_REFUSALS)?;
            for (limit, count) in &budgets.refusals {
                family.counter(&[limit], *count)?;
            }
        }
        let shown =
            |namespace: &str| if namespace.is_empty() { POOLS } else { namespace }.to_owned();
        let names: Vec<String> = namespaces.keys().map(|name| shown(name)).collect();
        let labels = self.namespaces.admit(names.iter().map(String::as_str));
        let mut sums = std::collections::BTreeMap::<&str, (u64, u64)>::new();
        for (label, (_, account)) in labels.into_iter().zip(namespaces) {
            let (price, cost) = sums.entry(label).or_default();
            *price = price.saturating_add(account.price.micros());
            *cost = cost.saturating_add(account.cost.micros());
        }
        let mut family = page.family(&PRICE)?;
        for (namespace, (price, _)) in &sums {
            family.gauge(&[namespace], dollars(*price))?;
        }
        let mut family = page.family(&COST)?;
        for (namespace, (_, cost)) in &sums {
            family.counter_f64(&[namespace], dollars(*cost))?;
        }
        let mut family = page.family(&CELL_START)?;
        for (step, start, histogram) in metrics.starts {
            let buckets = histogram.counts().map(|(bound, count)| {
                (bound.map_or(f64::INFINITY, |millis| millis as f64 / 1e3), count)
            });
            family.histogram(&[step, start], histogram.sum() as f64 / 1e3, buckets.collect())?;
        }
        Ok(())
    }
}

fn dollars(micros: u64) -> f64 {
    micros as f64 / 1e6
}
