//! The request of RunInstances.

use aws_sdk_ec2::{
    operation::run_instances::builders::RunInstancesFluentBuilder,
    types::{
        BlockDeviceMapping, CreditSpecificationRequest, EbsBlockDevice, HttpTokensState,
        IamInstanceProfileSpecification, InstanceInterruptionBehavior,
        InstanceMarketOptionsRequest, InstanceMetadataEndpointState,
        InstanceMetadataOptionsRequest, InstanceMetadataTagsState,
        InstanceNetworkInterfaceSpecification, MarketType, ResourceType, ShutdownBehavior,
        SpotInstanceType, SpotMarketOptions, Tag, TagSpecification, VolumeType as SdkVolumeType,
        builders::EbsBlockDeviceBuilder,
    },
};

use crate::RunInstances;

/// Hop limit of the metadata service's responses: they reach the instance, but no container with
/// its own network.
const METADATA_HOPS: i32 = 1;

/// Sets the parameters of a call.
pub(super) fn call(
    call: RunInstancesFluentBuilder,
    request: &RunInstances,
) -> RunInstancesFluentBuilder {
    let interface = InstanceNetworkInterfaceSpecification::builder()
        .device_index(0)
        .subnet_id(&request.subnet)
        .set_groups(Some(request.security_groups.clone()))
        .associate_public_ip_address(request.public_address)
        .delete_on_termination(true)
        .build();
    let metadata = InstanceMetadataOptionsRequest::builder()
        .http_endpoint(InstanceMetadataEndpointState::Enabled)
        .http_tokens(HttpTokensState::Required)
        .http_put_response_hop_limit(METADATA_HOPS)
        .instance_metadata_tags(InstanceMetadataTagsState::Disabled)
        .build();
    let mut call = call
        .client_token(&request.client_token)
        .min_count(1)
        .max_count(1)
        .image_id(&request.image)
        .instance_type(request.instance_type.as_str().into())
        .network_interfaces(interface)
        .set_block_device_mappings(Some(volumes(request)))
        .metadata_options(metadata)
        .instance_initiated_shutdown_behavior(ShutdownBehavior::Terminate)
        .set_key_name(request.key_name.clone())
        .user_data(aws_smithy_types::base64::encode(&request.user_data))
        .set_tag_specifications(Some(tag_specifications(request)));
    if let Some(profile) = &request.instance_profile {
        let profile_by = IamInstanceProfileSpecification::builder();
        let profile_by = if profile.starts_with("arn:") {
            profile_by.arn(profile)
        } else {
            profile_by.name(profile)
        };
        call = call.iam_instance_profile(profile_by.build());
    }
    if let Some(credits) = request.credits {
        let credits = CreditSpecificationRequest::builder().cpu_credits(credits.name()).build();
        call = call.credit_specification(credits);
    }
    if request.is_spot {
        let spot = SpotMarketOptions::builder()
            .spot_instance_type(SpotInstanceType::OneTime)
            .instance_interruption_behavior(InstanceInterruptionBehavior::Terminate)
            .build();
        call = call.instance_market_options(
            InstanceMarketOptionsRequest::builder()
                .market_type(MarketType::Spot)
                .spot_options(spot)
                .build(),
        );
    }
    call
}

/// Returns the root volume, and the image's other volumes with the settings that differ from the
/// image.
fn volumes(request: &RunInstances) -> Vec<BlockDeviceMapping> {
    let volume = |gib: i32| {
        EbsBlockDevice::builder()
            .volume_size(gib)
            .encrypted(true)
            .set_kms_key_id(request.kms_key.clone())
            .delete_on_termination(true)
    };
    let root = volume(request.volume_gib)
        .volume_type(SdkVolumeType::from(request.volume_type.name()))
        .set_iops(request.performance.iops)
        .set_throughput(request.performance.throughput)
        .set_volume_initialization_rate(request.performance.initialization_rate);
    let further = request.further_volumes.iter();
    let further = further.map(|own| (own.device.as_str(), volume(own.gib)));
    let all = [(request.root_device.as_str(), root)].into_iter().chain(further);
    let mapping = |(device, volume): (&str, EbsBlockDeviceBuilder)| {
        BlockDeviceMapping::builder().device_name(device).ebs(volume.build()).build()
    };
    all.map(mapping).collect()
}

fn tag_specifications(request: &RunInstances) -> Vec<TagSpecification> {
    if request.tags.is_empty() {
        return Vec::new();
    }
    let tag = |(key, value): (&String, &String)| Tag::builder().key(key).value(value).build();
    let tags: Vec<Tag> = request.tags.iter().map(tag).collect();
    let of = |resource: ResourceType| {
        TagSpecification::builder().resource_type(resource).set_tags(Some(tags.clone())).build()
    };
    let all = [ResourceType::Instance, ResourceType::Volume, ResourceType::NetworkInterface];
    let request = request.is_spot.then_some(ResourceType::SpotInstancesRequest);
    all.into_iter().chain(request).map(of).collect()
}
