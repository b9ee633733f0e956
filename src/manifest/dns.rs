//! DNS of a pod.

use crate::problems::{Field, Table};

/// `dnsPolicy`
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DnsPolicy {
    /// The cluster's DNS, unless the pod is on the node's network.
    ClusterFirst,
    /// The cluster's DNS.
    ClusterFirstWithHostNet,
    /// The node's resolv.conf.
    Default,
    /// `dnsConfig` alone.
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
    pub(super) fn read(mut table: Table<'_>) -> Self {
        let option = |field: Field<'_>| {
            let mut table = field.table()?;
            let name = table.need("name", "an option's name").and_then(Field::text);
            let value = table.take("value").and_then(Field::text);
            table.finish();
            Some(
                value
                    .map_or(name.clone()?, |value| format!("{}:{value}", name.unwrap_or_default())),
            )
        };
        let dns = Self {
            servers: table.take("nameservers").map(Field::texts).unwrap_or_default(),
            searches: table.take("searches").map(Field::texts).unwrap_or_default(),
            options: table
                .take("options")
                .map(|field| field.items().into_iter().filter_map(option).collect())
                .unwrap_or_default(),
        };
        table.finish();
        dns
    }
}
