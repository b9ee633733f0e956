//! `describe`: a pod or a cell with everything that explains it.

use std::{
    fmt::Write as _,
    io::{self, Write},
};

use futures::StreamExt;
use kiyot_proto::admin::{Cell, Event, ListEventsRequest, Pod, ReadLogRequest};

use super::{kinds, sought};
use crate::{
    age::{age, now, time},
    cli::{Describe, Described},
    client::Client,
    error::Error,
    money,
    output::plain,
    pod_object,
};

/// Bounds the events that are shown.
const MAX_EVENTS: usize = 20;
/// The last lines of a console that are shown.
const CONSOLE_LINES: u64 = 10;

pub(super) async fn run(client: &Client, wanted: Describe) -> Result<(), Error> {
    let text = match wanted.kind {
        Described::Pod => {
            let pod = sought::pod(client, wanted.namespace.as_deref(), &wanted.name).await?;
            let cells = sought::cells(client).await?;
            let mut cell = cells.into_iter().find(|cell| cell.id == pod.cell);
            if let Some(cell) = &mut cell {
                add_console(client, cell).await;
            }
            let names = [format!("{}/{}", pod.namespace, pod.name), pod.cell.clone()];
            let events = events(client, &names).await?;
            describe_pod(&pod, cell.as_ref(), &events)
        }
        Described::Cell => {
            let mut cell = sought::cell(client, &wanted.name).await?;
            add_console(client, &mut cell).await;
            let events = events(client, std::slice::from_ref(&cell.id)).await?;
            let mut text = describe_cell(&cell);
            text.push_str(&listed_events(&events));
            text
        }
    };
    io::stdout().write_all(text.as_bytes())?;
    Ok(())
}

/// Adds the last lines of a cell's console. Leaves them out if the caller has no rights, or if the
/// provider or the daemon can't read them.
async fn add_console(client: &Client, cell: &mut Cell) {
    let request = ReadLogRequest {
        pod: cell.id.clone(),
        lines: Some(CONSOLE_LINES),
        ..ReadLogRequest::default()
    };
    let parts = client.list(async |mut admin| admin.read_log(request).await).await;
    let Ok(parts) = parts else { return };
    let lines = sought::collected(parts.map(|part| part.map(|part| part.stdout.into()))).await;
    if let Ok(lines) = lines
        && !lines.is_empty()
    {
        cell.console = String::from_utf8_lossy(&lines).into_owned();
    }
}

/// Returns the last events of names, in order.
async fn events(client: &Client, names: &[String]) -> Result<Vec<Event>, Error> {
    let mut all = Vec::new();
    // A pod may have no cell.
    for name in names.iter().filter(|name| !name.is_empty()) {
        let request = ListEventsRequest { name: name.clone(), follow: false };
        let parts = client.list(async |mut admin| admin.list_events(request).await).await?;
        all.extend(sought::collected(parts.map(|part| part.map(|part| part.events))).await?);
    }
    all.sort_by_key(|event| event.number);
    Ok(all.split_off(all.len().saturating_sub(MAX_EVENTS)))
}

fn field(text: &mut String, name: &str, value: &str) {
    // Writing to a String does not fail.
    let _ = writeln!(text, "{:<20} {}", format!("{name}:"), plain(value));
}

