//! The configured warm pools, with the offerings of the provider's catalogue.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use futures::future::OptionFuture;
use kiyot_config::WarmPool;
use kiyot_engine::{
    Wanted,
    engine::Pool,
    placement::{self, Candidate, Catalogue, Needs, NoFit, Rules},
    provider::ProviderError,
};
use kiyot_values::backoff::doubled;
use tokio::{sync::watch, time::sleep};

use super::shared::Shared;

/// The period in which the offerings of pools are chosen again: prices change by the hour.
const PERIOD: Duration = Duration::from_secs(300);
/// The first pause after a catalogue that could not be read.
const RETRY_PAUSE: Duration = Duration::from_secs(10);

/// Keeps the engine's pools as configured, until the daemon stops.
pub(super) async fn run(
    shared: Arc<Shared>,
    rules: Arc<Rules>,
    mut configured: watch::Receiver<Vec<WarmPool>>,
) {
    let mut unfit = BTreeSet::new();
    // The consecutive readings that failed.
    let mut failures = 0_u32;
    loop {
        let pools = configured.borrow_and_update().clone();
        // Before the catalogue is known: cells of other pools end, and those of a previous daemon
        // can be taken.
        set(&shared, &rules, &pools, |_| None);
        let mut wait = None;
        if !pools.is_empty() {
            wait = match shared.stop.run_until_cancelled(read(&shared)).await {
                None => return,
                Some(Ok((catalogue, parameters))) => {
                    failures = 0;
                    shared.with_core(|core, now| {
                        ((), core.engine.set_pool_parameters(parameters, now))
                    });
                    let candidates = |pool: &WarmPool| {
                        let ranked = candidates(&catalogue, &rules, pool, &mut unfit);
                        let needs = Needs::of_pool(pool, &rules.defaults);
                        Some((ranked, placement::rank_further(&catalogue, &needs, &rules)))
                    };
                    set(&shared, &rules, &pools, candidates);
                    Some(PERIOD)
                }
                Some(Err(error)) => {
                    if failures == 0 {
                        let error = &error as &dyn std::error::Error;
                        tracing::warn!(error, "catalogue not read, warm pools are not filled");
                    }
                    let pause = doubled(RETRY_PAUSE, failures, PERIOD);
                    failures = failures.saturating_add(1);
                    Some(pause)
                }
            };
        }
        tokio::select! {
            () = shared.stop.cancelled() => return,
            changed = configured.changed() => {
                if changed.is_err() {
                    return;
                }
            }
            Some(()) = OptionFuture::from(wait.map(sleep)) => {}
        }
    }
}

/// Returns the catalogue and the provider's parameters of a pod without annotations.
async fn read(
    shared: &Shared,
) -> Result<(Arc<Catalogue>, BTreeMap<String, String>), ProviderError> {
    let catalogue = shared.prices.current(&*shared.provider).await?;
    let parameters = shared.provider.parameters(&Wanted::default()).await?;
    Ok((catalogue, parameters))
}

/// Passes the pools to the engine, each with its offerings and the further ones; `None` keeps those
/// that a pool has.
fn set(
    shared: &Arc<Shared>,
    rules: &Rules,
    pools: &[WarmPool],
    mut candidates: impl FnMut(&WarmPool) -> Option<(Vec<Candidate>, Vec<Candidate>)>,
) {
    let pools: Vec<Pool> = pools
        .iter()
        .map(|pool| {
            let (candidates, further) = candidates(pool).unzip();
            Pool {
                name: pool.to_string().into(),
                machine: Needs::of_pool(pool, &rules.defaults).machine(),
                count: pool.count,
                ttl: pool.ttl,
                candidates,
                further: further.unwrap_or_default(),
            }
        })
        .collect();
    shared.with_core(|core, now| ((), core.engine.set_pools(pools, now)));
}

/// Returns the offerings of a pool. A pool that no offering fits is logged once.
fn candidates(
    catalogue: &Catalogue,
    rules: &Rules,
    pool: &WarmPool,
    unfit: &mut BTreeSet<String>,
) -> Vec<Candidate> {
    let needs = Needs::of_pool(pool, &rules.defaults);
    let ranked = placement::rank(catalogue, &needs, rules, &());
    let name = pool.to_string();
    if !ranked.is_empty() {
        unfit.remove(&name);
    } else if unfit.insert(name) {
        let error = NoFit::new(catalogue, &needs, rules);
        tracing::error!(%pool, error = &error as &dyn std::error::Error, "warm pool stays empty");
    }
    ranked
}
