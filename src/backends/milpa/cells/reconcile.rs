//! Compares the cells with the provider's instances.

use std::{
    collections::{BTreeSet, HashSet},
    sync::Arc,
    time::Duration,
};

use kiyot_proto::store::{self, CellPhase, SandboxMeta};
use tokio::{task::JoinSet, time::timeout};

use super::{
    super::{
        id::CellId,
        providers::{InstanceId, ProviderError},
        store::{Batch, StoreError, Table},
    },
    message::Message,
    record::Record,
    shared::Shared,
    state::State,
};

/// Bounds a listing of the provider's instances.
const LIST_TIMEOUT: Duration = Duration::from_secs(60);
/// Bounds the termination of stray instances.
const STRAY_TIMEOUT: Duration = Duration::from_secs(300);

/// Returns the stored cells with their states after a start. Ended cells become tombstones while
/// their sandboxes exist, and are dropped otherwise.
pub(super) async fn read(
    shared: &Shared,
    records: Vec<(String, store::Cell)>,
    sandboxes: &[(String, SandboxMeta)],
) -> Result<Vec<(Record, State)>, StoreError> {
    let with_sandbox: BTreeSet<&str> =
        sandboxes.iter().map(|(_, sandbox)| sandbox.cell.as_str()).collect();
    let (mut living, mut gone, mut dropped) = (Vec::new(), Vec::new(), Batch::default());
    let known: BTreeSet<&str> = records.iter().map(|(key, _)| key.as_str()).collect();
    for (_, sandbox) in
        sandboxes.iter().filter(|(_, sandbox)| !known.contains(sandbox.cell.as_str()))
    {
        // Without its record its agent can't connect. The pod keeps its state until the cell's end
        // is confirmed.
        if let Ok(id) = CellId::parse(&sandbox.cell) {
            tracing::error!(
                cell = %id,
                sandbox = sandbox.id,
                "cell has no readable record, cell ends"
            );
            living.push(Record::lost(id, sandbox));
        }
    }
    drop(known);
    for (key, cell) in records {
        let Ok(id) = CellId::parse(&key) else {
            tracing::error!(key, "cell record dropped, its key is not a cell id");
            dropped.remove(Table::Cells, &key);
            continue;
        };
        let (record, state) = Record::resumed(
            id,
            cell,
            shared.config.boot_id.as_deref(),
            with_sandbox.contains(key.as_str()),
        );
        match state {
            State::Ended { reason } if record.was_bound => gone.push((record, reason)),
            State::Ended { .. } => {
                dropped.remove(Table::Cells, &key);
            }
            _ => living.push((record, state)),
        }
    }
    gone.sort_by_key(|(record, _)| record.created_unix_nanos);
    for (record, reason) in gone {
        for forgotten in shared.tombstones.add(record.id, reason.to_string()) {
            dropped.remove(Table::Cells, forgotten.as_str());
        }
    }
    shared.store.commit(dropped).await?;
    Ok(living)
}

/// Lists the provider's instances at each period, and at once when a link breaks, until the daemon
/// stops.
pub(super) async fn watch(shared: Arc<Shared>) {
    let mut strays = JoinSet::new();
    loop {
        let unknown = tokio::select! {
            () = shared.stop.cancelled() => return,
            unknown = compare(&shared) => unknown,
        };
        while strays.try_join_next().is_some() {}
        // One termination at a time: instances that remain are listed again.
        if !unknown.is_empty() && strays.is_empty() {
            strays.spawn(end_strays(Arc::clone(&shared), unknown));
        }
        tokio::select! {
            () = shared.stop.cancelled() => return,
            () = shared.list_now.notified() => {}
            () = tokio::time::sleep(shared.config.list_interval) => {}
        }
    }
}

/// Notifies cells whose instance has ended. Returns stray instances: those of no cell.
async fn compare(shared: &Shared) -> Vec<InstanceId> {
    // Read before the list: an instance that is launched during the listing may be absent from it.
    let expected: Vec<_> = {
        let entries = shared.entries.read().unwrap_or_else(std::sync::PoisonError::into_inner);
        entries.values().map(|entry| (Arc::clone(entry), entry.view())).collect()
    };
    let listed = match timeout(LIST_TIMEOUT, shared.provider.list_owned()).await {
        Ok(Ok(listed)) => listed,
        Ok(Err(error)) => {
            tracing::warn!(
                error = &error as &dyn std::error::Error,
                "provider instances not listed"
            );
            return Vec::new();
        }
        Err(_) => {
            tracing::warn!(
                seconds = LIST_TIMEOUT.as_secs(),
                "listing of provider instances timed out"
            );
            return Vec::new();
        }
    };
    let running: HashSet<&InstanceId> =
        listed.iter().filter(|listed| listed.running).map(|listed| &listed.id).collect();
    for (entry, view) in expected {
        let Some(instance) = view.instance else { continue };
        let is_alive =
            matches!(view.phase, CellPhase::Booting | CellPhase::Enrolled | CellPhase::Bound);
        if is_alive && !running.contains(&instance) {
            // A full inbox gets the message at the next listing.
            let _full = entry.inbox.try_send(Message::InstanceEnded);
        }
    }
    let known = |id: &CellId| shared.entry(id).is_some();
    listed
        .into_iter()
        .filter(|instance| !known(&instance.cell))
        .map(|instance| instance.id)
        .collect()
}

async fn end_strays(shared: Arc<Shared>, instances: Vec<InstanceId>) {
    tracing::warn!(?instances, "terminating stray instances");
    let ended = timeout(STRAY_TIMEOUT, shared.provider.terminate(&instances)).await;
    if let Err(error) = ended.unwrap_or_else(|_| {
        Err(ProviderError::too_slow("end instances that belong to no cell", STRAY_TIMEOUT))
    }) {
        tracing::error!(error = &error as &dyn std::error::Error, "stray instances not terminated");
    }
}
