//! `cordon`, `uncordon` and `drain`.

use std::{
    io::{self, Write},
    process::ExitCode,
    time::Duration,
};

use futures::{StreamExt, stream};
use jiff::SignedDuration;
use kiyot_proto::{
    admin::{Cell, CordonRequest, EndCellRequest, UncordonRequest},
    text::counted,
};
use tokio::time::{Instant, sleep, timeout_at};
use tonic::Code;

use super::{kinds, sought};
use crate::{
    cli::Drain,
    client::{Client, END_TIMEOUT},
    error::Error,
    output::Progress,
    signals::{self, Ending},
};

/// Limit on the cells that end at the same time.
const PARALLEL_ENDS: usize = 8;
/// The pause between two lists of the cells.
const POLL_PERIOD: Duration = Duration::from_secs(1);
/// Bounds the time of a drain.
const MAX_TIMEOUT: Duration = Duration::from_secs(7 * 86_400);
/// Bounds the cells that an error names.
const MAX_NAMED: usize = 5;

pub(super) async fn cordon(client: &Client) -> Result<(), Error> {
    let answer = client.call(async |mut admin| admin.cordon(CordonRequest {}).await).await?;
    writeln!(
        io::stdout(),
        "no cell is launched until `milpactl uncordon`; {}",
        counted(answer.cells, "cell keeps running", "cells keep running")
    )?;
    Ok(())
}

pub(super) async fn uncordon(client: &Client) -> Result<(), Error> {
    client.call(async |mut admin| admin.uncordon(UncordonRequest {}).await).await?;
    writeln!(io::stdout(), "cells are launched again")?;
    Ok(())
}

pub(super) async fn drain(
    connect: impl AsyncFnOnce() -> Result<Client, Error>,
    drain: &Drain,
) -> Result<ExitCode, Error> {
    let limit = limit(&drain.timeout)?;
    let client = &connect().await?;
    let deadline = Instant::now() + limit;
    cordon(client).await?;
    let mut ending = Ending::new()?;
    let progress = Progress::begin("listing cells");
    let draining = async {
        if drain.end {
            end_all(client, &progress).await?;
        }
        loop {
            let cells = sought::cells(client).await?;
            if cells.is_empty() {
                return Ok::<(), Error>(());
            }
            progress
                .set(format!("waiting for the end of {}", counted(cells.len(), "cell", "cells")));
            sleep(POLL_PERIOD).await;
        }
    };
    let drained = tokio::select! {
        drained = timeout_at(deadline, draining) => Ok(drained),
        signal = ending.next() => Err(signal),
    };
    drop(progress);
    match drained {
        Ok(Ok(drained)) => {
            drained?;
            writeln!(io::stdout(), "no cell is left")?;
            Ok(ExitCode::SUCCESS)
        }
        Err(signal) => {
            writeln!(
                io::stderr(),
                "milpactl: still cordoned; the ends of cells that have begun go on"
            )?;
            Ok(ExitCode::from(signals::exit_code(signal)))
        }
        Ok(Err(_)) => {
            let cells = sought::cells(client).await?;
            Err(Error::Failed(format!(
                "{} left after {}: {}; still cordoned",
                counted(cells.len(), "cell is", "cells are"),
                drain.timeout,
                named(&cells)
            )))
        }
    }
}

async fn end_all(client: &Client, progress: &Progress) -> Result<(), Error> {
    let cells = sought::cells(client).await?;
    let mut left = cells.len();
    let ends = cells.into_iter().map(|cell| async move {
        let request = EndCellRequest { cell: cell.id.clone() };
        let ended =
            client.call_within(END_TIMEOUT, async |mut admin| admin.end_cell(request).await);
        (cell, ended.await)
    });
    let mut ends = stream::iter(ends).buffer_unordered(PARALLEL_ENDS);
    let mut failed = Vec::new();
    progress.set(format!("ending {}", counted(left, "cell", "cells")));
    while let Some((cell, ended)) = ends.next().await {
        left -= 1;
        progress.set(format!("ending {}", counted(left, "cell", "cells")));
        match ended {
            Ok(_) => progress.pause(|| writeln!(io::stdout(), "{} ended", cell.id))?,
            // The cell has ended by itself, or its end takes longer than a call and continues.
            Err(Error::Daemon(status))
                if matches!(status.code(), Code::NotFound | Code::DeadlineExceeded) => {}
            Err(error) => failed.push(format!("{}: {}", cell.id, error.text())),
        }
    }
    if failed.is_empty() {
        return Ok(());
    }
    let text = failed.iter().take(MAX_NAMED).cloned().collect::<Vec<_>>().join("; ");
    Err(Error::Failed(format!(
        "{} not ended: {text}",
        counted(failed.len(), "cell was", "cells were")
    )))
}

fn named(cells: &[Cell]) -> String {
    let shown = cells.iter().take(MAX_NAMED).map(|cell| match kinds::pod_of(cell).as_str() {
        "" => cell.id.clone(),
        pod => format!("{} ({pod})", cell.id),
    });
    shown.collect::<Vec<_>>().join(", ")
}

fn limit(text: &str) -> Result<Duration, Error> {
    let parsed = text.parse::<SignedDuration>().ok().and_then(|it| Duration::try_from(it).ok());
    parsed.filter(|limit| !limit.is_zero() && *limit <= MAX_TIMEOUT).ok_or_else(|| {
        Error::Usage(format!("timeout {text:?} is invalid; allowed: such as 90s or 10m, up to 7d"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeout_is_a_duration_within_a_week() {
        assert_eq!(limit("90s").unwrap(), Duration::from_secs(90));
        for text in ["", "0s", "-1s", "200h 1000h", "soon"] {
            assert_eq!(limit(text).unwrap_err().exit_code(), 64, "{text}");
        }
    }
}
