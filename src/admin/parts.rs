//! The parts of the daemon that operators ask about.

use std::sync::Arc;

use kiyot_config::Config;
use kiyot_engine::id::CellId;
use kiyot_proto::{ADMIN_REVISION, admin};
use tokio::sync::{Semaphore, watch};
use tonic::Status;

use super::dumps::Dumps;
use crate::{
    backends::milpa::{Milpa, inventory::PodKey},
    recent_log::RecentLog,
};

/// Limit on plans at a time; others wait. Readers may request plans, and parsing a manifest takes
/// memory.
const MAX_PLANS: usize = 1;
/// Limit on the pods of the same name that an error names.
const MAX_NAMED: usize = 8;

/// The parts of the daemon that operators ask about.
#[derive(Debug)]
pub struct Parts {
    /// The backends of pods in cells.
    pub(super) milpas: Vec<Arc<Milpa>>,
    /// The container runtimes.
    pub(super) runtimes: Vec<admin::Backend>,
    /// The running configuration.
    pub(super) config: watch::Receiver<Arc<Config>>,
    /// Turns of plans.
    pub(super) plans: Arc<Semaphore>,
    /// The state that all support bundles share.
    pub(super) dumps: Dumps,
    /// The recent lines of the daemon's log.
    pub(super) recent_log: RecentLog,
    /// The commit of the build, if known.
    pub(super) git_commit: Option<&'static str>,
}

impl Parts {
    /// Returns the parts. `runtimes` are summaries of the container runtimes, `config` is the
    /// running configuration, `git_commit` is the commit of the build.
    pub fn new(
        milpas: Vec<Arc<Milpa>>,
        runtimes: Vec<admin::Backend>,
        config: watch::Receiver<Arc<Config>>,
        recent_log: RecentLog,
        git_commit: Option<&'static str>,
    ) -> Self {
        let plans = Arc::new(Semaphore::new(MAX_PLANS));
        Self { milpas, runtimes, config, plans, dumps: Dumps::default(), recent_log, git_commit }
    }

    /// Returns a pod by namespace and name, uid or sandbox; the namespace may be empty if the name
    /// is unique.
    pub(super) fn find_pod(
        &self,
        namespace: &str,
        name: &str,
    ) -> Result<(&Arc<Milpa>, PodKey), Status> {
        if name.is_empty() {
            return Err(Status::invalid_argument("no pod is named; allowed: the name of a pod"));
        }
        let mut found = Vec::new();
        for milpa in &self.milpas {
            let keys = milpa.inventory().find(namespace, name).into_iter();
            found.extend(keys.map(|key| (milpa, key)));
        }
        match (found.pop(), found.is_empty()) {
            (Some(only), true) => Ok(only),
            (Some(last), false) => {
                let all = found.iter().map(|(_, key)| key).chain([&last.1]);
                let names: Vec<_> = all.take(MAX_NAMED).map(PodKey::name).collect();
                let more = match (found.len() + 1).saturating_sub(MAX_NAMED) {
                    0 => String::new(),
                    more => format!(" and {more} more"),
                };
                Err(Status::invalid_argument(format!(
                    "pod {name:?} is not unique: {}{more}; allowed: namespace/name",
                    names.join(", ")
                )))
            }
            (None, _) => {
                let place = if namespace.is_empty() {
                    "any namespace".to_owned()
                } else {
                    format!("namespace {namespace:?}")
                };
                Err(Status::not_found(format!("no pod {name:?} in a cell of {place}")))
            }
        }
    }

    /// Returns a cell by its id, and its backend.
    pub(super) fn find_cell(&self, id: &str) -> Result<(&Arc<Milpa>, CellId), Status> {
        let cell = CellId::parse(id).map_err(|error| {
            Status::invalid_argument(format!("cell {id:?}: {error}; allowed: the id of a cell"))
        })?;
        let has_cell = |milpa: &&Arc<Milpa>| milpa.inventory().cell_ids().contains(&cell);
        match self.milpas.iter().find(has_cell) {
            Some(milpa) => Ok((milpa, cell)),
            None => Err(Status::not_found(format!("no cell {cell}"))),
        }
    }

    /// Returns the name of the node in Kubernetes.
    fn node(&self) -> String {
        let node = self.milpas.first().map(|milpa| milpa.inventory().node().to_owned());
        node.unwrap_or_default()
    }

    /// Returns the version of the daemon.
    pub(super) fn version(&self) -> admin::VersionResponse {
        admin::VersionResponse {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            git_commit: self.git_commit.unwrap_or_default().to_owned(),
            revision: ADMIN_REVISION,
            node: self.node(),
        }
    }

    /// Returns the summaries of all backends.
    pub(super) fn backends(&self) -> Vec<admin::Backend> {
        let milpas = self.milpas.iter().map(|milpa| milpa.inventory().summary());
        self.runtimes.iter().cloned().chain(milpas).collect()
    }

    /// Returns all warm pools.
    pub(super) fn pools(&self) -> Vec<admin::Pool> {
        self.milpas.iter().flat_map(|milpa| milpa.inventory().pools()).collect()
    }

    /// Returns the offerings of all backends.
    pub(super) async fn offerings(&self) -> Result<Vec<admin::CatalogueOffering>, Status> {
        let mut all = Vec::new();
        for milpa in &self.milpas {
            let offerings = milpa.inventory().offerings().await;
            all.extend(offerings.map_err(|error| Status::unavailable(error.text()))?);
        }
        Ok(all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_has_the_commit_of_the_build() {
        let text = "[backends.containerd]\ntype = \"cri\"\n";
        let config = Arc::new(kiyot_config::parse("kiyot.toml", text, []).unwrap());
        for (commit, shown) in [(Some("0123456789ab-dirty"), "0123456789ab-dirty"), (None, "")] {
            let config = watch::Sender::new(Arc::clone(&config)).subscribe();
            let parts = Parts::new(Vec::new(), Vec::new(), config, Default::default(), commit);
            assert_eq!(parts.version().git_commit, shown);
        }
    }
}
