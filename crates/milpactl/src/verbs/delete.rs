//! `delete`.

use std::{
    io::{self, Write},
    process::ExitCode,
    time::Duration,
};

use kiyot_proto::admin::{DeletePodRequest, Pod};
use tonic::Code;

use super::{manifest_files, pod_names, sought};
use crate::{
    cli::Delete,
    client::{Client, END_TIMEOUT},
    error::Error,
    names::Named,
    output::Progress,
    signals::{self, Ending},
};

/// Time beyond the grace period in which a pod has to end.
const MARGIN: Duration = Duration::from_secs(300);
/// The grace period that is waited for without one in the arguments.
const LONGEST_GRACE: Duration = Duration::from_secs(3600);

pub(super) async fn run(
    connect: impl AsyncFnOnce() -> Result<Client, Error>,
    delete: Delete,
) -> Result<ExitCode, Error> {
    // First: a file that can't be read is found without a daemon.
    let mut wanted: Vec<(Option<String>, String)> =
        delete.pods.iter().map(|pod| (delete.namespace.clone(), pod.clone())).collect();
    let files = manifest_files::read(&delete.filename)?;
    wanted.extend(
        pod_names::of(&files)?.into_iter().map(|(namespace, name)| (Some(namespace), name)),
    );
    let client = connect().await?;
    let mut ending = Ending::new()?;
    let signal = tokio::select! {
        deleted = delete_all(&client, &wanted, &delete) => {
            return deleted.map(|()| ExitCode::SUCCESS);
        }
        signal = ending.next() => signal,
    };
    writeln!(io::stderr(), "milpactl: the ends of pods that have begun go on")?;
    Ok(ExitCode::from(signals::exit_code(signal)))
}

/// Ends the pods of namespaces and names, one after the other.
async fn delete_all(
    client: &Client,
    wanted: &[(Option<String>, String)],
    delete: &Delete,
) -> Result<(), Error> {
    let grace = delete.grace_period.map(|seconds| Duration::from_secs(seconds.into()));
    let limit = grace.unwrap_or(LONGEST_GRACE).saturating_add(MARGIN);
    let mut failed = Vec::new();
    for (namespace, pod) in wanted {
        let progress = Progress::begin(format!("waiting for the end of pod {pod}"));
        let ending = async {
            let found = sought::pod(client, namespace.as_deref(), pod).await?;
            end(client, &found, delete.grace_period).await?;
            Ok(found.full_name())
        };
        let ended = tokio::time::timeout(limit, ending).await;
        drop(progress);
        match ended.unwrap_or(Err(Error::TooSlow(limit.as_secs()))) {
            Ok(name) => writeln!(io::stdout(), "pod/{name} deleted")?,
            Err(error) if wanted.len() == 1 => return Err(error),
            Err(error) => failed.push(format!("{pod}: {}", error.text())),
        }
    }
    if failed.is_empty() { Ok(()) } else { Err(Error::Failed(failed.join("; "))) }
}

/// Ends a pod, also one whose end takes longer than a call may. It is named by its uid: another may
/// be created with its name before the call is repeated.
async fn end(client: &Client, pod: &Pod, grace_period: Option<u32>) -> Result<(), Error> {
    let mut has_begun = false;
    loop {
        let request = DeletePodRequest {
            namespace: pod.namespace.clone(),
            name: pod.uid.clone(),
            grace_seconds: grace_period.map(i64::from),
        };
        let ended =
            client.call_within(END_TIMEOUT, async |mut admin| admin.delete_pod(request).await);
        match ended.await {
            Ok(_) => return Ok(()),
            Err(Error::Daemon(status)) if status.code() == Code::DeadlineExceeded => {
                has_begun = true;
            }
            // It ended between two calls.
            Err(Error::Daemon(status)) if has_begun && status.code() == Code::NotFound => {
                return Ok(());
            }
            Err(error) => return Err(error),
        }
    }
}
