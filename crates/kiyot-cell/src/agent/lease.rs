//! Leases in the cell's containerd.

use std::sync::atomic::Ordering;

use containerd_client::services::v1::{CreateRequest, leases_client::LeasesClient};
use jiff::{SignedDuration, Timestamp};
use tonic::{Code, Status};

use super::runtime::{QUERY_TIMEOUT, Runtime, namespaced, with_timeout};

/// Lifetime of a lease, which protects blobs from garbage collection until their image is created.
/// A blob on a slow link takes up to 4 h, and its lease may already be an hour old.
const LEASE_HOURS: i64 = 24;

/// Creates a lease that keeps new blobs until their image is created. Each hour has its own lease,
/// so that blobs without an image are collected.
pub(super) async fn create_lease(runtime: &Runtime) -> Result<String, Status> {
    let now = Timestamp::now();
    let hour = now.as_second() / 3600;
    let id = format!("kiyot-{hour}");
    if runtime.leased_hour.load(Ordering::Relaxed) == hour {
        return Ok(id);
    }
    let expires = now
        .checked_add(SignedDuration::from_hours(LEASE_HOURS))
        .map_err(|error| Status::internal(error.to_string()))?;
    let labels = [("containerd.io/gc.expire".to_owned(), expires.to_string())].into();
    match LeasesClient::new(runtime.channel())
        .create(namespaced(with_timeout(QUERY_TIMEOUT, CreateRequest { id: id.clone(), labels })))
        .await
    {
        Err(status) if status.code() != Code::AlreadyExists => Err(status),
        _ => {
            runtime.leased_hour.store(hour, Ordering::Relaxed);
            Ok(id)
        }
    }
}
