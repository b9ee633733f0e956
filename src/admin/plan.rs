//! Explanation of a manifest with the current prices and limits.

use std::{collections::BTreeMap, sync::Arc};

use kiyot_manifest::{self as manifest, File};
use kiyot_proto::{
    admin::{self, ManifestFile},
    text::counted,
};
use tokio::task::spawn_blocking;
use tokio_util::sync::CancellationToken;
use tonic::Status;

use super::{MAX_MANIFEST_BYTES, MAX_MESSAGE_BYTES, parts::Parts};
use crate::{
    backends::{
        Backend,
        milpa::{Milpa, inventory::ProviderCatalogue},
    },
    explain::{ExplainedPod, Live, LiveBackend, Prices, explain_while},
};

impl Parts {
    /// Explains where the pods of a manifest would go, on which instances, and at which prices.
    pub(super) async fn plan(
        &self,
        request: admin::PlanRequest,
    ) -> Result<admin::PlanResponse, Status> {
        let file = |ManifestFile { name, text }| File { name, text };
        let files: Vec<File> = request.files.into_iter().map(file).collect();
        let bytes: usize = files.iter().map(|file| file.text.len()).sum();
        if bytes > MAX_MANIFEST_BYTES {
            let error = format!("manifest of {bytes} bytes; allowed: {MAX_MANIFEST_BYTES}");
            return Err(Status::invalid_argument(error));
        }
        let mut backends = BTreeMap::new();
        for milpa in &self.milpas {
            backends.insert(milpa.name().to_string(), live(milpa).await);
        }
        let config = Arc::clone(&self.config.borrow());
        let turn = Arc::clone(&self.plans).acquire_owned().await;
        let caller = CancellationToken::new();
        let left = caller.clone();
        let _left = caller.drop_guard();
        let explained = spawn_blocking(move || {
            // The turn ends with the work, which ends early once the caller has left.
            let _turn = turn;
            let manifest = manifest::parse_files(&files);
            let manifest = manifest.map_err(|problems| problems.within(MAX_MESSAGE_BYTES))?;
            let is_wanted = || !left.is_cancelled();
            let prices = Prices::Live(&backends);
            Ok::<_, String>(explain_while(is_wanted, &config, &manifest, prices))
        });
        let explained = explained.await.map_err(|error| Status::internal(error.to_string()))?;
        let explained = explained.map_err(Status::invalid_argument)?;
        let message = |pod: ExplainedPod| {
            let ExplainedPod { heading, facts, is_refused } = pod;
            admin::PlannedPod { heading, facts, refused: is_refused }
        };
        Ok(admin::PlanResponse {
            pods: explained.pods.into_iter().map(message).collect(),
            notes: explained.notes,
        })
    }
}

/// Returns the state of a backend. If its provider does not answer, the catalogue is left out.
async fn live(milpa: &Milpa) -> LiveBackend {
    let summary = milpa.inventory().summary();
    let admin::Backend { cells, max_cells, booting, waiting, cordoned, .. } = summary;
    let mut limits = vec![format!(
        "its backend: {cells} of {}, {booting} of them booting; {}",
        counted(max_cells, "cell", "cells"),
        counted(waiting, "pod waits", "pods wait")
    )];
    if let Some((free, pods)) = milpa.cells().free_on_node() {
        limits.push(format!(
            "the node: {free} left for cells, beside the reserve and {pods} of pods on the node"
        ));
    }
    if cordoned {
        limits.push("note: no cell is launched until `milpactl uncordon`".to_owned());
    }
    let catalogues = milpa.inventory().catalogues().await.into_iter();
    let providers = catalogues.map(|read| (read.provider, state(read)));
    let starts = milpa.inventory().start_times();
    LiveBackend { providers: providers.collect(), starts, limits }
}

fn state(read: ProviderCatalogue) -> Live {
    match read.catalogue {
        Ok(catalogue) => Live {
            catalogue: Some(catalogue),
            refusals: read.refusals,
            now: read.now,
            ..Live::default()
        },
        Err(error) => {
            let refused = error.is_invalid().then(|| error.text());
            let unread = || format!("note: the offerings can't be read: {}", error.text());
            let note = refused.is_none().then(unread);
            Live { refused, note, ..Live::default() }
        }
    }
}
