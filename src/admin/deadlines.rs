//! Time limits of calls.

use std::time::Duration;

use tonic::Status;

/// Bounds calls that only wait for the disk or for a cell.
pub(super) const SHORT: Duration = Duration::from_secs(15);
/// Bounds the end of a cell: a provider needs less, and milpactl calls again.
pub(super) const END_OF_CELL: Duration = Duration::from_secs(120);

/// Awaits a call for at most `limit`.
pub(super) async fn within<T>(
    limit: Duration,
    method: &str,
    call: impl Future<Output = Result<T, Status>>,
) -> Result<T, Status> {
    tokio::time::timeout(limit, call).await.unwrap_or_else(|_| {
        let seconds = limit.as_secs();
        Err(Status::deadline_exceeded(format!(
            "{method} takes longer than {seconds} s; work that has begun continues"
        )))
    })
}
