//! The instance metadata service, version 2. The caller's address identifies the instance.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    net::IpAddr,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use base64::{Engine, engine::general_purpose::STANDARD};
use bytes::Bytes;
use http::{HeaderName, HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::Full;
use hyper::{body::Incoming, service::service_fn};
use hyper_util::rt::TokioIo;
use tokio::{
    net::{TcpListener, TcpStream},
    task::JoinSet,
};

use crate::{instance::Instance, shared::Shared};

/// Longest lifetime of a token in seconds.
const MAX_TOKEN_SECONDS: u64 = 21_600;
/// Header with a token's lifetime in seconds, in the request and in the response.
const TOKEN_LIFETIME: HeaderName = HeaderName::from_static("x-aws-ec2-metadata-token-ttl-seconds");
/// Most tokens. Beyond it, the oldest token is dropped.
const MAX_TOKENS: usize = 10_000;
/// Hop limit of all packets except token responses.
const DEFAULT_HOP_LIMIT: u32 = 64;
/// Paths with a single value, relative to `/latest/meta-data/`.
const PATHS: [&str; 10] = [
    "ami-launch-index",
    "hostname",
    "instance-id",
    "instance-life-cycle",
    "instance-type",
    "local-hostname",
    "local-ipv4",
    "mac",
    "network/",
    "placement/availability-zone",
];
/// Directory of interfaces, relative to `/latest/meta-data/`.
const INTERFACES: &str = "network/interfaces/macs/";

/// Tokens by number: text, instance, expiry.
type Tokens = Arc<Mutex<BTreeMap<u64, (String, String, Instant)>>>;

/// Serves the instances of a VPC until its task ends.
pub(crate) async fn serve(listener: TcpListener, shared: Arc<Shared>) {
    let tokens = Tokens::default();
    let mut connections = JoinSet::new();
    loop {
        let Ok((stream, peer)) = listener.accept().await else { continue };
        while connections.try_join_next().is_some() {}
        connections.spawn(connection(stream, peer.ip(), Arc::clone(&shared), Arc::clone(&tokens)));
    }
}

async fn connection(stream: TcpStream, peer: IpAddr, shared: Arc<Shared>, tokens: Tokens) {
    // A second handle sets the hop limit while the connection is served.
    let Ok(stream) = stream.into_std() else { return };
    let Ok(control) = stream.try_clone() else { return };
    let Ok(stream) = TcpStream::from_std(stream) else { return };
    let service = service_fn(|request| {
        let response = match instance_of(peer, &shared) {
            Some(instance) => {
                let is_put = request.method() == Method::PUT;
                let hops = if is_put { hop_limit(&instance) } else { DEFAULT_HOP_LIMIT };
                let _ = control.set_ttl(hops);
                respond(&request, &instance, &tokens, &shared)
            }
            None => (StatusCode::NOT_FOUND, "the caller is no instance of the VPC".to_owned()),
        };
        let lifetime = request.headers().get(TOKEN_LIFETIME).cloned();
        let is_token = request.method() == Method::PUT && response.0 == StatusCode::OK;
        async move { Ok::<_, Infallible>(reply(response, lifetime.filter(|_| is_token))) }
    });
    let _ = hyper::server::conn::http1::Builder::new()
        .serve_connection(TokioIo::new(stream), service)
        .await;
}

/// Returns the response, with the lifetime of a token.
fn reply(
    (status, text): (StatusCode, String),
    lifetime: Option<HeaderValue>,
) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(text)));
    *response.status_mut() = status;
    response.headers_mut().extend(lifetime.map(|value| (TOKEN_LIFETIME, value)));
    response
}

fn instance_of(peer: IpAddr, shared: &Shared) -> Option<Instance> {
    let (state, peer) = (shared.lock(), peer.to_string());
    let mut present = state.instances.values().filter(|instance| !instance.state.is_ended());
    present.find(|instance| instance.addresses().any(|own| own == peer)).cloned()
}

fn option<'a>(instance: &'a Instance, name: &str) -> &'a str {
    let mut options = instance.metadata_options.iter();
    options.find(|(own, _)| own == name).map_or("", |(_, value)| value)
}

fn hop_limit(instance: &Instance) -> u32 {
    option(instance, "httpPutResponseHopLimit").parse().unwrap_or(1)
}

