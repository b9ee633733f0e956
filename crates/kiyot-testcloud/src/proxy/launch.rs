//! RunInstances: client tokens, capacity, quotas and the parameters that moto ignores.

use std::{collections::BTreeMap, time::Instant};

use base64::{Engine, engine::general_purpose::STANDARD};

use super::{ApiError, dry_run, is_dry_run, lists, ok, pass_document, power, volumes};
use crate::{
    client::Reply,
    cloud::Subnet,
    faults::{FaultSet, Market},
    instance::{Instance, State},
    query::Query,
    shared::{Launch, Mutable, Shared},
    xml::Element,
};

/// Most bytes of user-data before encoding.
const MAX_USER_DATA_BYTES: usize = 16 * 1024;

/// Instance type of a request without a type.
const DEFAULT_TYPE: &str = "m1.small";

/// Offering and subnet of a request.
struct Target {
    instance_type: String,
    subnet: String,
    zone: String,
    market: Market,
    count: u32,
}

pub(super) async fn run(
    query: &Query,
    signed: Option<&str>,
    shared: &Shared,
) -> Result<Reply, ApiError> {
    let _launching = shared.launching.lock().await;
    let token = query.get("ClientToken").to_owned();
    let mut parameters = query.parameters.clone();
    parameters.remove("DryRun");
    if let Some(reply) = repeated(&token, &parameters, &mut shared.lock())? {
        return Ok(reply);
    }
    let target = target(query, signed, shared).await?;
    validate_image(query, signed, shared).await?;
    validate_names(query, signed, shared).await?;
    check_type(&target.instance_type, &shared.lock().faults)?;
    let volumes = volumes::of_launch(query, &shared.lock().image_volumes)?;
    check_limits(&target, shared)?;
    if is_dry_run(query) {
        return Err(dry_run());
    }
    // moto looks for the profile in IAM, which no test fills, so the endpoint keeps the profile.
    let mut passed = query.clone();
    passed.parameters.retain(|key, _| !key.starts_with("IamInstanceProfile."));
    let mut root = match pass_document(&passed, signed, shared).await? {
        Ok(root) => root,
        Err(reply) => return Ok(reply),
    };
    let secondary = secondary_addresses(query, &root, signed, shared).await?;
    let (ids, is_key_denied) = {
        let mut state = shared.lock();
        let mut ids = Vec::new();
        let saved = root.clone();
        if let Some(set) = root.child_mut("instancesSet") {
            for item in &mut set.children {
                let mut instance = make(query, item, &target.zone, shared.boots, &state.faults);
                instance.volumes.clone_from(&volumes);
                instance.secondary_addresses =
                    secondary.get(&instance.id).cloned().unwrap_or_default();
                lists::overlay(item, &instance);
                ids.push(instance.id.clone());
                state.instances.insert(instance.id.clone(), instance);
            }
        }
        if !token.is_empty() {
            let launch = Launch { parameters, reply: saved, instances: ids.clone() };
            state.launches.insert(token, launch);
        }
        let denied = &state.faults.denied_keys;
        (ids, volumes.iter().any(|volume| denied.contains(&volume.kms_key)))
    };
    shared.changed.notify_waiters();
    for id in ids.iter().filter(|_| is_key_denied) {
        power::end(id, "Client.InternalError", "Client error on launch", shared).await?;
    }
    Ok(ok(&root))
}

/// Assigns the secondary addresses of a launch, which moto ignores. Returns them by instance.
async fn secondary_addresses(
    query: &Query,
    root: &Element,
    signed: Option<&str>,
    shared: &Shared,
) -> Result<BTreeMap<String, Vec<String>>, ApiError> {
    let count = query.get("NetworkInterface.1.SecondaryPrivateIpAddressCount");
    let mut assigned = BTreeMap::new();
    for item in root.items("instancesSet").iter().filter(|_| !count.is_empty()) {
        let interfaces = item.all("networkInterfaceId");
        let interface = interfaces.first().map_or("", |id| &id.text);
        let parameters =
            [("NetworkInterfaceId", interface), ("SecondaryPrivateIpAddressCount", count)];
        let assign = Query::new("AssignPrivateIpAddresses", &parameters);
        let root = pass_document(&assign, signed, shared).await?.map_err(|reply| {
            ApiError::with_status(500, "InternalError", format!("moto: {}", reply.body))
        })?;
        let addresses = root.items("assignedPrivateIpAddressesSet").iter();
        let addresses = addresses.map(|item| item.at("privateIpAddress").to_owned());
        let primary = item.at("privateIpAddress");
        let secondary = addresses.filter(|address| address != primary).collect();
        assigned.insert(item.at("instanceId").to_owned(), secondary);
    }
    Ok(assigned)
}

