//! Lists and watches a kind of objects, to keep their known state current.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::BytesMut;
use http_body_util::BodyExt;
use serde::{Deserialize, de::DeserializeOwned};
use tokio::time::{sleep, timeout};

use crate::{
    call::{Call, WATCH_SECONDS},
    client::{Access, CALL_TIMEOUT, Connection},
    counter::Counter,
    failure::Failure,
    gate::{FIRST_PAUSE, Gate},
};

/// Bounds the parts of a list.
const MAX_PARTS: usize = 100;
/// Bounds a change of a watch, in bytes. etcd refuses objects beyond 1.5 MiB.
const MAX_CHANGE_BYTES: usize = 4 * 1024 * 1024;
/// Time without data, beyond the watch's own end, after which the connection counts as dead.
const WATCH_GRACE: Duration = Duration::from_secs(15);

/// A watched kind of objects, with their known state.
pub(crate) trait Watched: Send + 'static {
    /// An object.
    type Object: DeserializeOwned + Send;

    /// Returns the call that lists a part, from a position, or the first part.
    fn list_call(&self, position: Option<&str>) -> Call;
    /// Returns the call that watches from a position.
    fn watch_call(&self, position: &str) -> Call;
    /// Returns the version of an object.
    fn version(object: &Self::Object) -> &str;
    /// Takes a part of a list.
    fn take_part(&mut self, is_first: bool, objects: Vec<Self::Object>);
    /// Ends a list: objects that were not in it are absent.
    fn end_list(&mut self);
    /// Takes a change: `ADDED`, `MODIFIED` or `DELETED`.
    fn changed(&mut self, change: &str, object: Self::Object);
    /// Notes that the known state is current.
    fn is_read(&self) {}
    /// Logs the first failure of a series.
    fn log_failed(failure: &Failure);
    /// Logs the end of a series of failures.
    fn log_recovered();
}

/// Lists and watches a kind of objects.
pub(crate) struct Reflector<W> {
    connection: Connection,
    watched: W,
    gate: Gate,
    /// True after a watch with an expired position, until a change or the end of another watch.
    has_expired: bool,
}

/// A change of a watch.
#[derive(Debug, Deserialize)]
struct Change {
    r#type: String,
    object: serde_json::Value,
}

/// A part of a list.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", bound = "O: DeserializeOwned")]
struct List<O> {
    #[serde(default)]
    metadata: ListMetadata,
    #[serde(default = "Vec::new")]
    items: Vec<O>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct ListMetadata {
    r#continue: String,
    resource_version: String,
}

impl<W: Watched> Reflector<W> {
    pub(crate) fn new(
        access: Access,
        watched: W,
        first_pause: Option<Duration>,
        counter: Arc<dyn Counter>,
    ) -> Self {
        Self {
            connection: Connection::new(access, counter, CALL_TIMEOUT),
            watched,
            gate: Gate::new(first_pause.unwrap_or(FIRST_PAUSE)),
            has_expired: false,
        }
    }

    /// Lists and watches until it is dropped.
    pub(crate) async fn run(mut self) {
        let mut position = String::new();
        // A watch is begun at most once in this time, even if the server ends each watch at once.
        let mut watch_at = Instant::now();
        let mut has_watch_failed = false;
        loop {
            let is_watch = !position.is_empty();
            if is_watch {
                sleep(watch_at.saturating_duration_since(Instant::now())).await;
                watch_at = Instant::now() + self.gate.first_pause();
            }
            let outcome = if is_watch {
                self.watch(&mut position).await
            } else {
                self.list().await.map(|listed| position = listed)
            };
            if outcome.is_ok() {
                self.watched.is_read();
            }
            match outcome {
                // A successful list does not end a series of failures of the watch.
                Ok(()) if has_watch_failed && !is_watch => {}
                Ok(()) => {
                    has_watch_failed = false;
                    self.has_expired &= !is_watch;
                    self.succeeded();
                }
                // The next list has the changes that were lost since the position. The position of
                // a fresh list does not expire.
                Err(Failure::Expired(_)) if is_watch && !self.has_expired => {
                    self.has_expired = true;
                    position.clear();
                }
                Err(failure) => {
                    has_watch_failed = is_watch;
                    self.connection.failed(&failure);
                    if self.gate.failed(&failure, Instant::now(), fastrand::f64()) {
                        W::log_failed(&failure);
                    }
                    sleep(self.gate.left(Instant::now())).await;
                }
            }
        }
    }