fn respond(
    request: &Request<Incoming>,
    instance: &Instance,
    tokens: &Tokens,
    shared: &Shared,
) -> (StatusCode, String) {
    let refuse = |status: StatusCode| (status, status.to_string());
    if option(instance, "httpEndpoint") == "disabled" {
        return refuse(StatusCode::FORBIDDEN);
    }
    let header = |name: &str| request.headers().get(name).and_then(|value| value.to_str().ok());
    let path = request.uri().path();
    if request.method() == Method::PUT {
        if path != "/latest/api/token" {
            return refuse(StatusCode::NOT_FOUND);
        }
        if header("x-forwarded-for").is_some() {
            return refuse(StatusCode::FORBIDDEN);
        }
        let seconds = header(TOKEN_LIFETIME.as_str())
            .and_then(|text| text.parse().ok())
            .filter(|seconds| (1..=MAX_TOKEN_SECONDS).contains(seconds));
        return seconds.map_or_else(
            || refuse(StatusCode::BAD_REQUEST),
            |seconds| (StatusCode::OK, new_token(instance, seconds, tokens)),
        );
    }
    if request.method() != Method::GET {
        return refuse(StatusCode::METHOD_NOT_ALLOWED);
    }
    let allowed = header("x-aws-ec2-metadata-token").map_or_else(
        || option(instance, "httpTokens") != "required",
        |token| is_valid(token, instance, tokens),
    );
    if !allowed {
        return refuse(StatusCode::UNAUTHORIZED);
    }
    value(path, instance)
        .or_else(|| of_role(path, instance, shared))
        .map_or_else(|| refuse(StatusCode::NOT_FOUND), |text| (StatusCode::OK, text))
}

fn new_token(instance: &Instance, seconds: u64, tokens: &Tokens) -> String {
    let mut tokens = tokens.lock().unwrap_or_else(PoisonError::into_inner);
    let number = tokens.last_key_value().map_or(0, |(number, _)| number + 1);
    // Tests need no secret tokens.
    let token = format!("token-{number}-{}", instance.id);
    let end = Instant::now() + Duration::from_secs(seconds);
    tokens.insert(number, (token.clone(), instance.id.clone(), end));
    if tokens.len() > MAX_TOKENS {
        tokens.pop_first();
    }
    token
}

fn is_valid(token: &str, instance: &Instance, tokens: &Tokens) -> bool {
    let tokens = tokens.lock().unwrap_or_else(PoisonError::into_inner);
    tokens
        .values()
        .any(|(own, id, end)| own == token && *id == instance.id && *end > Instant::now())
}

/// Returns the content of a path.
fn value(path: &str, instance: &Instance) -> Option<String> {
    // Every version of the service's paths is served as the latest version.
    let (_, path) = path.trim_start_matches('/').split_once('/')?;
    let host_name = || format!("ip-{}.ec2.internal", instance.address.replace('.', "-"));
    match path {
        "user-data" => {
            let text = STANDARD.decode(&instance.user_data).ok().filter(|text| !text.is_empty())?;
            Some(String::from_utf8_lossy(&text).into_owned())
        }
        "meta-data" | "meta-data/" => Some(PATHS.join("\n")),
        "meta-data/ami-launch-index" => Some("0".to_owned()),
        "meta-data/instance-id" => Some(instance.id.clone()),
        "meta-data/instance-type" => Some(instance.instance_type.clone()),
        "meta-data/instance-life-cycle" => {
            Some(if instance.spot { "spot" } else { "on-demand" }.to_owned())
        }
        "meta-data/hostname" | "meta-data/local-hostname" => Some(host_name()),
        "meta-data/local-ipv4" => Some(instance.address.clone()),
        "meta-data/mac" => Some(instance.mac.clone()),
        "meta-data/network/" => Some("interfaces/".to_owned()),
        "meta-data/network/interfaces/" => Some("macs/".to_owned()),
        "meta-data/placement/availability-zone" => Some(instance.zone.clone()),
        "dynamic/instance-identity" | "dynamic/instance-identity/" => Some("document".to_owned()),
        "dynamic/instance-identity/document" => {
            let document = serde_json::json!({
                "instanceId": instance.id,
                "instanceType": instance.instance_type,
                "privateIp": instance.address,
                "availabilityZone": instance.zone,
            });
            Some(document.to_string())
        }
        "meta-data/placement/region" => {
            Some(instance.zone.trim_end_matches(|c: char| c.is_ascii_lowercase()).to_owned())
        }
        path => interface(path.strip_prefix("meta-data/")?.strip_prefix(INTERFACES)?, instance),
    }
}

/// Returns the content of a path of the host's role.
fn of_role(path: &str, instance: &Instance, shared: &Shared) -> Option<String> {
    let path = path.trim_start_matches('/').split_once('/')?.1.strip_prefix("meta-data/")?;
    let mut state = shared.lock();
    if state.host.as_ref() != Some(&instance.id) {
        return None;
    }
    state.role.value(path)
}

/// Returns the content of a path below [`INTERFACES`].
fn interface(path: &str, instance: &Instance) -> Option<String> {
    let mac = &instance.mac;
    if path.is_empty() {
        return Some(format!("{mac}/"));
    }
    match path.strip_prefix(mac.as_str())? {
        "/" => Some("device-number\nlocal-ipv4s\nmac".to_owned()),
        "/device-number" => Some("0".to_owned()),
        "/local-ipv4s" => Some(instance.addresses().collect::<Vec<_>>().join("\n")),
        "/mac" => Some(mac.clone()),
        _ => None,
    }
}
