//! Responses of EC2.

use std::time::Duration;

use aws_sdk_ec2::types;

use super::error::incomplete;
use crate::{
    CallError, Image, ImageVolume, InstanceDescription, InstanceStateName, MetadataOptions, Route,
    RouteTable, SpotPrice, StateReason, Subnet, TypeDescription, TypeGpus, TypeInZone,
};

/// The most bytes of a DNS name (RFC 1035).
const MAX_NAME_BYTES: usize = 253;

/// Returns an instance. Only id and state are required.
pub(super) fn instance(
    operation: &'static str,
    instance: types::Instance,
) -> Result<InstanceDescription, CallError> {
    let address = |text: Option<String>| text.and_then(|text| text.parse().ok());
    let launched = instance.launch_time.and_then(|time| u64::try_from(time.secs()).ok());
    let devices = instance.block_device_mappings.unwrap_or_default().into_iter();
    let interfaces = instance.network_interfaces.unwrap_or_default().into_iter();
    let tags = instance.tags.unwrap_or_default().into_iter();
    Ok(InstanceDescription {
        id: instance.instance_id.ok_or_else(|| incomplete(operation, "instanceId"))?,
        client_token: instance.client_token.filter(|token| !token.is_empty()),
        instance_type: text(instance.instance_type.as_ref().map(types::InstanceType::as_str)),
        zone: instance
            .placement
            .and_then(|placement| placement.availability_zone)
            .unwrap_or_default(),
        is_spot: instance.instance_lifecycle == Some(types::InstanceLifecycleType::Spot),
        state: state(operation, instance.state)?,
        reason: instance.state_reason.and_then(|reason| {
            StateReason::new(&reason.code?, &reason.message.unwrap_or_default())
        }),
        subnet: instance.subnet_id.filter(|id| !id.is_empty()),
        vpc: instance.vpc_id.filter(|id| !id.is_empty()),
        has_source_dest_check: instance.source_dest_check,
        metadata: instance.metadata_options.map(|options| MetadataOptions {
            is_enabled: options.http_endpoint
                != Some(types::InstanceMetadataEndpointState::Disabled),
            requires_tokens: options.http_tokens == Some(types::HttpTokensState::Required),
            hop_limit: options.http_put_response_hop_limit.unwrap_or(1),
        }),
        private_address: address(instance.private_ip_address),
        public_address: address(instance.public_ip_address),
        private_name: instance.private_dns_name.filter(|name| is_dns_name(name)),
        public_name: instance.public_dns_name.filter(|name| is_dns_name(name)),
        launched: launched.map(Duration::from_secs),
        volumes: devices.filter_map(|device| device.ebs?.volume_id).collect(),
        interfaces: interfaces.filter_map(|interface| interface.network_interface_id).collect(),
        tags: tags.filter_map(|tag| Some((tag.key?, tag.value.unwrap_or_default()))).collect(),
    })
}

fn is_dns_name(name: &str) -> bool {
    (1..=MAX_NAME_BYTES).contains(&name.len())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-'))
}

/// Returns the id and the new state of a terminated instance.
pub(super) fn state_change(
    operation: &'static str,
    change: types::InstanceStateChange,
) -> Result<(String, InstanceStateName), CallError> {
    let id = change.instance_id.ok_or_else(|| incomplete(operation, "instanceId"))?;
    Ok((id, state(operation, change.current_state)?))
}

fn state(
    operation: &'static str,
    state: Option<types::InstanceState>,
) -> Result<InstanceStateName, CallError> {
    let name = state.and_then(|state| state.name);
    let state = name.as_ref().and_then(|name| InstanceStateName::named(name.as_str()));
    state.ok_or_else(|| incomplete(operation, "state"))
}

/// Returns an entry of the instance types by zone.
pub(super) fn type_in_zone(entry: types::InstanceTypeOffering) -> Option<TypeInZone> {
    Some(TypeInZone {
        instance_type: entry.instance_type?.as_str().to_owned(),
        zone: entry.location?,
    })
}

