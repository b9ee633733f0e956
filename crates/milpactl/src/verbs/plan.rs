//! `plan`.

use std::{
    io::{self, Write},
    process::ExitCode,
};

use kiyot_proto::admin::PlanRequest;

use super::manifest_files;
use crate::{cli::Plan, client::Client, error, error::Error, output::plain};

pub(super) async fn run(
    connect: impl AsyncFnOnce() -> Result<Client, Error>,
    plan: Plan,
) -> Result<ExitCode, Error> {
    // Read first, so that an unreadable file is found without a daemon.
    let files = manifest_files::read(&plan.filename)?;
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
