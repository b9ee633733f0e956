//! `[server]`: CRI socket and its limits.

use std::{path::PathBuf, time::Duration};

use kiyot_values::problems::Table;

use super::read;

const LISTEN: &str = "/run/kiyot/kiyot.sock";
const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);
const MAX_DRAIN_TIMEOUT: Duration = Duration::from_secs(10 * 60);
const CLIENT_TIMEOUT: Duration = Duration::from_secs(30);
const MIN_CLIENT_TIMEOUT: Duration = Duration::from_millis(100);
const MAX_CLIENT_TIMEOUT: Duration = Duration::from_secs(60 * 60);
/// Range of concurrent calls. The kubelet has one for each pod that starts or stops, and a few
/// more.
const MAX_CONCURRENT_CALLS: usize = 10_000;
const MAX_CONCURRENT_CALLS_LIMIT: usize = 1_000_000;

/// CRI socket and its limits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Server {
    /// Unix socket that the kubelet calls.
    pub listen: PathBuf,
    /// Time for open calls after SIGTERM.
    pub drain_timeout: Duration,
    /// Time for which a client may leave a request half sent, or a response unread.
    pub client_timeout: Duration,
    /// Limit of concurrent calls on all connections.
    pub max_concurrent_calls: usize,
    /// Backend of type `cri` that answers for the node: Version, Status, images, unknown methods.
    /// `None` only without a unique `cri` backend, which [`super::load`] refuses.
    pub node_backend: Option<String>,
}

impl Default for Server {
    fn default() -> Self {
        Self {
            listen: LISTEN.into(),
            drain_timeout: DRAIN_TIMEOUT,
            client_timeout: CLIENT_TIMEOUT,
            max_concurrent_calls: MAX_CONCURRENT_CALLS,
            node_backend: None,
        }
    }
}

impl Server {
    pub(super) fn read(mut table: Table<'_>) -> Self {
        let mut server = Self::default();
        table.set("listen", &mut server.listen, read::socket);
        table.set("drain_timeout", &mut server.drain_timeout, |field| {
            read::duration(field, Duration::ZERO..=MAX_DRAIN_TIMEOUT)
        });
        table.set("client_timeout", &mut server.client_timeout, |field| {
            read::duration(field, MIN_CLIENT_TIMEOUT..=MAX_CLIENT_TIMEOUT)
        });
        table.set("max_concurrent_calls", &mut server.max_concurrent_calls, |field| {
            number(field, MAX_CONCURRENT_CALLS_LIMIT)
        });
        table.set("node_backend", &mut server.node_backend, |field| field.text().map(Some));
        table.finish();
        server
    }
}

fn number(field: kiyot_values::problems::Field<'_>, max: usize) -> Option<usize> {
    field.number(1..=max)
}
