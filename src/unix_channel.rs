//! gRPC clients of unix sockets, such as the sockets of container runtimes.

use std::path::Path;

use tonic::transport::{Channel, Endpoint, Error};

/// Returns a channel to the server of a socket. It connects with the first call, and again after a
/// connection has ended.
pub(crate) fn to(socket: &Path) -> Result<Channel, Error> {
    let endpoint = Endpoint::from_shared(format!("unix://{}", socket.display()))?;
    Ok(endpoint.connect_lazy())
}
