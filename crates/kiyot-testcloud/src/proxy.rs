//! Endpoint of the EC2 API and of the price list: applies faults, adds what moto lacks and passes
//! all other calls to moto.

use std::{fmt, sync::Arc, time::Instant};

use bytes::Bytes;
use http::{Request, Response, header};
use http_body_util::{BodyExt, Full, Limited};
use hyper::{body::Incoming, service::service_fn};
use hyper_util::rt::TokioIo;
use tokio::{
    net::{TcpListener, TcpStream},
    task::JoinSet,
    time::{Duration, sleep, timeout},
};

use crate::{
    calls::Outcome,
    client::Reply,
    faults::{Credentials, Hold, Outage},
    query::{MAX_FORM_BYTES, Query},
    shared::Shared,
    throttle::Rate,
    xml::Element,
};

pub(crate) mod launch;
mod lists;
mod metadata_options;
pub(crate) mod power;
mod prices;
mod products;
mod volumes;

/// Period of the checks for the end of a fault.
const FAULT_POLL_PERIOD: Duration = Duration::from_millis(20);

/// An error of the API.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ApiError {
    status: u16,
    code: String,
    message: String,
}

impl ApiError {
    /// Makes a client error.
    fn client(code: &str, message: impl Into<String>) -> Self {
        Self { status: 400, code: code.to_owned(), message: message.into() }
    }

    /// Makes an error with an HTTP status.
    fn with_status(status: u16, code: &str, message: impl Into<String>) -> Self {
        Self { status, code: code.to_owned(), message: message.into() }
    }

    fn reply(&self) -> Reply {
        let error = Element::parent(
            "Error",
            vec![
                Element::text("Code", self.code.as_str()),
                Element::text("Message", self.message.as_str()),
            ],
        );
        let root = Element::parent(
            "Response",
            vec![Element::parent("Errors", vec![error]), Element::text("RequestID", "test-cloud")],
        );
        Reply { status: self.status, body: root.document() }
    }
}

/// A connection that is closed without a reply.
#[derive(Debug)]
struct Dropped;

impl fmt::Display for Dropped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the reply is lost")
    }
}

impl std::error::Error for Dropped {}

/// Accepts connections until its task ends, and refuses them during [`Outage::Refused`].
pub(crate) async fn serve(listener: TcpListener, shared: Arc<Shared>) {
    let address = listener.local_addr().expect("a bound socket has an address");
    let mut listener = Some(listener);
    let mut connections = JoinSet::new();
    loop {
        let refused = shared.lock().faults.outage == Some(Outage::Refused);
        if refused {
            listener = None;
            sleep(FAULT_POLL_PERIOD).await;
            continue;
        }
        if listener.is_none() {
            // The port is free again when nothing listens on it.
            listener = TcpListener::bind(address).await.ok();
        }
        let Some(open) = &listener else {
            sleep(FAULT_POLL_PERIOD).await;
            continue;
        };
        while connections.try_join_next().is_some() {}
        // The faults are checked once a period.
        if let Ok(Ok((stream, _))) = timeout(FAULT_POLL_PERIOD, open.accept()).await {
            connections.spawn(connection(stream, Arc::clone(&shared)));
        }
    }
}

async fn connection(stream: TcpStream, shared: Arc<Shared>) {
    let service = service_fn(move |request| {
        let shared = Arc::clone(&shared);
        // A call has its effect even if its caller hangs up.
        async move {
            let answer = tokio::spawn(respond(request, shared)).await;
            answer.unwrap_or(Err(Dropped))
        }
    });
    // An error is the caller's fault, or a dropped reply.
    let _ = hyper::server::conn::http1::Builder::new()
        .serve_connection(TokioIo::new(stream), service)
        .await;
}

async fn respond(
    request: Request<Incoming>,
    shared: Arc<Shared>,
) -> Result<Response<Full<Bytes>>, Dropped> {
    let value = |name: &str| {
        let value = request.headers().get(name).and_then(|value| value.to_str().ok());
        value.map(str::to_owned)
    };
    let caller = Caller {
        signed: value(header::AUTHORIZATION.as_str()),
        token: value("x-amz-security-token"),
    };
    let target = value("x-amz-target");
    let body = Limited::new(request.into_body(), MAX_FORM_BYTES).collect().await;
    let query = body.ok().and_then(|body| match &target {
        Some(target) => products::query(target, &body.to_bytes()),
        None => Query::parse(&body.to_bytes()),
    });
    let reply = match query {
        Some(query) => {
            let number = shared.lock().record(&query, &caller);
            if shared.lock().faults.holds.get(&query.action) == Some(&Hold::Effect) {
                shared.lock().finish(number, Outcome::Held);
                tokio::spawn(async move {
                    released(&query, &shared).await;
                    let (_, outcome) = answer(number, &query, &caller, &shared).await;
                    shared.lock().finish(number, outcome);
                });
                return Err(Dropped);
            }
            let (reply, outcome) = answer(number, &query, &caller, &shared).await;
            shared.lock().finish(number, outcome);
            reply.ok_or(Dropped)?
        }
        None => ApiError::client("MalformedQueryString", "the request is no form with an action")
            .reply(),
    };
    let (reply, content_type) = match target {
        Some(_) => (products::reply(reply), "application/x-amz-json-1.1"),
        None => (reply, "text/xml;charset=UTF-8"),
    };
    let response = Response::builder()
        .status(reply.status)
        .header(header::CONTENT_TYPE, content_type)
        .body(Full::new(Bytes::from(reply.body)));
    response.map_err(|_| Dropped)
}

