//! `plan`.

use std::{
    io::{self, Write},
    process::ExitCode,
};

use kiyot_proto::admin::{ManifestFile, PlanRequest};

use crate::{cli::Plan, client::Client, error, error::Error, output::plain};

pub(super) async fn run(
    connect: impl AsyncFnOnce() -> Result<Client, Error>,
    plan: Plan,
) -> Result<ExitCode, Error> {
    // First: a file that can't be read is found without a daemon.
    let files = kiyot_manifest_files::read(&plan.filename, &mut io::stdin());
    let file = |file: kiyot_manifest_files::File| ManifestFile { name: file.name, text: file.text };
    let files = files.map_err(Error::Usage)?.into_iter().map(file).collect();
    let client = connect().await?;
    let planned = client.call(async |mut admin| admin.plan(PlanRequest { files }).await).await?;
    let mut stdout = io::stdout();
    let mut is_refused = false;
    for pod in planned.pods {
        is_refused |= pod.refused;
        for line in pod.heading.lines() {
            // Further lines of the heading are indented.
            writeln!(stdout, "{}", plain(line))?;
        }
        for fact in pod.facts {
            writeln!(stdout, "  {}", plain(&fact))?;
        }
    }
    for note in planned.notes {
        writeln!(stdout, "note: {}", plain(&note))?;
    }
    Ok(if is_refused { ExitCode::from(error::FAILURE) } else { ExitCode::SUCCESS })
}
