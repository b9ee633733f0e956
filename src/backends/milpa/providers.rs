//! The providers of instances.

use std::time::Duration;

use kiyot_config::ProviderKind;
use kiyot_engine::provider::{Capabilities, ProviderError};
use kiyot_local::{netns, qemu};
use tokio::time::timeout;

/// Returns the capabilities of a kind of provider.
pub fn capabilities_of(provider: ProviderKind) -> Capabilities {
    match provider {
        ProviderKind::Netns => netns::CAPABILITIES,
        ProviderKind::Qemu => qemu::CAPABILITIES,
        ProviderKind::Ec2 => kiyot_ec2::provider::CAPABILITIES,
    }
}

/// Limits the time of a call to a provider.
pub(crate) async fn within<T>(
    limit: Duration,
    doing: &str,
    call: impl Future<Output = Result<T, ProviderError>>,
) -> Result<T, ProviderError> {
    timeout(limit, call).await.unwrap_or_else(|_| Err(ProviderError::too_slow(doing, limit)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Verifies C10.
    #[test]
    fn check_of_the_configuration_knows_providers_with_remote_cells() {
        for &(_, provider) in kiyot_config::PROVIDERS {
            assert_eq!(capabilities_of(provider).remote, provider.has_remote_cells());
        }
    }

    #[test]
    fn boots_on_the_node_are_limited_by_its_processors() {
        for provider in [ProviderKind::Netns, ProviderKind::Qemu] {
            let default_boots = |processors| capabilities_of(provider).default_boots(processors);
            assert_eq!((default_boots(1), default_boots(64)), (Some(4), Some(64)));
        }
        assert_eq!(capabilities_of(ProviderKind::Ec2).default_boots(64), None);
    }
}
