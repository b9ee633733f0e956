//! Cells and the provider's instances, compared.

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
    driver::Message,
    record::Record,
    shared::Shared,
    state::State,
};

/// How long the provider may take to list its instances.
const LIST_LIMIT: Duration = Duration::from_secs(60);
/// How long it may take to end instances that belong to no cell.
const STRAY_LIMIT: Duration = Duration::from_secs(300);

/// What the stored cells are to become, those that are gone aside: they are remembered while their
/// sandboxes are, and else dropped.
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
        // Without its record it can't call home. Its pod reads as it did until its end is
        // confirmed.
        if let Ok(id) = CellId::parse(&sandbox.cell) {
            tracing::error!(cell = %id, sandbox = sandbox.id, "A pod's cell has no record that can be read, and is ended");
            living.push(Record::lost(id, sandbox));
        }
    }
    drop(known);
    for (key, cell) in records {
        let Ok(id) = CellId::parse(&key) else {
            tracing::error!(
                key,
                "A record of a cell has a key that is no cell's id, and is dropped"
            );
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
            State::Gone { reason } if record.was_bound => gone.push((record, reason)),
            State::Gone { .. } => {
                dropped.remove(Table::Cells, &key);
            }
            _ => living.push((record, state)),
        }
    }
    gone.sort_by_key(|(record, _)| record.created_unix_nanos);
    for (record, reason) in gone {
        for forgotten in shared.gone.remember(record.id, reason.to_string()) {
            dropped.remove(Table::Cells, forgotten.as_str());
        }
    }
    shared.store.commit(dropped).await?;
    Ok(living)
}

/// Looks at the provider's list again and again, and at once when a link breaks, until the daemon
/// stops.
pub(super) async fn watch(shared: Arc<Shared>) {
    let mut strays = JoinSet::new();
    loop {
        let unknown = tokio::select! {
            () = shared.stop.cancelled() => return,
            unknown = look(&shared) => unknown,
        };
        while strays.try_join_next().is_some() {}
        // One at a time: what it leaves is listed again.
        if !unknown.is_empty() && strays.is_empty() {
            strays.spawn(end_strays(Arc::clone(&shared), unknown));
        }
        tokio::select! {
            () = shared.stop.cancelled() => return,
            () = shared.look.notified() => {}
            () = tokio::time::sleep(shared.config.list_interval) => {}
        }
    }
}

/// Tells cells whose instance has ended so. Returns instances that belong to no cell.
async fn look(shared: &Shared) -> Vec<InstanceId> {
    // Only what was there before the list began can be missed in it.
    let expected: Vec<_> = {
        let entries = shared.entries.read().unwrap_or_else(std::sync::PoisonError::into_inner);
        entries.values().map(|entry| (Arc::clone(entry), entry.view())).collect()
    };
    let listed = match timeout(LIST_LIMIT, shared.provider.list_owned()).await {
        Ok(Ok(listed)) => listed,
        Ok(Err(error)) => {
            tracing::warn!(
                error = &error as &dyn std::error::Error,
                "The provider could not list its instances"
            );
            return Vec::new();
        }
        Err(_) => {
            tracing::warn!(
                seconds = LIST_LIMIT.as_secs(),
                "The provider did not list its instances in time"
            );
            return Vec::new();
        }
    };
    let running: HashSet<&InstanceId> =
        listed.iter().filter(|listed| listed.running).map(|listed| &listed.id).collect();
    for (entry, view) in expected {
        let Some(instance) = view.instance else { continue };
        let lives =
            matches!(view.phase, CellPhase::Booting | CellPhase::Enrolled | CellPhase::Bound);
        if lives && !running.contains(&instance) {
            // A full inbox is told the next time.
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
    tracing::warn!(?instances, "Instances that belong to no cell are ended");
    let ended = timeout(STRAY_LIMIT, shared.provider.terminate(&instances)).await;
    if let Err(error) = ended.unwrap_or_else(|_| {
        Err(ProviderError::too_slow("end instances that belong to no cell", STRAY_LIMIT))
    }) {
        tracing::error!(
            error = &error as &dyn std::error::Error,
            "Instances that belong to no cell could not be ended"
        );
    }
}