/// Returns the reply to a repeated launch, with the current state of its instances.
fn repeated(
    token: &str,
    parameters: &BTreeMap<String, String>,
    state: &mut Mutable,
) -> Result<Option<Reply>, ApiError> {
    let Some(launch) = state.launches.get(token).cloned() else { return Ok(None) };
    if launch.parameters != *parameters {
        return Err(ApiError::client(
            "IdempotentParameterMismatch",
            "Arguments on this idempotent request are inconsistent with arguments used in \
             previous request(s).",
        ));
    }
    let instances: Vec<_> =
        launch.instances.iter().filter_map(|id| state.instance(id).cloned()).collect();
    if instances.iter().all(|instance| instance.state.is_ended()) {
        return Err(ApiError::client(
            "IdempotentInstanceTerminated",
            "The client token was used to launch an instance that has been terminated.",
        ));
    }
    let mut root = launch.reply;
    if let Some(set) = root.child_mut("instancesSet") {
        for item in &mut set.children {
            let id = item.at("instanceId").to_owned();
            if let Some(instance) = instances.iter().find(|instance| instance.id == id) {
                lists::overlay(item, instance);
            }
        }
    }
    Ok(Some(ok(&root)))
}

async fn target(query: &Query, signed: Option<&str>, shared: &Shared) -> Result<Target, ApiError> {
    let or = |value: &str, other: &str| {
        if value.is_empty() { other.to_owned() } else { value.to_owned() }
    };
    let instance_type = or(query.get("InstanceType"), DEFAULT_TYPE);
    let is_newer = shared.lock().faults.prices.contains_key(&instance_type);
    if !is_newer && !shared.types.contains_key(&instance_type) {
        return Err(ApiError::client(
            "InvalidParameterValue",
            format!("Invalid value '{instance_type}' for InstanceType."),
        ));
    }
    let encoded = query.get("UserData");
    let user_data = STANDARD.decode(encoded).map_err(|_| {
        ApiError::client("InvalidUserData.Malformed", "Invalid BASE64 encoding of user data.")
    })?;
    if user_data.len() > MAX_USER_DATA_BYTES {
        return Err(ApiError::client(
            "InvalidParameterValue",
            format!("User data is limited to {MAX_USER_DATA_BYTES} bytes"),
        ));
    }
    let subnet = or(query.get("SubnetId"), query.get("NetworkInterface.1.SubnetId"));
    let zone = if subnet.is_empty() {
        or(query.get("Placement.AvailabilityZone"), "us-east-1a")
    } else {
        let call = Query::new("DescribeSubnets", &[("SubnetId.1", &subnet)]);
        let found = pass_document(&call, signed, shared).await?.map_err(|_| {
            ApiError::client(
                "InvalidSubnetID.NotFound",
                format!("The subnet ID '{subnet}' does not exist"),
            )
        })?;
        found.all("availabilityZone").first().map_or_else(String::new, |zone| zone.text.clone())
    };
    let spot = query.get("InstanceMarketOptions.MarketType") == "spot";
    Ok(Target {
        instance_type,
        subnet,
        zone,
        market: if spot { Market::Spot } else { Market::OnDemand },
        count: query.get("MaxCount").parse().unwrap_or(1),
    })
}

