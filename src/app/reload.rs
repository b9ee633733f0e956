//! SIGHUP: the configuration is read again, and what can change at once does, all of it or nothing.

use std::path::Path;

use super::App;
use crate::{
    backends::Backend,
    config::{self, BackendConfig, Config, Diff},
};

impl App {
    /// Reads the file again. What runs is unchanged if it has a problem, or leads pods to a backend
    /// that does not run.
    pub(super) fn reload(&self, path: &Path, running: &mut Config) {
        let file = path.display().to_string();
        let new = match config::load(path) {
            Ok(new) => new,
            Err(problems) => {
                return tracing::error!(%problems, "The configuration can't be reloaded: nothing has changed.");
            }
        };
        let reloaded = match running.reloaded(&new, &file) {
            Ok(reloaded) => reloaded,
            Err(problems) => {
                return tracing::error!(%problems, "The configuration can't be reloaded: nothing has changed.");
            }
        };
        let diff = Diff::between(running, &new);
        for milpa in &self.milpas {
            if let Some(BackendConfig::Milpa(config)) = reloaded.backends.get(milpa.name().as_str())
            {
                milpa.set_max_cells(config.max_cells);
                milpa.set_policy(config.policy);
            }
        }
        self.front.settings.replace(&reloaded.server, reloaded.routing.clone());
        *running = reloaded;
        for change in &diff.live {
            tracing::info!(%change, "The configuration has changed.");
        }
        for change in &diff.restart {
            tracing::warn!(%change, "The configuration file has changed where only a restart helps.");
        }
        tracing::info!(
            file,
            changed = diff.live.len(),
            need_a_restart = diff.restart.len(),
            "The configuration was reloaded."
        );
    }
}
