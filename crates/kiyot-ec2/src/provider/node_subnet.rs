//! The node's own subnet, in which cells are launched if no subnets are configured.

use std::net::Ipv4Addr;

use crate::{InstanceDescription, InstanceStateName, MetadataOptions};

/// A running instance with the node's address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct NodeSubnet {
    /// The id of the instance.
    pub(super) instance: String,
    /// The id of its subnet.
    pub(super) subnet: String,
    /// The source/destination check of the instance: true if it is on, `None` if it is not shown.
    pub(super) has_source_dest_check: Option<bool>,
    /// The options of its metadata service, if they are shown.
    pub(super) metadata: Option<MetadataOptions>,
}

/// Reason why the node's subnet is unknown.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum UnknownSubnet {
    /// The configuration has no address of the node; its checks refuse this.
    #[error("the node's IPv4 address is not known; allowed: ids of subnets in ec2.subnets")]
    NoAddress,
    /// No instance of the region has the address.
    #[error(
        "no running instance of the region has the node's address {0}; allowed: ids of subnets in \
         ec2.subnets"
    )]
    NoInstance(Ipv4Addr),
    /// Several VPCs have an instance with the address.
    #[error(
        "several instances have the node's address {0}: {1}; allowed: ids of subnets in \
         ec2.subnets"
    )]
    Several(Ipv4Addr, String),
}

/// Finds the node's instance and its subnet among the instances with the node's address.
pub(super) fn find(
    address: Ipv4Addr,
    listed: Vec<InstanceDescription>,
) -> Result<NodeSubnet, UnknownSubnet> {
    let running = listed.into_iter().filter(|it| it.state == InstanceStateName::Running);
    let mut found: Vec<_> = running.filter_map(|it| Some((it.subnet.clone()?, it))).collect();
    match (found.pop(), found.is_empty()) {
        (Some((subnet, only)), true) => Ok(NodeSubnet {
            instance: only.id,
            subnet,
            has_source_dest_check: only.has_source_dest_check,
            metadata: only.metadata,
        }),
        (Some(last), false) => {
            found.push(last);
            let names = found.iter().map(|(_, instance)| {
                format!("{} in {}", instance.id, instance.vpc.as_deref().unwrap_or_default())
            });
            Err(UnknownSubnet::Several(address, names.collect::<Vec<_>>().join(", ")))
        }
        (None, _) => Err(UnknownSubnet::NoInstance(address)),
    }
}

#[cfg(test)]
mod tests {
    use super::{super::fake_api::running, *};

    const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 5);

    /// Verifies V78.
    #[test]
    fn subnet_is_of_the_only_running_instance_with_the_address() {
        let ended = InstanceDescription {
            state: InstanceStateName::Terminated,
            ..running("i-0", "subnet-0", ADDRESS)
        };
        let node = running("i-1", "subnet-1", ADDRESS);
        let found = find(ADDRESS, vec![ended.clone(), node.clone()]);
        assert_eq!(
            found,
            Ok(NodeSubnet {
                instance: "i-1".to_owned(),
                subnet: "subnet-1".to_owned(),
                has_source_dest_check: None,
                metadata: None,
            })
        );
        assert_eq!(find(ADDRESS, vec![ended]), Err(UnknownSubnet::NoInstance(ADDRESS)));
        let other = InstanceDescription {
            vpc: Some("vpc-2".to_owned()),
            ..running("i-2", "subnet-2", ADDRESS)
        };
        let error = find(ADDRESS, vec![node, other]).unwrap_err().to_string();
        assert_eq!(
            error,
            "several instances have the node's address 10.0.0.5: i-1 in vpc-1, i-2 in vpc-2; \
             allowed: ids of subnets in ec2.subnets"
        );
    }
}
