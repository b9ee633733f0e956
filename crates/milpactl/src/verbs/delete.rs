//! `delete`.

use std::io::{self, Write};

use super::manifest_files;
use crate::{
    cli::Delete,
    error::Error,
    static_pods::{self, PodName, StaticPodDirectory},
};

/// Removes the files of pods. The kubelet then ends the pods, each within its grace period.
pub(super) fn run(delete: Delete) -> Result<(), Error> {
    let named = |pod: &String| PodName::parse(delete.namespace.as_deref(), pod);
    let named: Result<Vec<PodName>, String> = delete.pods.iter().map(named).collect();
    let mut pods = named.map_err(Error::Usage)?;
    if !delete.filename.is_empty() {
        let of_files = static_pods::read(&manifest_files::read(&delete.filename)?)?;
        pods.extend(of_files.into_iter().map(|pod| pod.name));
    }
    let directory = StaticPodDirectory::open(delete.directory.static_pod_path)?;
    let mut failed = Vec::new();
    for pod in &pods {
        match directory.remove(pod) {
            Ok(()) => writeln!(io::stdout(), "pod/{pod} deleted")?,
            Err(error) if pods.len() == 1 => return Err(error),
            Err(error) => failed.push(error.text()),
        }
    }
    if failed.is_empty() { Ok(()) } else { Err(Error::Failed(failed.join("; "))) }
}
