//! Pods and cells of the daemon, all or those that a name means.

use futures::StreamExt;
use kiyot_proto::admin::{Cell, ListCellsRequest, ListPodsRequest, Pod};

use crate::{client::Client, error::Error, names};

/// Returns all pods of a namespace, or of all.
pub(super) async fn pods(client: &Client, namespace: Option<&str>) -> Result<Vec<Pod>, Error> {
    let namespace = namespace.unwrap_or_default().to_owned();
    let request = ListPodsRequest { namespace, name: String::new() };
    let parts = client.list(async |mut admin| admin.list_pods(request).await).await?;
    collected(parts.map(|part| part.map(|part| part.pods))).await
}

/// Returns all cells.
pub(super) async fn cells(client: &Client) -> Result<Vec<Cell>, Error> {
    let request = ListCellsRequest::default();
    let parts = client.list(async |mut admin| admin.list_cells(request).await).await?;
    collected(parts.map(|part| part.map(|part| part.cells))).await
}

/// Returns the pod that a name means.
pub(super) async fn pod(
    client: &Client,
    namespace: Option<&str>,
    name: &str,
) -> Result<Pod, Error> {
    names::find(pods(client, namespace).await?, name)
}

/// Returns the cell that a name means.
pub(super) async fn cell(client: &Client, name: &str) -> Result<Cell, Error> {
    names::find(cells(client).await?, name)
}

/// Collects the parts of a list.
pub(super) async fn collected<T>(
    mut parts: impl futures::Stream<Item = Result<Vec<T>, Error>> + Unpin,
) -> Result<Vec<T>, Error> {
    let mut all = Vec::new();
    while let Some(part) = parts.next().await {
        all.extend(part?);
    }
    Ok(all)
}
