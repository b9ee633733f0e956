//! Lists of instances and offerings, and console output.

use std::time::Duration;

use base64::{Engine, engine::general_purpose::STANDARD};

use super::{ApiError, ok, pass_document, volumes};
use crate::{
    client::Reply,
    faults::Listed,
    instance::{Instance, State},
    query::Query,
    shared::Shared,
    xml::Element,
};

/// Time from a launch until its console output is posted.
const CONSOLE_POSTED_AFTER: Duration = Duration::from_secs(4 * 60);

/// Writes an instance's state and the options that moto ignores into its description.
pub(super) fn overlay(item: &mut Element, instance: &Instance) {
    item.set(state_element("instanceState", instance.state));
    item.set(Element::text("clientToken", instance.client_token.as_str()));
    let (code, message) = &instance.reason;
    if code.is_empty() {
        item.remove("stateReason");
    } else {
        let reason =
            vec![Element::text("code", code.as_str()), Element::text("message", message.as_str())];
        item.set(Element::parent("stateReason", reason));
    }
    if instance.spot {
        item.set(Element::text("instanceLifecycle", "spot"));
    } else {
        item.remove("instanceLifecycle");
    }
    if !instance.secondary_addresses.is_empty()
        && let Some(interface) = interface(item)
    {
        let primary = [true].into_iter().chain(std::iter::repeat(false));
        let addresses = instance.addresses().zip(primary).map(|(address, is_primary)| {
            let fields = vec![
                Element::text("primary", is_primary.to_string()),
                Element::text("privateIpAddress", address),
            ];
            Element::parent("item", fields)
        });
        interface.set(Element::parent("privateIpAddressesSet", addresses.collect()));
    }
    if !instance.instance_profile.is_empty() {
        let arn = match instance.instance_profile.as_str() {
            arn if arn.starts_with("arn:") => arn.to_owned(),
            name => format!("arn:aws:iam::123456789012:instance-profile/{name}"),
        };
        let profile = vec![Element::text("arn", arn), Element::text("id", "AIPATEST")];
        item.set(Element::parent("iamInstanceProfile", profile));
    }
    let mut options = vec![Element::text("state", "applied")];
    let given = instance.metadata_options.iter();
    options.extend(given.map(|(field, value)| Element::text(field, value.as_str())));
    item.set(Element::parent("metadataOptions", options));
    if instance.state == State::Terminated {
        for name in ["privateIpAddress", "ipAddress", "subnetId", "vpcId"] {
            item.remove(name);
        }
        for name in ["networkInterfaceSet", "blockDeviceMapping"] {
            item.set(Element::parent(name, Vec::new()));
        }
    }
}

/// Returns the first interface of an instance's description.
fn interface(item: &mut Element) -> Option<&mut Element> {
    item.child_mut("networkInterfaceSet")?.children.first_mut()
}

pub(super) fn state_element(name: &str, state: State) -> Element {
    let fields =
        vec![Element::text("code", state.code().to_string()), Element::text("name", state.name())];
    Element::parent(name, fields)
}

pub(super) async fn instances(
    query: &Query,
    signed: Option<&str>,
    shared: &Shared,
) -> Result<Reply, ApiError> {
    let names = query.filter("instance-state-name");
    let codes = query.filter("instance-state-code");
    let tokens = query.filter("client-token");
    let passed =
        query.without_filters(&["instance-state-name", "instance-state-code", "client-token"]);
    let mut root = match pass_document(&passed, signed, shared).await? {
        Ok(root) => root,
        Err(reply) => return Ok(reply),
    };
    let mut state = shared.lock();
    let names_instances = !query.list("InstanceId").is_empty();
    let fault = state.faults.lists.clone().filter(|_| !names_instances);
    let mut shown = 0_usize;
    if let Some(reservations) = root.child_mut("reservationSet") {
        for reservation in &mut reservations.children {
            let Some(set) = reservation.child_mut("instancesSet") else { continue };
            set.children.retain_mut(|item| {
                let id = item.at("instanceId").to_owned();
                let instance = match &fault {
                    Some(Listed::Stale(instances)) => instances.get(&id),
                    _ => state.visible(&id).map(|instance| &*instance),
                };
                let Some(instance) = instance else { return false };
                overlay(item, instance);
                let name = instance.state.name();
                let code = instance.state.code().to_string();
                let is_wanted = names.as_ref().is_none_or(|names| names.contains(&name))
                    && codes.as_ref().is_none_or(|codes| codes.contains(&code.as_str()))
                    && tokens
                        .as_ref()
                        .is_none_or(|tokens| tokens.contains(&instance.client_token.as_str()));
                shown += usize::from(is_wanted);
                let is_absent = matches!(fault, Some(Listed::Partial)) && !shown.is_multiple_of(2);
                is_wanted && !is_absent
            });
        }
        reservations.children.retain(|reservation| !reservation.items("instancesSet").is_empty());
    }
    Ok(ok(&root))
}

