//! Parts of the daemon that providers are made of, at the start and at a reload.

use std::{num::NonZero, path::PathBuf, sync::Arc, thread::available_parallelism, time::Duration};

use kiyot_config::{MilpaBackend, ProviderKind};
use kiyot_ec2::provider as ec2;
use kiyot_engine::{
    placement,
    provider::{ErrorClass, Owner, Provider, ProviderError},
    request::Architecture,
};
use kiyot_local::{self as local, PauseImage, netns, qemu};

use super::{cells::Configured, images::Registries, providers::within};
use crate::{backends::BackendName, metrics::ApiCalls};

/// Time limit of the check of a provider that a reload adds.
const CHECK_TIMEOUT: Duration = Duration::from_secs(20);

#[derive(Debug)]
pub(super) struct ProviderParts {
    /// The state directory with links resolved, as in the table of mounts.
    pub(super) state_dir: PathBuf,
    /// The gateway's socket.
    pub(super) socket: PathBuf,
    pub(super) registries: Arc<Registries>,
    pub(super) pause_image: Arc<PauseImage>,
    pub(super) owner: Owner,
    pub(super) api_calls: Arc<ApiCalls>,
    /// The architecture of the program that cells on other machines download.
    pub(super) agent: Option<Architecture>,
}

impl ProviderParts {
    /// Makes a provider; `None` if this program was built without it.
    pub(super) async fn make(
        &self,
        config: &MilpaBackend,
        kind: ProviderKind,
    ) -> Option<Arc<dyn Provider>> {
        let (registries, pause_image) =
            (Arc::clone(&self.registries), Arc::clone(&self.pause_image));
        let at_real_path = || MilpaBackend { state_dir: self.state_dir.clone(), ..config.clone() };
        Some(match kind {
            ProviderKind::Netns => {
                Arc::new(netns::Netns::new(&at_real_path(), registries as _, pause_image))
            }
            ProviderKind::Qemu => {
                let qemu = qemu::Qemu::new(&at_real_path(), pause_image);
                Arc::new(qemu.with_gateway(self.socket.clone()).with_node(registries as _))
            }
            ProviderKind::Ec2 => {
                let api = kiyot_ec2::api(&config.ec2).await?;
                let api = ec2::PacedApi::new(api, Arc::clone(&self.api_calls) as _);
                let ec2 = ec2::Ec2::new(config, self.owner.clone(), api, pause_image);
                Arc::new(ec2.with_agent_for(self.agent))
            }
        })
    }
}

/// Returns a provider with the rules and the limits of its cells on this node.
pub(super) fn configured(
    config: &MilpaBackend,
    kind: ProviderKind,
    provider: Arc<dyn Provider>,
) -> Configured {
    // Unknown only under a seccomp filter that hides the CPU affinity.
    let processors = available_parallelism().map_or(1, NonZero::get);
    Configured {
        rules: placement::Rules::of(config, kind),
        boots: provider.capabilities().default_boots(processors),
        machine: local::machine_for_cells(config, kind, processors),
        provider,
    }
}

/// Logs why a provider can't make cells. The start of the backend does not wait for this check: the
/// provider may be repaired later, and pods on the node don't need it.
pub(super) async fn check(name: BackendName, provider: Arc<dyn Provider>) {
    if let Err(error) = provider.check().await {
        log_unusable(&name, &error);
    }
}

/// Checks a provider that a reload adds. An outage is only logged, because it passes.
pub(super) async fn check_added(
    name: &BackendName,
    provider: &dyn Provider,
) -> Result<(), ProviderError> {
    use ErrorClass::{Throttled, Transient, Unanswered};
    match within(CHECK_TIMEOUT, "check the provider", provider.check()).await {
        Err(error) if matches!(error.class, Throttled | Transient | Unanswered) => {
            log_unusable(name, &error);
            Ok(())
        }
        checked => checked,
    }
}

fn log_unusable(name: &BackendName, error: &ProviderError) {
    tracing::error!(
        backend = %name,
        error = error as &dyn std::error::Error,
        "provider can't make cells, pods on the node are not affected"
    );
}
