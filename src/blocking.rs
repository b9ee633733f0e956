//! Steps that read or write the disk.

use std::io;

use tokio::task::spawn_blocking;

/// Runs a step on a thread that may block.
pub(crate) async fn blocking<T: Send + 'static>(
    step: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    spawn_blocking(step).await.unwrap_or_else(|error| Err(io::Error::other(error)))
}
