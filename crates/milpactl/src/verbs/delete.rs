//! `delete`.

use std::{
    io::{self, Write},
    time::Duration,
};

use kiyot_proto::admin::DeletePodRequest;
use tonic::Code;

use crate::{
    cli::Delete,
    client::{Client, END_TIMEOUT},
    error::Error,
};

/// Time beyond the grace period in which a pod has to end.
const MARGIN: Duration = Duration::from_secs(300);
/// The grace period that is waited for without one in the arguments.
const LONGEST_GRACE: Duration = Duration::from_secs(3600);

pub(super) async fn run(client: &Client, delete: Delete) -> Result<(), Error> {
    let grace = delete.grace_period.map(|seconds| Duration::from_secs(seconds.into()));
    let limit = grace.unwrap_or(LONGEST_GRACE).saturating_add(MARGIN);
    let mut failed = Vec::new();
    for pod in &delete.pods {
        let ended = tokio::time::timeout(limit, end(client, &delete, pod));
        match ended.await.unwrap_or(Err(Error::TooSlow(limit.as_secs()))) {
            Ok(name) => writeln!(io::stdout(), "pod/{name} deleted")?,
            Err(error) if delete.pods.len() == 1 => return Err(error),
            Err(error) => failed.push(format!("{pod}: {}", error.text())),
        }
    }
    if failed.is_empty() { Ok(()) } else { Err(Error::Failed(failed.join("; "))) }
}

/// Ends a pod, also one whose end takes longer than a call may.
async fn end(client: &Client, delete: &Delete, pod: &str) -> Result<String, Error> {
    let mut has_begun = false;
    loop {
        let request = DeletePodRequest {
            namespace: delete.namespace.clone().unwrap_or_default(),
            name: pod.to_owned(),
            grace_seconds: delete.grace_period.map(i64::from),
        };
        let ended =
            client.call_within(END_TIMEOUT, async |mut admin| admin.delete_pod(request).await);
        match ended.await {
            Ok(pod) => return Ok(format!("{}/{}", pod.namespace, pod.name)),
            Err(Error::Daemon(status)) if status.code() == Code::DeadlineExceeded => {
                has_begun = true;
            }
            // It ended between two calls.
            Err(Error::Daemon(status)) if has_begun && status.code() == Code::NotFound => {
                return Ok(pod.to_owned());
            }
            Err(error) => return Err(error),
        }
    }
}
