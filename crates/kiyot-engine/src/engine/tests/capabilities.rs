//! Capabilities of the existing kinds of providers.

use std::time::Duration;

use crate::{engine::ProviderKey, provider::Capabilities};

/// The key of an engine's only provider.
pub(super) const ONLY: ProviderKey = "only";

/// Instances that are processes of the node.
pub(super) const LOCAL: Capabilities = Capabilities {
    provider: ONLY,
    own_kernel: false,
    own_users: false,
    own_devices: false,
    remote: false,
    sees_node_files: true,
    separate_link: false,
    can_be_paused: true,
    pods_control_agent: true,
    ends_with_node: true,
    ends_confirmed_within: Duration::from_secs(10),
    not_found_believed_after: Duration::ZERO,
    listing_period: Duration::from_secs(2),
    has_tags: false,
    parameters_without_effect_on_boots: &[],
};

/// Instances of a cloud whose pods have no power over the agent.
pub(super) const CLOUD: Capabilities = Capabilities {
    provider: ONLY,
    own_kernel: true,
    own_users: true,
    own_devices: true,
    remote: true,
    sees_node_files: false,
    separate_link: false,
    can_be_paused: false,
    pods_control_agent: false,
    ends_with_node: false,
    ends_confirmed_within: Duration::from_secs(600),
    not_found_believed_after: Duration::from_secs(120),
    listing_period: Duration::from_secs(60),
    has_tags: true,
    parameters_without_effect_on_boots: &[],
};

/// Instances of EC2.
pub(super) const EC2: Capabilities = Capabilities {
    pods_control_agent: true,
    not_found_believed_after: Duration::from_secs(600),
    listing_period: Duration::from_secs(30),
    parameters_without_effect_on_boots: &["volume-gib"],
    ..CLOUD
};
