//! Reload of the configuration by SIGHUP: all changes or none.

use std::{path::Path, sync::Arc};

use kiyot_config::{self as config, BackendConfig, Config, Diff, MilpaBackend};

use super::App;
use crate::backends::{Backend, milpa::Milpa};

impl App {
    /// Reads the file, and applies what needs no restart. Nothing changes if the file has a
    /// problem, a rule names a backend that does not run, or a provider can't be started.
    pub(super) async fn reload(&self, path: &Path, running: &mut Config) {
        let file = path.display().to_string();
        let new = match config::load(path) {
            Ok(new) => new,
            Err(problems) => {
                return tracing::error!(%problems, "configuration reload failed, nothing changed");
            }
        };
        for milpa in &self.milpas {
            if let Some(BackendConfig::Milpa(config)) =
                running.backends.get_mut(milpa.name().as_str())
            {
                config.draining = milpa.draining();
            }
        }
        let reloaded = match running.reloaded(&new, &file) {
            Ok(reloaded) => reloaded,
            Err(problems) => {
                return tracing::error!(%problems, "configuration reload failed, nothing changed");
            }
        };
        let diff = Diff::between(running, &new);
        // The only step that may fail, and at most once, because there is one backend of cells.
        for (milpa, before, config) in self.milpas_of(running, &reloaded) {
            if let Err(error) = milpa.set_providers(before, config).await {
                return tracing::error!(
                    error = &error as &dyn std::error::Error,
                    "configuration reload failed, nothing changed"
                );
            }
        }
        for (milpa, _, config) in self.milpas_of(running, &reloaded) {
            milpa.set_limits(config);
            milpa.set_launch_times(config);
            milpa.set_warm(config);
            milpa.set_healthy_timeout(config.healthy_limit());
            milpa.set_policy(config.policy);
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

    /// Returns each backend of cells with its configuration before and after a reload.
    fn milpas_of<'c>(
        &'c self,
        before: &'c Config,
        after: &'c Config,
    ) -> impl Iterator<Item = (&'c Milpa, &'c MilpaBackend, &'c MilpaBackend)> {
        self.milpas.iter().filter_map(|milpa| {
            let name = milpa.name().as_str();
            match (before.backends.get(name), after.backends.get(name)) {
                (Some(BackendConfig::Milpa(before)), Some(BackendConfig::Milpa(after))) => {
                    Some((&**milpa, &**before, &**after))
                }
                _ => None,
            }
        })
    }
}
