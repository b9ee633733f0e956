//! DNS of a pod.

use k8s_openapi::api::core::v1::{PodDNSConfig, PodDNSConfigOption};
use kiyot_values::problems::Field;

/// `dnsPolicy`
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DnsPolicy {
    /// The cluster's DNS, unless the pod is on the node's network.
    ClusterFirst,
    /// The cluster's DNS.
    ClusterFirstWithHostNet,
    /// The node's resolv.conf.
    Default,
    /// Only `dnsConfig`.
    None,
}

impl DnsPolicy {
    pub(super) fn read(field: Field<'_>) -> Option<Self> {
        field.choice(&[
            ("ClusterFirst", Self::ClusterFirst),
            ("ClusterFirstWithHostNet", Self::ClusterFirstWithHostNet),
            ("Default", Self::Default),
            ("None", Self::None),
        ])
    }
}

/// Contents of a resolv.conf.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Dns {
    /// `nameserver`
    pub servers: Vec<String>,
    /// `search`
    pub searches: Vec<String>,
    /// `options`
    pub options: Vec<String>,
}

impl Dns {
    pub(super) fn read(dns: PodDNSConfig) -> Self {
        let option = |PodDNSConfigOption { name, value }| match value {
            Some(value) => format!("{}:{value}", name.unwrap_or_default()),
            None => name.unwrap_or_default(),
        };
        Self {
            servers: dns.nameservers.unwrap_or_default(),
            searches: dns.searches.unwrap_or_default(),
            options: dns.options.unwrap_or_default().into_iter().map(option).collect(),
        }
    }
}