/// Refuses an unknown image.
async fn validate_image(
    query: &Query,
    signed: Option<&str>,
    shared: &Shared,
) -> Result<(), ApiError> {
    let image = query.get("ImageId");
    let call = Query::new("DescribeImages", &[("ImageId.1", image)]);
    let known = match pass_document(&call, signed, shared).await? {
        Ok(root) => !root.items("imagesSet").is_empty(),
        Err(_) => false,
    };
    if known {
        return Ok(());
    }
    let code =
        if image.starts_with("ami-") { "InvalidAMIID.NotFound" } else { "InvalidAMIID.Malformed" };
    Err(ApiError::client(code, format!("The image id '[{image}]' does not exist")))
}

/// Refuses unknown security groups and key pairs, which moto ignores.
async fn validate_names(
    query: &Query,
    signed: Option<&str>,
    shared: &Shared,
) -> Result<(), ApiError> {
    let groups = ["SecurityGroupId", "NetworkInterface.1.SecurityGroupId"];
    for group in groups.iter().flat_map(|key| query.list(key)) {
        let call = Query::new("DescribeSecurityGroups", &[("GroupId.1", group)]);
        pass_document(&call, signed, shared).await?.map_err(|_| {
            let message = format!("The security group '{group}' does not exist");
            ApiError::client("InvalidGroup.NotFound", message)
        })?;
    }
    let key = query.get("KeyName");
    if key.is_empty() {
        return Ok(());
    }
    let call = Query::new("DescribeKeyPairs", &[("KeyName.1", key)]);
    pass_document(&call, signed, shared).await?.map(drop).map_err(|_| {
        let message = format!("The key pair '{key}' does not exist");
        ApiError::client("InvalidKeyPair.NotFound", message)
    })
}

/// Refuses a type that the image or the account does not allow.
fn check_type(kind: &str, faults: &FaultSet) -> Result<(), ApiError> {
    if let Some((code, message)) = faults.refused_types.get(kind) {
        return Err(ApiError::client(code, message.as_str()));
    }
    if faults.free_plan.is_empty() || faults.free_plan.contains(kind) {
        return Ok(());
    }
    Err(ApiError::client(
        "InvalidParameterCombination",
        "The specified instance type is not eligible for Free Tier. For a list of Free Tier \
         instance types, run 'describe-instance-types' with the filter 'free-tier-eligible=true'.",
    ))
}

/// Applies offerings, addresses, quotas and capacity, in this order.
fn check_limits(target: &Target, shared: &Shared) -> Result<(), ApiError> {
    let mut state = shared.lock();
    let (kind, zone) = (&target.instance_type, &target.zone);
    if state.faults.not_offered.contains(&(kind.clone(), zone.clone())) {
        return Err(ApiError::client(
            "Unsupported",
            format!(
                "Your requested instance type ({kind}) is not supported in your requested \
                 Availability Zone ({zone})."
            ),
        ));
    }
    if state.faults.full_subnets.contains(&target.subnet) {
        return Err(ApiError::client(
            "InsufficientFreeAddressesInSubnet",
            format!("There are not enough free addresses in subnet '{}'", target.subnet),
        ));
    }
    let now = Instant::now();
    state.instances.values_mut().for_each(|instance| instance.settle(now));
    let present: Vec<_> = state
        .instances
        .values()
        .filter(|instance| matches!(instance.state, State::Pending | State::Running))
        .collect();
    let vcpus = |name: &str| shared.types.get(name).map_or(0, |found| found.vcpus);
    let used: u32 = present
        .iter()
        .filter(|instance| !instance.spot)
        .map(|instance| vcpus(&instance.instance_type))
        .sum();
    let spots = present.iter().filter(|instance| instance.spot).count() as u64;
    match target.market {
        Market::OnDemand => {
            let needed = used + vcpus(kind) * target.count;
            if let Some(limit) = state.faults.vcpu_limit.filter(|limit| needed > *limit) {
                return Err(ApiError::client(
                    "VcpuLimitExceeded",
                    format!(
                        "You have requested more vCPU capacity than your current vCPU limit of \
                         {limit} allows for the instance bucket that the specified instance type \
                         belongs to."
                    ),
                ));
            }
        }
        Market::Spot => {
            let needed = spots + u64::from(target.count);
            if state.faults.spot_limit.is_some_and(|limit| needed > limit as u64) {
                return Err(ApiError::client(
                    "MaxSpotInstanceCountExceeded",
                    "Max spot instance count exceeded",
                ));
            }
        }
    }
    let lacks = |kind: &str, zone: &str| {
        state.faults.no_capacity.contains(&(kind.to_owned(), zone.to_owned(), target.market))
    };
    if lacks(kind, zone) || lacks("*", zone) || lacks(kind, "*") || lacks("*", "*") {
        return Err(ApiError::with_status(
            500,
            "InsufficientInstanceCapacity",
            format!(
                "We currently do not have sufficient {kind} capacity in the Availability Zone you \
                 requested ({zone})."
            ),
        ));
    }
    Ok(())
}