/// Returns an instance type.
pub(super) fn instance_type(info: types::InstanceTypeInfo) -> Option<TypeDescription> {
    let processor = info.processor_info.and_then(|it| it.supported_architectures);
    let gpus = info.gpu_info.and_then(|it| it.gpus).unwrap_or_default().into_iter().next();
    let classes = info.supported_usage_classes.unwrap_or_default();
    Some(TypeDescription {
        name: info.instance_type?.as_str().to_owned(),
        vcpus: info.v_cpu_info?.default_v_cpus?.into(),
        memory_mib: info.memory_info?.size_in_mib?,
        architectures: processor
            .unwrap_or_default()
            .iter()
            .map(|architecture| architecture.as_str().to_owned())
            .collect(),
        is_burstable: info.burstable_performance_supported.unwrap_or_default(),
        is_bare_metal: info.bare_metal.unwrap_or_default(),
        is_current: info.current_generation.unwrap_or_default(),
        gpus: gpus.map(|gpus| TypeGpus {
            count: gpus.count.unwrap_or_default().into(),
            manufacturer: gpus.manufacturer.filter(|name| !name.is_empty()),
            name: gpus.name.filter(|name| !name.is_empty()),
        }),
        has_on_demand: classes.contains(&types::UsageClassType::OnDemand),
        has_spot: classes.contains(&types::UsageClassType::Spot),
    })
}

/// Returns a spot price.
pub(super) fn spot_price(price: types::SpotPrice) -> Option<SpotPrice> {
    Some(SpotPrice {
        instance_type: price.instance_type?.as_str().to_owned(),
        zone: price.availability_zone?,
        price: price.spot_price?,
    })
}

/// Returns a subnet.
pub(super) fn subnet(subnet: types::Subnet) -> Option<Subnet> {
    Some(Subnet {
        id: subnet.subnet_id?,
        vpc: subnet.vpc_id?,
        zone: subnet.availability_zone?,
        network: subnet.cidr_block?,
    })
}

/// Returns a route table, with its IPv4 routes.
pub(super) fn route_table(table: types::RouteTable) -> Option<RouteTable> {
    let associations = table.associations.unwrap_or_default();
    Some(RouteTable {
        id: table.route_table_id?,
        is_main: associations.iter().any(|it| it.main == Some(true)),
        subnets: associations.into_iter().filter_map(|it| it.subnet_id).collect(),
        routes: table.routes.unwrap_or_default().into_iter().filter_map(route).collect(),
    })
}

fn route(route: types::Route) -> Option<Route> {
    let network = route.destination_cidr_block?;
    // EC2 shows both the instance and the interface of a route.
    let target = route
        .instance_id
        .or(route.gateway_id)
        .or(route.nat_gateway_id)
        .or(route.transit_gateway_id)
        .or(route.vpc_peering_connection_id)
        .or(route.network_interface_id)
        .or(route.local_gateway_id)
        .or(route.carrier_gateway_id)
        .or(route.core_network_arn);
    Some(Route { network, target: target.filter(|id| !id.is_empty()) })
}

/// Returns an image.
pub(super) fn image(image: types::Image) -> Option<Image> {
    Some(Image {
        id: image.image_id?,
        name: image.name.unwrap_or_default(),
        architecture: text(image.architecture.as_ref().map(types::ArchitectureValues::as_str)),
        created: image.creation_date.unwrap_or_default(),
        root_device: image.root_device_name?,
        volumes: image
            .block_device_mappings
            .unwrap_or_default()
            .into_iter()
            .filter_map(|mapping| {
                let (device, gib) = (mapping.device_name?, mapping.ebs?.volume_size?);
                Some(ImageVolume { device, gib })
            })
            .collect(),
    })
}

fn text(text: Option<&str>) -> String {
    text.unwrap_or_default().to_owned()
}
