//! `logs`: the log of a unit, or the end of the console of a cell.

use std::io::{self, Write};

use futures::StreamExt;
use kiyot_proto::admin::ReadLogRequest;

use super::sought;
use crate::{age, cli::Logs, client::Client, error::Error, names};

pub(super) async fn run(
    connect: impl AsyncFnOnce() -> Result<Client, Error>,
    logs: Logs,
) -> Result<(), Error> {
    let since = logs.since.as_deref().map(|since| age::since(since, age::now())).transpose();
    let since_unix_nanos = since.map_err(Error::Usage)?.unwrap_or_default();
    let client = connect().await?;
    let (namespace, pod) = target(&client, &logs).await?;
    let request = ReadLogRequest {
        namespace,
        pod,
        unit: logs.unit.unwrap_or_default(),
        follow: logs.follow,
        lines: logs.lines,
        since_unix_nanos,
    };
    let mut parts = client.follow(async |mut admin| admin.read_log(request).await).await?;
    while let Some(part) = parts.next().await {
        let part = part?;
        io::stdout().write_all(&part.stdout)?;
        io::stdout().flush()?;
        io::stderr().write_all(&part.stderr)?;
    }
    Ok(())
}

/// Returns namespace and name of the pod, or the id of the cell, that a name means.
async fn target(client: &Client, logs: &Logs) -> Result<(String, String), Error> {
    let cells = sought::cells(client).await?;
    // A cell's full id means the cell. Its pod has a name of its own.
    if let Some(cell) = cells.iter().find(|cell| cell.id == logs.name || cell.instance == logs.name)
    {
        return Ok((String::new(), cell.id.clone()));
    }
    match sought::pod(client, logs.namespace.as_deref(), &logs.name).await {
        Ok(pod) => {
            let text = sought::text_of(&pod);
            Ok((pod.namespace, text))
        }
        Err(error) => match names::find(cells, &logs.name) {
            Ok(cell) => Ok((String::new(), cell.id)),
            Err(_) => Err(error),
        },
    }
}