/// Makes the instance of a launch that moto has carried out.
pub(crate) fn launched(
    query: &Query,
    item: &Element,
    subnet: &Subnet,
    shared: &Shared,
) -> Instance {
    make(query, item, &subnet.zone, shared.boots, &shared.lock().faults)
}

fn make(query: &Query, item: &Element, zone: &str, boots: bool, faults: &FaultSet) -> Instance {
    let now = Instant::now();
    let metadata = [
        ("HttpTokens", "httpTokens", "optional"),
        ("HttpPutResponseHopLimit", "httpPutResponseHopLimit", "1"),
        ("HttpEndpoint", "httpEndpoint", "enabled"),
        ("InstanceMetadataTags", "instanceMetadataTags", "disabled"),
    ];
    let metadata_options = metadata.iter().map(|(key, field, default)| {
        let value = query.get(&format!("MetadataOptions.{key}"));
        ((*field).to_owned(), if value.is_empty() { *default } else { value }.to_owned())
    });
    let mac = item.all("macAddress").first().map_or_else(String::new, |mac| mac.text.clone());
    Instance {
        id: item.at("instanceId").to_owned(),
        state: State::Pending,
        address: item.at("privateIpAddress").to_owned(),
        secondary_addresses: Vec::new(),
        mac,
        subnet: item.at("subnetId").to_owned(),
        groups: groups(item),
        is_checked: true,
        zone: zone.to_owned(),
        instance_type: item.at("instanceType").to_owned(),
        spot: query.get("InstanceMarketOptions.MarketType") == "spot",
        stops_on_shutdown: query.get("InstanceInitiatedShutdownBehavior") != "terminate",
        client_token: query.get("ClientToken").to_owned(),
        tags: tags(query),
        user_data: query.get("UserData").to_owned(),
        metadata_options: metadata_options.collect(),
        instance_profile: ["Arn", "Name"]
            .map(|key| query.get(&format!("IamInstanceProfile.{key}")))
            .concat(),
        volumes: Vec::new(),
        reason: (String::new(), String::new()),
        boots: 0,
        launched: now,
        visible: now.checked_add(faults.visible_after),
        settles: now.checked_add(faults.pending_for),
        held: boots,
        booting: false,
        is_removed: false,
    }
}

/// Returns the security groups of an instance's interface.
fn groups(item: &Element) -> Vec<String> {
    let interfaces = item.items("networkInterfaceSet").iter();
    let groups = interfaces.flat_map(|interface| interface.items("groupSet"));
    groups.map(|group| group.at("groupId").to_owned()).collect()
}

/// Returns the tags that a launch gives its instances.
fn tags(query: &Query) -> BTreeMap<String, String> {
    let specification = |number: &usize| format!("TagSpecification.{number}");
    let resource = |number: &usize| query.get(&format!("{}.ResourceType", specification(number)));
    let numbers = (1..).take_while(|number| !resource(number).is_empty());
    let tags = numbers.filter(|number| resource(number) == "instance").flat_map(|number| {
        let tag = move |tag: usize, part| {
            query.get(&format!("{}.Tag.{tag}.{part}", specification(&number))).to_owned()
        };
        let pairs = (1..).map(move |number| (tag(number, "Key"), tag(number, "Value")));
        pairs.take_while(|(key, _)| !key.is_empty())
    });
    tags.collect()
}