/// Headers of a call that identify its caller.
#[derive(Debug)]
pub(crate) struct Caller {
    /// The header `authorization`.
    pub(crate) signed: Option<String>,
    /// The session token of a temporary key.
    pub(crate) token: Option<String>,
}

impl Caller {
    /// Returns the id of the key that signed the call: the begin of its `Credential`; "" for an
    /// unsigned call.
    pub(crate) fn key_id(&self) -> &str {
        let credential = self.signed.as_ref().and_then(|signed| signed.split_once("Credential="));
        credential.and_then(|(_, scope)| scope.split('/').next()).unwrap_or_default()
    }
}

/// Waits until no call of the action is held.
async fn released(query: &Query, shared: &Shared) {
    while shared.lock().faults.holds.contains_key(&query.action) {
        sleep(FAULT_POLL_PERIOD).await;
    }
}

/// Replies to a call. Without a reply the connection is closed.
async fn answer(
    number: u64,
    query: &Query,
    caller: &Caller,
    shared: &Shared,
) -> (Option<Reply>, Outcome) {
    loop {
        let outage = shared.lock().faults.outage;
        let error = match outage {
            None => break,
            Some(Outage::Refused | Outage::Reset) => return (None, Outcome::Reset),
            Some(Outage::Unavailable) => {
                ApiError::with_status(503, "Unavailable", "the server is overloaded")
            }
            Some(Outage::InternalError) => {
                ApiError::with_status(500, "InternalError", "an internal error has occurred")
            }
            Some(Outage::Hang) => {
                sleep(FAULT_POLL_PERIOD).await;
                if shared.lock().faults.outage.is_some() {
                    continue;
                }
                return (None, Outcome::Reset);
            }
        };
        return (Some(error.reply()), Outcome::Error(error.code));
    }
    let reply = match admit(query, caller, shared) {
        Ok(()) => effect(query, caller.signed.as_deref(), shared)
            .await
            .unwrap_or_else(|error| error.reply()),
        Err(error) => error.reply(),
    };
    let (delay, lost) = {
        let faults = &mut shared.lock().faults;
        let lost = faults.lost_replies.get_mut(&query.action).filter(|count| **count > 0);
        let lost = lost.map(|count| *count -= 1).is_some();
        (faults.delays.get(&query.action).copied().unwrap_or_default(), lost)
    };
    if !delay.is_zero() {
        sleep(delay).await;
    }
    if shared.lock().faults.holds.get(&query.action) == Some(&Hold::Reply) {
        shared.lock().finish(number, Outcome::Held);
        released(query, shared).await;
    }
    if lost {
        return (None, Outcome::Lost);
    }
    let outcome = reply.error().map_or(Outcome::Ok, Outcome::Error);
    (Some(reply), outcome)
}

