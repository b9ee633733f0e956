//! The live check of a backend's configuration, for `check-config --live`.

use kiyot_config::{MilpaBackend, ProviderKind};
use kiyot_ec2::provider::live_check;
use kiyot_engine::provider::Owner;

use super::host_name;

pub use live_check::LiveReport;

/// Reason why a configuration has no live check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NoLiveCheck {
    /// The provider makes no calls over a network.
    #[error("has no live check; allowed: the provider \"ec2\"")]
    OtherProvider,
    /// The program was built without the provider `ec2`.
    #[error("this program was built without \"ec2\" (cargo build --features ec2)")]
    NoEc2,
}

/// Returns the name of the node in Kubernetes, as the daemon uses it.
pub fn node_name(config: &MilpaBackend) -> String {
    config.node.clone().unwrap_or_else(host_name)
}

/// Checks ids and permissions of a configuration over the API of its provider, without effect.
pub async fn check_live(config: &MilpaBackend) -> Result<LiveReport, NoLiveCheck> {
    if !config.has(ProviderKind::Ec2) {
        return Err(NoLiveCheck::OtherProvider);
    }
    let api = kiyot_ec2::api(&config.ec2).await.ok_or(NoLiveCheck::NoEc2)?;
    let owner = Owner {
        cluster: config.cluster.clone().unwrap_or_default(),
        node: node_name(config),
        // A placeholder: only the daemon may read its certificate authority.
        fingerprint: "0".repeat(64),
    };
    Ok(live_check::check(config, owner, api).await)
}
