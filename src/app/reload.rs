//! Reload of the configuration by SIGHUP: all changes or none.

use std::{path::Path, sync::Arc};

use kiyot_config::{self as config, BackendConfig, Config, Diff};

use super::App;
use crate::backends::Backend;

impl App {
    /// Reads the file, and applies what needs no restart. Nothing changes if the file has a
    /// problem, or a rule names a backend that does not run.
    pub(super) fn reload(&self, path: &Path, running: &mut Config) {
        let file = path.display().to_string();
        let new = match config::load(path) {
            Ok(new) => new,
            Err(problems) => {
                return tracing::error!(%problems, "configuration reload failed, nothing changed");
            }
        };
        let reloaded = match running.reloaded(&new, &file) {
            Ok(reloaded) => reloaded,
            Err(problems) => {
                return tracing::error!(%problems, "configuration reload failed, nothing changed");
            }
        };
        let diff = Diff::between(running, &new);
        for milpa in &self.milpas {
            if let Some(BackendConfig::Milpa(config)) = reloaded.backends.get(milpa.name().as_str())
            {
                milpa.set_limits(config);
                milpa.set_warm(config);
                milpa.set_healthy_timeout(config.healthy_limit());
                milpa.set_policy(config.policy);
            }
        }
        self.front.settings.replace(&reloaded.server, reloaded.routing.clone());
        *running = reloaded;
        self.current_config.send_replace(Arc::new(running.clone()));
        for change in &diff.live {
            tracing::info!(%change, "configuration changed");
        }
        for change in &diff.restart {
            tracing::warn!(%change, "configuration change needs a restart");
        }
        tracing::info!(
            file,
            changed = diff.live.len(),
            need_a_restart = diff.restart.len(),
            "configuration reloaded"
        );
    }
}
