//! `top`: cells with usage, price and start time.

use std::{
    collections::HashMap,
    io::{self, IsTerminal, Write},
    time::Duration,
};

use futures::StreamExt;
use kiyot_proto::{
    admin::{Cell, ListUsageRequest, PodUsage},
    text::counted,
};

use super::{kinds, sought};
use crate::{
    age::{age, now},
    cli::Top,
    client::Client,
    error::Error,
    money,
    output::{Columns, Format, Item, Writer},
};

/// The pause between two refreshes.
const PERIOD: Duration = Duration::from_secs(2);
/// The bars of a sparkline, from low to high.
const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
/// Bounds the start times of the sparkline: the latest cells.
const MAX_BARS: usize = 40;
/// The home position, and the end of the screen after it.
const CLEAR: &str = "\u{1b}[H\u{1b}[J";

const COLUMNS: Columns = Columns {
    names: &["CELL", "STATUS", "POD", "TYPE", "CPU", "MEMORY", "DISK", "$/H", "START", "AGE"],
    usual: 10,
    status: Some(1),
};

pub(super) async fn run(client: &Client, top: &Top) -> Result<(), Error> {
    let refreshes = top.watch || (!top.once && io::stdout().is_terminal());
    if !refreshes {
        return show(client, false).await;
    }
    // Interrupts a call too, because the daemon may be slow.
    tokio::select! {
        interrupted = tokio::signal::ctrl_c() => Ok(interrupted?),
        ended = refresh(client) => ended,
    }
}

async fn refresh(client: &Client) -> Result<(), Error> {
    loop {
        show(client, io::stdout().is_terminal()).await?;
        tokio::time::sleep(PERIOD).await;
    }
}

async fn show(client: &Client, clears: bool) -> Result<(), Error> {
    let mut picture = Vec::new();
    draw(client, &mut picture).await?;
    let mut stdout = io::stdout().lock();
    if clears {
        stdout.write_all(CLEAR.as_bytes())?;
    }
    stdout.write_all(&picture)?;
    stdout.flush()?;
    Ok(())
}

async fn draw(client: &Client, to: &mut Vec<u8>) -> Result<(), Error> {
    let cells = sought::cells(client).await?;
    let parts = client.list(async |mut admin| admin.list_usage(ListUsageRequest {}).await).await?;
    let usages = sought::collected(parts.map(|part| part.map(|part| part.pods))).await?;
    let usages: HashMap<_, _> = usages
        .into_iter()
        .map(|usage| ((usage.namespace.clone(), usage.name.clone()), usage))
        .collect();
    writeln!(to, "{}", summary(&cells))?;
    let items = cells.iter().map(|cell| {
        let pod = (cell.pod_namespace.clone(), cell.pod_name.clone());
        row(cell, usages.get(&pod))
    });
    let mut writer = Writer::new(Format::Table, COLUMNS, true, false);
    writer.add(items.collect(), to)?;
    writer.finish(to)
}

fn row(cell: &Cell, usage: Option<&PodUsage>) -> Item {
    let shown = |value: Option<String>| value.unwrap_or_else(|| kinds::or_none(""));
    Item {
        name: cell.id.clone(),
        columns: vec![
            cell.id.clone(),
            kinds::status_of_cell(cell),
            kinds::or_none(&kinds::pod_of(cell)),
            kinds::type_of(cell.offering.as_ref()),
            shown(usage.map(|usage| money::cpu(usage.cpu_nanocores))),
            shown(usage.map(|usage| money::bytes(usage.memory_bytes))),
            shown(usage.map(|usage| money::bytes(usage.disk_bytes))),
            kinds::price_of(cell.offering.as_ref()),
            shown(start_millis(cell).map(|millis| format!("{millis}ms"))),
            age(cell.created_unix_nanos, now()),
        ],
        object: serde_json::Value::Null,
    }
}

/// Returns the milliseconds from a cell's order to its first container.
fn start_millis(cell: &Cell) -> Option<i64> {
    let first = cell.timeline?.first_container;
    (first > 0).then(|| (first - cell.created_unix_nanos).max(0) / 1_000_000)
}

fn summary(cells: &[Cell]) -> String {
    let price: u64 =
        cells.iter().filter_map(|cell| Some(cell.offering.as_ref()?.price_micros)).sum();
    let mut starts: Vec<(i64, i64)> = cells
        .iter()
        .filter_map(|cell| Some((cell.created_unix_nanos, start_millis(cell)?)))
        .collect();
    starts.sort_unstable();
    let latest = &starts[starts.len().saturating_sub(MAX_BARS)..];
    let times: Vec<i64> = latest.iter().map(|(_, millis)| *millis).collect();
    let mut text =
        format!("{}, {} $/h", counted(cells.len(), "cell", "cells"), money::dollars(price));
    if let (Some(most), Some(least)) = (times.iter().max(), times.iter().min()) {
        text.push_str(&format!("; starts {least} to {most} ms {}", sparkline(&times)));
    }
    text
}

/// Returns a bar for each value, from the least to the greatest.
fn sparkline(values: &[i64]) -> String {
    let (least, most) = (values.iter().min().copied(), values.iter().max().copied());
    let (least, most) = (least.unwrap_or_default(), most.unwrap_or_default());
    let bar = |value: &i64| {
        let top = BARS.len() - 1;
        let part = (value - least) * i64::try_from(top).unwrap_or_default();
        let at = part.checked_div(most - least).and_then(|at| usize::try_from(at).ok());
        BARS[at.unwrap_or_default().min(top)]
    };
    values.iter().map(bar).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sparkline_goes_from_the_least_to_the_greatest() {
        assert_eq!(sparkline(&[10, 45, 80]), "▁▄█");
        assert_eq!(sparkline(&[5, 5]), "▁▁");
        assert_eq!(sparkline(&[]), "");
    }

    #[test]
    fn summary_has_the_price_and_the_start_times() {
        let cell = |created: i64, first_container: i64| Cell {
            created_unix_nanos: created,
            offering: Some(kiyot_proto::admin::Offering {
                price_micros: 5200,
                ..Default::default()
            }),
            timeline: Some(kiyot_proto::admin::Timeline { first_container, ..Default::default() }),
            ..Default::default()
        };
        let cells = [cell(0, 250_000_000), cell(1, 500_000_001), cell(2, 0)];
        assert_eq!(summary(&cells), "3 cells, 0.0156 $/h; starts 250 to 500 ms ▁█");
        assert_eq!(summary(&[]), "0 cells, 0.0000 $/h");
    }
}
