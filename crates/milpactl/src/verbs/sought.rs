//! Pods and cells of the daemon: all, or by name.

use futures::StreamExt;
use kiyot_proto::admin::{Cell, ListCellsRequest, ListPodsRequest, Pod};

use crate::{client::Client, error::Error, names};

/// Returns all pods of a namespace, or of all namespaces.
pub(super) async fn pods(client: &Client, namespace: Option<&str>) -> Result<Vec<Pod>, Error> {
    named_pods(client, namespace, "").await
}

async fn named_pods(
    client: &Client,
    namespace: Option<&str>,
    name: &str,
) -> Result<Vec<Pod>, Error> {
    let namespace = namespace.unwrap_or_default().to_owned();
    let request = ListPodsRequest { namespace, name: name.to_owned() };
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
    match names::find(pods(client, namespace).await?, name) {
        // The daemon also knows earlier sandboxes of a pod, which are in no list.
        Err(Error::Name(unknown)) => {
            let found = named_pods(client, namespace, name).await?;
            found.into_iter().next().ok_or(Error::Name(unknown))
        }
        found => found,
    }
}

/// Returns a text that means this pod, and not a newer pod of its name.
pub(super) fn text_of(pod: &Pod) -> String {
    match (pod.is_replaced, pod.sandbox.is_empty()) {
        (false, _) => pod.name.clone(),
        (true, false) => pod.sandbox.clone(),
        (true, true) => pod.uid.clone(),
    }
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
