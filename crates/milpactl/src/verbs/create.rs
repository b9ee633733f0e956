//! `create`.

use std::io::{self, Write};

use kiyot_proto::admin::{ManifestFile, PlanRequest, PlannedPod};

use super::manifest_files;
use crate::{
    cli::Create,
    client::Client,
    error::Error,
    static_pods::{self, StaticPod, StaticPodDirectory},
};

/// Begin of the facts that refuse a pod.
const REFUSED: &str = "refused: ";
/// Begin of the facts that a user should know, such as an unknown field.
const NOTE: &str = "note: ";

pub(super) async fn run(
    connect: impl AsyncFnOnce() -> Result<Client, Error>,
    create: Create,
) -> Result<(), Error> {
    // Read first, so that wrong files and arguments are found without a daemon.
    let pods = static_pods::read(&manifest_files::read(&create.filename)?)?;
    let directory = StaticPodDirectory::open(create.directory.static_pod_path)?;
    check(&connect().await?, &pods).await?;
    directory.put(&pods)?;
    let mut stdout = io::stdout();
    for pod in pods {
        writeln!(stdout, "pod/{} created", pod.name)?;
    }
    Ok(())
}

/// Checks pods as `plan` does, and prints its notes. The daemon reads the same manifest as the
/// kubelet will.
async fn check(client: &Client, pods: &[StaticPod]) -> Result<(), Error> {
    let file = |pod: &StaticPod| ManifestFile { name: pod.file.clone(), text: pod.json.clone() };
    let request = PlanRequest { files: pods.iter().map(file).collect() };
    let planned = client.call(async |mut admin| admin.plan(request).await).await?;
    let mut stderr = io::stderr();
    for pod in &planned.pods {
        for note in pod.facts.iter().filter(|fact| fact.starts_with(NOTE)) {
            writeln!(stderr, "{}: {note}", pod.heading)?;
        }
    }
    let refused: Vec<String> =
        planned.pods.into_iter().filter(|pod| pod.refused).map(reasons).collect();
    if refused.is_empty() { Ok(()) } else { Err(Error::Failed(refused.join("; "))) }
}

/// Returns a pod with the reasons of its refusal.
fn reasons(pod: PlannedPod) -> String {
    let facts = pod.facts.iter().filter_map(|fact| fact.strip_prefix(REFUSED));
    format!("{}: {}", pod.heading, facts.collect::<Vec<_>>().join("; "))
}