    fn succeeded(&mut self) {
        if self.gate.succeeded() {
            W::log_recovered();
        }
    }

    /// Lists the objects, and returns the position of the list.
    async fn list(&mut self) -> Result<String, Failure> {
        let client = self.connection.client().await?;
        let mut position = None;
        for part in 0..MAX_PARTS {
            let call = self.watched.list_call(position.as_deref());
            let listed: List<W::Object> = client.object(&call).await?;
            self.watched.take_part(part == 0, listed.items);
            position = Some(listed.metadata.r#continue).filter(|position| !position.is_empty());
            if position.is_none() {
                self.watched.end_list();
                return Ok(listed.metadata.resource_version);
            }
        }
        let message = format!("list has more than {MAX_PARTS} parts");
        Err(Failure::Server { status: 200, message })
    }

    /// Follows the changes from a position until the watch ends. After a failure without a change,
    /// clears the position, because the position may be the reason.
    async fn watch(&mut self, position: &mut String) -> Result<(), Failure> {
        let mut has_change = false;
        match self.follow(position, &mut has_change).await {
            // Proxies cut connections. The position covers all changes so far.
            Err(Failure::Unreachable(_) | Failure::TimedOut(_)) if has_change => Ok(()),
            Err(failure) => {
                if !has_change {
                    position.clear();
                }
                Err(failure)
            }
            Ok(()) => Ok(()),
        }
    }

    async fn follow(
        &mut self,
        position: &mut String,
        has_change: &mut bool,
    ) -> Result<(), Failure> {
        let client = self.connection.client().await?;
        let limit = Duration::from_secs(WATCH_SECONDS) + WATCH_GRACE;
        let call = self.watched.watch_call(position);
        let mut body = client.stream(&call, WATCH_GRACE).await?;
        let mut read = BytesMut::new();
        loop {
            let frame = timeout(limit, body.frame()).await.map_err(|_| Failure::TimedOut(limit))?;
            let Some(frame) = frame else { return Ok(()) };
            let frame = frame.map_err(|error| Failure::Unreachable(error.to_string()))?;
            let Ok(data) = frame.into_data() else { continue };
            if read.len() + data.len() > MAX_CHANGE_BYTES {
                let message = format!("change of a watch has more than {MAX_CHANGE_BYTES} bytes");
                position.clear();
                return Err(Failure::Server { status: 200, message });
            }
            read.extend_from_slice(&data);
            while let Some(end) = read.iter().position(|byte| *byte == b'\n') {
                let line = read.split_to(end + 1);
                self.changed(&line, position)?;
                self.watched.is_read();
                *has_change = true;
                self.has_expired = false;
                self.succeeded();
            }
        }
    }

    fn changed(&mut self, line: &[u8], position: &mut String) -> Result<(), Failure> {
        let not_understood = |error: serde_json::Error| Failure::Server {
            status: 200,
            message: format!("change of a watch is not understood: {error}"),
        };
        let change: Change = serde_json::from_slice(line).map_err(not_understood)?;
        if change.r#type == "ERROR" {
            let message = crate::failure::shown(change.object["message"].as_str().unwrap_or(""));
            return Err(match change.object["code"].as_u64() {
                Some(410) => Failure::Expired(message),
                code => {
                    let status = code.and_then(|code| u16::try_from(code).ok());
                    Failure::Server { status: status.unwrap_or(500), message }
                }
            });
        }
        // A bookmark has only the position; it lacks other fields of an object.
        if change.r#type == "BOOKMARK" {
            let version = change.object["metadata"]["resourceVersion"].as_str();
            version.unwrap_or_default().clone_into(position);
            return Ok(());
        }
        let object: W::Object = serde_json::from_value(change.object).map_err(not_understood)?;
        W::version(&object).clone_into(position);
        self.watched.changed(&change.r#type, object);
        Ok(())
    }
}
