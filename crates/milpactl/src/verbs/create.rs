//! `create`.

use std::io::{self, Write};

use kiyot_proto::admin::CreatePodsRequest;

use super::manifest_files;
use crate::{cli::Create, client::Client, error::Error};

pub(super) async fn run(
    connect: impl AsyncFnOnce() -> Result<Client, Error>,
    create: Create,
) -> Result<(), Error> {
    // First: a file that can't be read is found without a daemon.
    let request = CreatePodsRequest {
        files: manifest_files::read(&create.filename)?,
        backend: create.backend.unwrap_or_default(),
    };
    let client = connect().await?;
    let created = client.call(async |mut admin| admin.create_pods(request).await).await?;
    let mut stdout = io::stdout();
    for pod in created.pods {
        writeln!(stdout, "pod/{}/{} created", pod.namespace, pod.name)?;
        for warning in pod.warnings {
            eprintln!("milpactl: pod {}/{}: {warning}", pod.namespace, pod.name);
        }
    }
    Ok(())
}