fn describe_pod(pod: &Pod, cell: Option<&Cell>, events: &[Event]) -> String {
    let mut text = String::new();
    let out = &mut text;
    field(out, "Name", &pod.name);
    field(out, "Namespace", &pod.namespace);
    field(out, "UID", &pod.uid);
    field(out, "Node", &pod.node);
    field(out, "Backend", &pod.backend);
    field(out, "Status", pod_object::phase(pod.phase()));
    field(out, "Since", &time(pod.phase_since_unix_nanos));
    field(out, "Created", &time(pod.created_unix_nanos));
    let addresses: Vec<_> = pod
        .addresses
        .iter()
        .map(|address| format!("{} {}", address.r#type, address.address))
        .collect();
    field(out, "Addresses", &kinds::or_none(&addresses.join(", ")));
    field(out, "Labels", &kinds::or_none(&pairs(&pod.labels)));
    field(out, "Annotations", &kinds::or_none(&pairs(&pod.annotations)));
    field(out, "Not shown", &kinds::or_none(&pod.other_annotations.join(", ")));
    field(out, "Start failures", &pod.start_failures.to_string());
    field(out, "Spot failure", &pod.spot_failure.to_string());
    if !pod.message.is_empty() {
        field(out, "Message", &pod.message);
    }
    out.push_str("Units:\n");
    for unit in &pod.units {
        let state = match unit.state() {
            kiyot_proto::admin::UnitState::UnitRunning => {
                format!("running since {}", time(unit.started_unix_nanos))
            }
            kiyot_proto::admin::UnitState::UnitTerminated => format!(
                "terminated with {} at {} ({}) {}",
                unit.exit_code,
                time(unit.finished_unix_nanos),
                unit.reason,
                unit.message
            ),
            _ => format!("waiting {} {}", unit.reason, unit.message),
        };
        let _ = writeln!(out, "  {}", plain(&unit.name));
        field(out, "    Image", &unit.image);
        field(out, "    State", state.trim_end());
        field(out, "    Restarts", &unit.restarts.to_string());
        field(out, "    Container", &unit.container);
    }
    if let Some(cell) = cell {
        out.push_str(&describe_cell(cell));
    } else {
        field(out, "Cell", &kinds::or_none(&pod.cell));
    }
    out.push_str(&listed_events(events));
    text
}

fn describe_cell(cell: &Cell) -> String {
    let mut text = String::new();
    let out = &mut text;
    let offering = cell.offering.as_ref();
    field(out, "Cell", &cell.id);
    field(out, "  Status", &kinds::status_of_cell(cell));
    field(out, "  Provider", &kinds::or_none(&cell.provider));
    field(out, "  Instance", &kinds::or_none(&cell.instance));
    field(out, "  Type", &kinds::type_of(offering));
    field(out, "  Zone", &kinds::or_none(offering.map(|it| it.zone.as_str()).unwrap_or_default()));
    field(out, "  Chosen as", &kinds::or_none(&cell.offering_reason));
    field(out, "  $/H", &kinds::price_of(offering));
    field(out, "  Cost", &money::dollars(cell.cost_micros));
    field(out, "  Age", &age(cell.created_unix_nanos, now()));
    if !cell.pool.is_empty() {
        field(out, "  Warm pool", &cell.pool);
    }
    if !cell.pod_name.is_empty() {
        field(out, "  Pod", &kinds::pod_of(cell));
    }
    if cell.start_failures > 0 {
        field(out, "  Failed before", &cell.start_failures.to_string());
    }
    for failure in &cell.last_failures {
        let _ = writeln!(out, "    {}", plain(failure));
    }
    if cell.replays > 0 {
        field(out, "  Replays", &cell.replays.to_string());
    }
    for (name, value) in [("  Reason", &cell.reason), ("  Error", &cell.error)] {
        if !value.is_empty() {
            field(out, name, value);
        }
    }
    out.push_str("  Timeline:\n");
    let timeline = cell.timeline.unwrap_or_default();
    for (name, at) in [
        ("launched", timeline.launched),
        ("booted", timeline.booted),
        ("enrolled", timeline.enrolled),
        ("bound", timeline.bound),
        ("image ready", timeline.image_ready),
        ("first container", timeline.first_container),
    ] {
        let after = (at - cell.created_unix_nanos).max(0) / 1_000_000;
        let value =
            if at == 0 { "<none>".to_owned() } else { format!("{} (+{after} ms)", time(at)) };
        field(out, &format!("    {name}"), &value);
    }
    if !cell.console.is_empty() {
        out.push_str("  Console ends:\n");
        for line in cell.console.lines() {
            let _ = writeln!(out, "    {}", plain(line));
        }
    }
    text
}

fn listed_events(events: &[Event]) -> String {
    let mut text = "Events:\n".to_owned();
    for event in events {
        let line = format!(
            "  {:<30}  {:<14} {:<24} {}",
            time(event.unix_nanos),
            event.status,
            event.name,
            event.message
        );
        let _ = writeln!(text, "{}", plain(line.trim_end()));
    }
    if events.is_empty() {
        text.push_str("  <none>\n");
    }
    text
}

fn pairs(map: &std::collections::HashMap<String, String>) -> String {
    let mut pairs: Vec<_> = map.iter().map(|(key, value)| format!("{key}={value}")).collect();
    pairs.sort_unstable();
    pairs.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn description_has_units_timeline_price_and_events_on_plain_lines() {
        let pod = Pod {
            name: "web".to_owned(),
            namespace: "shop".to_owned(),
            units: vec![kiyot_proto::admin::Unit {
                name: "main".to_owned(),
                message: "two\nlines \u{1b}[2J".to_owned(),
                ..Default::default()
            }],
            ..Default::default()
        };
        let cell = Cell {
            id: "cell-a".to_owned(),
            created_unix_nanos: 1_000_000_000,
            timeline: Some(kiyot_proto::admin::Timeline {
                launched: 1_250_000_000,
                ..Default::default()
            }),
            offering: Some(kiyot_proto::admin::Offering {
                instance_type: "t3.nano".to_owned(),
                price_micros: 5200,
                ..Default::default()
            }),
            console: "boot\nfailed".to_owned(),
            offering_reason: "cheapest of 16 candidates".to_owned(),
            start_failures: 1,
            last_failures: vec!["no \u{7}hosts".to_owned()],
            ..Default::default()
        };
        let event =
            Event { status: "Bound".to_owned(), name: "cell-a".to_owned(), ..Default::default() };
        let text = describe_pod(&pod, Some(&cell), &[event]);
        for part in [
            "(+250 ms)",
            "0.0052",
            "t3.nano",
            "    failed\n",
            "Bound",
            "two lines  [2J",
            "cheapest of 16",
            "    no  hosts\n",
        ] {
            assert!(text.contains(part), "{part:?} is not in\n{text}");
        }
        assert!(!text.contains('\u{1b}'));
    }
}
