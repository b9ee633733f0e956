//! The configured warm pools, with the offerings of the provider's catalogue.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use futures::future::{OptionFuture, join_all};
use kiyot_config::WarmPool;
use kiyot_engine::{
    Wanted,
    engine::{Pool, ProviderKey},
    placement::{self, Candidate, Catalogue, Needs, NoFit, NodeShare},
    provider::ProviderError,
};
use kiyot_values::backoff::doubled;
use tokio::{sync::watch, time::sleep};

use super::{providers::CellSource, shared::Shared};

/// The period between choices of a pool's offerings: prices change by the hour.
const PERIOD: Duration = Duration::from_secs(300);
/// The first pause after a failed read of a catalogue.
const RETRY_PAUSE: Duration = Duration::from_secs(10);

/// A catalogue with a provider's parameters.
type Read = (Arc<Catalogue>, BTreeMap<String, String>);
/// A pool's offerings, its fallback offerings, and the part of the node that each cell takes.
type Offerings = (Vec<Candidate>, Vec<Candidate>, NodeShare);

/// Keeps the engine's pools as configured, until the daemon stops.
pub(super) async fn run(shared: Arc<Shared>, mut configured: watch::Receiver<Vec<WarmPool>>) {
    let mut unfit = BTreeSet::new();
    // Consecutive failed reads.
    let mut failures = 0_u32;
    loop {
        let pools = configured.borrow_and_update().clone();
        // Also before the catalogues are known: cells of other pools end, and cells of a previous
        // daemon can be taken.
        set(&shared, &pools, |_, _| None);
        let mut wait = None;
        if !pools.is_empty() {
            let Some(read) = shared.stop.run_until_cancelled(read(&shared, &pools)).await else {
                return;
            };
            let mut catalogues = BTreeMap::new();
            let mut has_failed = false;
            for (key, outcome) in read {
                match outcome {
                    Ok((catalogue, parameters)) => {
                        catalogues.insert(key, catalogue);
                        shared.with_core(|core, now| {
                            ((), core.engine.set_pool_parameters(key, parameters, now))
                        });
                    }
                    Err(error) => {
                        has_failed = true;
                        if failures == 0 {
                            let error = &error as &dyn std::error::Error;
                            tracing::warn!(
                                provider = key,
                                error,
                                "catalogue not read, warm pools are not filled"
                            );
                        }
                    }
                }
            }
            set(&shared, &pools, |source, pool| {
                Some(candidates(catalogues.get(source.key())?, source, pool, &mut unfit))
            });
            wait = Some(if has_failed { doubled(RETRY_PAUSE, failures, PERIOD) } else { PERIOD });
            failures = if has_failed { failures.saturating_add(1) } else { 0 };
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

/// Returns the provider of a pool: the configured one, or else the first.
fn source_of(shared: &Shared, pool: &WarmPool) -> Option<Arc<CellSource>> {
    match pool.provider {
        Some(provider) => shared.sources.get(provider.name()),
        None => shared.sources.first(),
    }
}

/// Returns the catalogues of the pools' providers, with each provider's parameters for a pod
/// without annotations.
async fn read(
    shared: &Shared,
    pools: &[WarmPool],
) -> Vec<(ProviderKey, Result<Read, ProviderError>)> {
    let sources = shared.sources.configured().into_iter().filter(|source| {
        let is_own =
            |pool: &WarmPool| source_of(shared, pool).is_some_and(|it| it.key() == source.key());
        pools.iter().any(is_own)
    });
    join_all(sources.map(|source| async move {
        let read = async {
            let catalogue = source.catalogue().await?;
            Ok((catalogue, source.provider.parameters(&Wanted::default()).await?))
        };
        (source.key(), read.await)
    }))
    .await
}

/// Passes the pools to the engine with their offerings; `None` keeps a pool's current offerings.
fn set(
    shared: &Arc<Shared>,
    pools: &[WarmPool],
    mut offerings: impl FnMut(&CellSource, &WarmPool) -> Option<Offerings>,
) {
    let pools = pools.iter().filter_map(|pool| {
        let source = source_of(shared, pool)?;
        let (candidates, further, share) = match offerings(&source, pool) {
            Some((candidates, further, share)) => (Some(candidates), further, share),
            None => (None, Vec::new(), NodeShare::default()),
        };
        Some(Pool {
            name: pool.to_string().into(),
            provider: source.key(),
            machine: Needs::of_pool(pool, &source.rules.defaults).machine(),
            count: pool.count,
            ttl: pool.ttl,
            candidates,
            further,
            share,
        })
    });
    let pools: Vec<Pool> = pools.collect();
    shared.with_core(|core, now| ((), core.engine.set_pools(pools, now)));
}

/// Returns the offerings of a pool. Logs once that no offering fits it.
fn candidates(
    catalogue: &Catalogue,
    source: &CellSource,
    pool: &WarmPool,
    unfit: &mut BTreeSet<String>,
) -> Offerings {
    let rules = &*source.rules;
    let needs = Needs::of_pool(pool, &rules.defaults);
    let ranked = placement::rank(catalogue, &needs, rules, &());
    let name = pool.to_string();
    if !ranked.is_empty() {
        unfit.remove(&name);
    } else if unfit.insert(name) {
        let error = NoFit::new(catalogue, &needs, rules);
        tracing::error!(%pool, error = &error as &dyn std::error::Error, "warm pool stays empty");
    }
    let share = NodeShare::of(catalogue, &needs).unwrap_or_default();
    (ranked, placement::rank_further(catalogue, &needs, rules), share)
}
