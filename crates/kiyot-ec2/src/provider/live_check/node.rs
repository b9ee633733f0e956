//! Check of the node's instance: its pods may reach its metadata service.

use crate::{
    InstanceFilter, MetadataOptions,
    provider::{
        live_check::{LiveCheck, Outcome, routes::NODE},
        node_subnet,
    },
};

impl LiveCheck<'_> {
    /// Finds the node's instance, unless the subnets were read from it.
    pub(super) async fn find_node(&mut self) {
        // The address behind a forwarder is unknown.
        let Some(address) = self.config.gateway.node_address() else { return };
        // If the node was not found, this is already reported.
        if self.node.is_some() || self.config.ec2.subnets.is_empty() {
            return;
        }
        let filter = InstanceFilter::PrivateAddress(address);
        let listed = self.caller.list(NODE, self.api.describe_instances(&filter)).await;
        let Ok(listed) = listed else { return };
        if let Ok(node) = node_subnet::find(address, listed) {
            self.node = Some(node);
            return;
        }
        // Otherwise cells don't depend on the node's instance.
        if !self.config.ec2.cluster_networks.is_empty() {
            let text = format!(
                "no instance, or several, have the node's address {address}: its \
                 source/destination check, which must be off for cluster_networks, and its \
                 metadata service are not known"
            );
            self.caller.add(Outcome::Warning, NODE, &text);
        }
    }

    /// Warns if the node's pods get the credentials of its role.
    pub(super) fn node_metadata(&mut self) {
        let Some(node) = &self.node else { return };
        let (outcome, state) = match node.metadata.map(way_of_pods) {
            Some(None) => (Outcome::Ok, "closed to its pods with a network of their own".into()),
            Some(Some(way)) => (
                Outcome::Warning,
                format!(
                    "open to its pods, which get the node's role: {way}; require tokens with a \
                     hop limit of 1, or give the daemon another role (docs/ec2.md)"
                ),
            ),
            None => (Outcome::Warning, "not shown".to_owned()),
        };
        let text = format!("the metadata service of {} is {state}", node.instance);
        self.caller.add(outcome, NODE, &text);
    }
}

/// Returns how a pod with its own network reaches the metadata service; `None` if it can't.
fn way_of_pods(options: MetadataOptions) -> Option<String> {
    match options {
        MetadataOptions { is_enabled: false, .. } => None,
        MetadataOptions { requires_tokens: false, .. } => Some("version 1 is allowed".to_owned()),
        MetadataOptions { hop_limit: hops @ 2.., .. } => Some(format!("the hop limit is {hops}")),
        MetadataOptions { .. } => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Verifies V100.
    #[test]
    fn metadata_service_is_open_by_version_1_or_a_second_hop() {
        for (is_enabled, requires_tokens, hop_limit, expected) in [
            (true, true, 1, None),
            (true, true, 2, Some("the hop limit is 2")),
            (true, false, 1, Some("version 1 is allowed")),
            (false, false, 2, None),
        ] {
            let options = MetadataOptions { is_enabled, requires_tokens, hop_limit };
            assert_eq!(way_of_pods(options).as_deref(), expected, "{options:?}");
        }
    }
}