/// Checks credentials, request limits, permissions and ids of a call.
fn admit(query: &Query, caller: &Caller, shared: &Shared) -> Result<(), ApiError> {
    let mut state = shared.lock();
    let has_expired = (!state.role.accepts(caller)).then_some(Credentials::Expired);
    if let Some(refusal) = state.faults.credentials.or(has_expired) {
        return Err(match refusal {
            Credentials::Wrong => ApiError::with_status(
                401,
                "AuthFailure",
                "AWS was not able to validate the provided access credentials",
            ),
            Credentials::Expired => ApiError::client("RequestExpired", "Request has expired."),
            Credentials::Unknown => ApiError::with_status(
                403,
                "InvalidClientTokenId",
                "The security token included in the request is invalid.",
            ),
        });
    }
    let narrowed = query.parameters.keys().any(|key| key != "DryRun");
    let rate = Rate::documented(&query.action, narrowed);
    if state.faults.throttled && !state.buckets.take(&query.action, rate, Instant::now()) {
        return Err(ApiError::with_status(503, "RequestLimitExceeded", "Request limit exceeded."));
    }
    let failure = state.faults.failures.get_mut(&query.action).filter(|(.., count)| *count > 0);
    if let Some((status, code, count)) = failure {
        *count -= 1;
        return Err(ApiError::with_status(*status, code, "set by the test"));
    }
    // Tags in a launch require the permission to create tags.
    let tags =
        query.action == "RunInstances" && !query.get("TagSpecification.1.ResourceType").is_empty();
    let mut needed = ["*", &query.action].into_iter().chain(tags.then_some("CreateTags"));
    let denied = needed.rfind(|action| state.faults.denied.contains(*action));
    if let Some(denied) = denied {
        let action = if denied == "*" { &query.action } else { denied };
        let message = format!(
            "You are not authorized to perform this operation. User: arn:aws:sts::123456789012:\
             assumed-role/node/i-0 is not authorized to perform: ec2:{action} on resource: \
             arn:aws:ec2:us-east-1:123456789012:* because no identity-based policy allows the \
             ec2:{action} action. Encoded authorization failure message: {}",
            "A".repeat(600)
        );
        return Err(ApiError::with_status(403, "UnauthorizedOperation", message));
    }
    if query.action == "RunInstances" {
        return Ok(());
    }
    let ids = ["InstanceId", "ResourceId"].iter().flat_map(|key| query.list(key));
    let ids = ids.chain([query.get("InstanceId"), query.get("ResourceId")]);
    let knows_unseen = state.faults.changes_unseen && query.action.starts_with("Modify");
    let unknown: Vec<_> = ids
        .filter(|id| id.starts_with("i-") && !knows_unseen && state.visible(id).is_none())
        .map(str::to_owned)
        .collect();
    match unknown.as_slice() {
        [] if is_dry_run(query) => Err(dry_run()),
        [] => Ok(()),
        [id] => Err(ApiError::client(
            "InvalidInstanceID.NotFound",
            format!("The instance ID '{id}' does not exist"),
        )),
        ids => Err(ApiError::client(
            "InvalidInstanceID.NotFound",
            format!("The instance IDs '{}' do not exist", ids.join(", ")),
        )),
    }
}

fn is_dry_run(query: &Query) -> bool {
    query.get("DryRun") == "true"
}

fn dry_run() -> ApiError {
    ApiError::with_status(
        412,
        "DryRunOperation",
        "Request would have succeeded, but DryRun flag is set.",
    )
}

async fn effect(query: &Query, signed: Option<&str>, shared: &Shared) -> Result<Reply, ApiError> {
    match query.action.as_str() {
        "RunInstances" => launch::run(query, signed, shared).await,
        "TerminateInstances" | "StopInstances" | "StartInstances" => {
            power::change(query, signed, shared).await
        }
        "ModifyInstanceAttribute" => power::modify(query, signed, shared).await,
        "ModifyInstanceMetadataOptions" => metadata_options::modify(query, shared),
        "DescribeInstances" => lists::instances(query, signed, shared).await,
        "DescribeInstanceTypeOfferings" => lists::offerings(query, signed, shared).await,
        "DescribeImages" => lists::images(query, signed, shared).await,
        "DescribeRouteTables" => lists::route_tables(query, signed, shared).await,
        "GetConsoleOutput" => lists::console(query, shared),
        products::ACTION => products::page(query, shared),
        "DescribeSpotPriceHistory" => Ok(prices::history(query, shared)),
        action => {
            let reply = pass(query, signed, shared).await?;
            if changes_network(action)
                && reply.status == 200
                && let Some(vpc) = shared.vpc()
            {
                vpc.read(shared).await.map_err(of_vpc)?;
            }
            Ok(reply)
        }
    }
}

/// Returns whether an action changes security groups or routes.
fn changes_network(action: &str) -> bool {
    let verbs = ["Authorize", "Create", "Delete", "Replace", "Revoke"];
    let of = ["SecurityGroup", "Route"];
    verbs.iter().any(|verb| {
        action.strip_prefix(verb).is_some_and(|noun| of.iter().any(|of| noun.starts_with(of)))
    })
}

/// Returns the error of a call whose effect on the VPC failed.
pub(crate) fn of_vpc(error: String) -> ApiError {
    ApiError::with_status(500, "InternalError", format!("VPC: {error}"))
}

/// Passes a call to moto.
async fn pass(query: &Query, signed: Option<&str>, shared: &Shared) -> Result<Reply, ApiError> {
    shared
        .moto(query, signed)
        .await
        .map_err(|error| ApiError::with_status(500, "InternalError", format!("moto: {error}")))
}

/// Passes a call to moto, and returns the document of a success, so that it can be changed, or the
/// failure.
async fn pass_document(
    query: &Query,
    signed: Option<&str>,
    shared: &Shared,
) -> Result<Result<Element, Reply>, ApiError> {
    let reply = pass(query, signed, shared).await?;
    Ok(if reply.status == 200 { Ok(reply.root()) } else { Err(reply) })
}

fn ok(root: &Element) -> Reply {
    Reply { status: 200, body: root.document() }
}