pub(super) async fn offerings(
    query: &Query,
    signed: Option<&str>,
    shared: &Shared,
) -> Result<Reply, ApiError> {
    let mut root = match pass_document(query, signed, shared).await? {
        Ok(root) => root,
        Err(reply) => return Ok(reply),
    };
    let withdrawn = shared.lock().faults.not_offered.clone();
    if let Some(set) = root.child_mut("instanceTypeOfferingSet") {
        set.children.retain(|item| {
            let offering = (item.at("instanceType").to_owned(), item.at("location").to_owned());
            !withdrawn.contains(&offering)
        });
    }
    Ok(ok(&root))
}

/// Applies the filter `route.instance-id`, which moto lacks.
pub(super) async fn route_tables(
    query: &Query,
    signed: Option<&str>,
    shared: &Shared,
) -> Result<Reply, ApiError> {
    const FILTER: &str = "route.instance-id";
    let wanted = query.filter(FILTER);
    let passed = query.without_filters(&[FILTER]);
    let mut root = match pass_document(&passed, signed, shared).await? {
        Ok(root) => root,
        Err(reply) => return Ok(reply),
    };
    if let (Some(wanted), Some(set)) = (wanted, root.child_mut("routeTableSet")) {
        set.children.retain(|table| {
            let mut routes = table.items("routeSet").iter();
            routes.any(|route| wanted.contains(&route.at("instanceId")))
        });
    }
    Ok(ok(&root))
}

/// Adds the architecture and block devices of registered images, which moto drops.
pub(super) async fn images(
    query: &Query,
    signed: Option<&str>,
    shared: &Shared,
) -> Result<Reply, ApiError> {
    let mut root = match pass_document(query, signed, shared).await? {
        Ok(root) => root,
        Err(reply) => return Ok(reply),
    };
    if let Some(set) = root.child_mut("imagesSet") {
        for item in &mut set.children {
            if item.at("architecture").is_empty() {
                item.set(Element::text("architecture", "x86_64"));
            }
            item.set(volumes::described(&shared.lock().image_volumes));
        }
    }
    Ok(ok(&root))
}

/// Returns the console output. `Latest` returns the current output of Nitro instances. Without it
/// the output is posted minutes after the launch, and at the end.
pub(super) fn console(query: &Query, shared: &Shared) -> Result<Reply, ApiError> {
    let id = query.get("InstanceId");
    let is_latest = query.get("Latest") == "true";
    let shown = {
        let mut state = shared.lock();
        let delay = state.faults.console_after.unwrap_or(CONSOLE_POSTED_AFTER);
        let instance = state.instance(id);
        let kind = instance.as_ref().map_or("", |it| it.instance_type.as_str());
        let is_nitro = shared.types.get(kind).is_none_or(|found| found.is_nitro);
        if is_latest && !is_nitro {
            return Err(ApiError::client(
                "UnsupportedOperation",
                "This instance type does not support retrieving the latest console logs. Only \
                 instances built on the Nitro System do.",
            ));
        }
        let is_posted =
            |it: &Instance| it.launched.elapsed() >= delay || it.state == State::Terminated;
        is_latest || instance.is_some_and(|instance| is_posted(instance))
    };
    let mut fields = vec![
        Element::text("requestId", "test-cloud"),
        Element::text("instanceId", id),
        Element::text("timestamp", jiff::Timestamp::now().to_string()),
    ];
    if shown {
        fields.push(Element::text("output", STANDARD.encode(shared.console_tail(id))));
    }
    Ok(ok(&Element::response("GetConsoleOutputResponse", fields)))
}
