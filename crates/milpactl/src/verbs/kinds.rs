//! Objects as items of lists: their columns and their JSON.

use kiyot_proto::{
    admin::{
        Backend, CatalogueOffering, Cell, CellPhase, Event, Offering, Pod, PodUsage, Pool,
        TypeUsage, UnitState,
    },
    text::cell_phase,
};
use serde_json::{Value, json};

use crate::{
    age::{age, time},
    money,
    output::{Columns, Item},
    pod_object,
};

pub(super) const PODS: Columns = Columns {
    names: &[
        "NAME",
        "UNITS",
        "RUNNING",
        "STATUS",
        "RESTARTS",
        "NODE",
        "IP",
        "AGE",
        "CELL",
        "INSTANCE",
        "INSTANCE-TYPE",
        "$/H",
    ],
    usual: 8,
    status: Some(3),
};

pub(super) const CELLS: Columns = Columns {
    names: &[
        "NAME",
        "STATUS",
        "INSTANCE-TYPE",
        "INSTANCE",
        "IP",
        "AGE",
        "POD",
        "ZONE",
        "$/H",
        "COST",
        "POOL",
        "PROVIDER",
    ],
    usual: 6,
    status: Some(1),
};

pub(super) const EVENTS: Columns = Columns {
    names: &["TIMESTAMP", "NAME", "KIND", "STATUS", "SOURCE", "MESSAGE"],
    usual: 6,
    status: None,
};

pub(super) const METRICS: Columns = Columns {
    names: &["NAME", "TIMESTAMP", "CPU", "MEMORY", "DISK", "WINDOW"],
    usual: 6,
    status: None,
};

pub(super) const USAGE: Columns =
    Columns { names: &["USAGE TYPE", "HOURS", "CELLS", "COST"], usual: 2, status: None };

pub(super) const BACKENDS: Columns = Columns {
    names: &["NAME", "TYPE", "PROVIDER", "STATUS", "CELLS", "BOOTING", "WAITING", "SOCKET"],
    usual: 7,
    status: Some(3),
};

pub(super) const OFFERINGS: Columns = Columns {
    names: &["TYPE", "ZONE", "MARKET", "CPU", "MEMORY", "ARCH", "GPUS", "$/H", "REFUSED"],
    usual: 8,
    status: None,
};

pub(super) const POOLS: Columns = Columns {
    names: &["NAME", "WANTED", "IDLE", "BOOTING", "HITS", "MISSES", "HIT%", "BACKEND"],
    usual: 7,
    status: None,
};

pub(super) fn pod(pod: &Pod, now: i64) -> Item {
    let running = pod.units.iter().filter(|unit| unit.state() == UnitState::UnitRunning).count();
    let restarts: u32 = pod.units.iter().map(|unit| unit.restarts).sum();
    let name = format!("{}/{}", pod.namespace, pod.name);
    let ip = pod.addresses.iter().find(|address| address.r#type == "PrivateIP");
    Item {
        name: format!("pod/{name}"),
        columns: vec![
            name,
            pod.units.len().to_string(),
            running.to_string(),
            pod_object::phase(pod.phase()).to_owned(),
            restarts.to_string(),
            or_none(&pod.node),
            or_none(ip.map(|address| address.address.as_str()).unwrap_or_default()),
            age(pod.created_unix_nanos, now),
            or_none(&pod.cell),
            or_none(&pod.instance),
            type_of(pod.offering.as_ref()),
            price_of(pod.offering.as_ref()),
        ],
        object: pod_object::of(pod),
    }
}

pub(super) fn cell(cell: &Cell, now: i64) -> Item {
    let timeline = cell.timeline.unwrap_or_default();
    let offering = cell.offering.clone().unwrap_or_default();
    Item {
        name: format!("cell/{}", cell.id),
        columns: vec![
            cell.id.clone(),
            status_of_cell(cell),
            type_of(cell.offering.as_ref()),
            or_none(&cell.instance),
            or_none(&cell.addresses.join(",")),
            age(cell.created_unix_nanos, now),
            or_none(&pod_of(cell)),
            or_none(&offering.zone),
            price_of(cell.offering.as_ref()),
            money::dollars(cell.cost_micros),
            or_none(&cell.pool),
            or_none(&cell.provider),
        ],
        object: json!({
            "kind": "Cell",
            "apiVersion": "v1",
            "metadata": {
                "name": cell.id,
                "creationTimestamp": time(cell.created_unix_nanos),
            },
            "spec": {
                "backend": cell.backend,
                "node": cell.node,
                "pool": cell.pool,
                "podNamespace": cell.pod_namespace,
                "podName": cell.pod_name,
                "podUID": cell.pod_uid,
            },
            "status": {
                "phase": cell_phase(cell.phase()),
                "connected": cell.connected,
                "provider": cell.provider,
                "instanceID": cell.instance,
                "offering": offering_object(&offering),
                "addresses": cell.addresses,
                "timeline": {
                    "launched": time(timeline.launched),
                    "booted": time(timeline.booted),
                    "enrolled": time(timeline.enrolled),
                    "bound": time(timeline.bound),
                    "imageReady": time(timeline.image_ready),
                    "firstContainer": time(timeline.first_container),
                },
                "reason": cell.reason,
                "error": cell.error,
                "replays": cell.replays,
                "costMicros": cell.cost_micros,
            },
        }),
    }
}

/// Returns namespace and name of a cell's pod; empty without a pod.
pub(super) fn pod_of(cell: &Cell) -> String {
    let Cell { pod_namespace, pod_name, .. } = cell;
    if pod_name.is_empty() { String::new() } else { format!("{pod_namespace}/{pod_name}") }
}

/// Returns the status of a cell, with `Silent` while a cell that should be connected is not.
pub(super) fn status_of_cell(cell: &Cell) -> String {
    let phase = cell_phase(cell.phase());
    let is_bound = matches!(cell.phase(), CellPhase::CellBound | CellPhase::CellIdle);
    if is_bound && !cell.connected { format!("Silent ({phase})") } else { phase.to_owned() }
}

pub(super) fn event(event: &Event) -> Item {
    Item {
        name: format!("event/{}", event.number),
        columns: vec![
            time(event.unix_nanos),
            event.name.clone(),
            event.kind.clone(),
            event.status.clone(),
            event.source.clone(),
            event.message.clone(),
        ],
        object: json!({
            "kind": "Event",
            "apiVersion": "v1",
            "number": event.number,
            "timestamp": time(event.unix_nanos),
            "name": event.name,
            "objectKind": event.kind,
            "status": event.status,
            "source": event.source,
            "message": event.message,
        }),
    }
}

pub(super) fn pod_usage(usage: &PodUsage) -> Item {
    let name = format!("{}/{}", usage.namespace, usage.name);
    // To the nearest second: sample times are not exact to the millisecond.
    let window = format!("{}s", usage.window_nanos.saturating_add(500_000_000) / 1_000_000_000);
    Item {
        name: format!("pod/{name}"),
        columns: vec![
            name,
            or_none(&time(usage.unix_nanos)),
            money::cpu(usage.cpu_nanocores),
            money::bytes(usage.memory_bytes),
            money::bytes(usage.disk_bytes),
            window.clone(),
        ],
        object: json!({
            "kind": "PodMetrics",
            "apiVersion": "v1",
            "metadata": { "namespace": usage.namespace, "name": usage.name },
            "timestamp": time(usage.unix_nanos),
            "cpuNanoCores": usage.cpu_nanocores,
            "memoryBytes": usage.memory_bytes,
            "diskBytes": usage.disk_bytes,
            "window": window,
        }),
    }
}

pub(super) fn type_usage(usage: &TypeUsage) -> Item {
    let name = type_name(&usage.instance_type, usage.spot);
    Item {
        name: format!("usage/{name}"),
        columns: vec![
            name,
            hours(usage.millihours),
            usage.cells.to_string(),
            money::dollars(usage.cost_micros),
        ],
        object: json!({
            "kind": "Usage",
            "apiVersion": "v1",
            "instanceType": usage.instance_type,
            "spot": usage.spot,
            "hours": hours(usage.millihours),
            "cells": usage.cells,
            "costMicros": usage.cost_micros,
        }),
    }
}

fn hours(millihours: u64) -> String {
    format!("{}.{:03}", millihours / 1000, millihours % 1000)
}

pub(super) fn backend(backend: &Backend) -> Item {
    let of = |used: u32, limit: u32| match limit {
        0 => used.to_string(),
        limit => format!("{used}/{limit}"),
    };
    let status = if backend.cordoned { "Cordoned" } else { "Ready" };
    let is_milpa = backend.r#type == "milpa";
    let count = |text: String| if is_milpa { text } else { or_none("") };
    Item {
        name: format!("backend/{}", backend.name),
        columns: vec![
            backend.name.clone(),
            backend.r#type.clone(),
            or_none(&backend.provider),
            if is_milpa { status.to_owned() } else { or_none("") },
            count(of(backend.cells, backend.max_cells)),
            count(of(backend.booting, backend.max_booting)),
            count(backend.waiting.to_string()),
            or_none(&backend.socket),
        ],
        object: json!({
            "kind": "Backend",
            "apiVersion": "v1",
            "metadata": { "name": backend.name },
            "type": backend.r#type,
            "provider": backend.provider,
            "socket": backend.socket,
            "cells": backend.cells,
            "maxCells": backend.max_cells,
            "booting": backend.booting,
            "maxBooting": backend.max_booting,
            "waiting": backend.waiting,
            "cordoned": backend.cordoned,
            "isNodeBackend": backend.is_node_backend,
        }),
    }
}

pub(super) fn offering(entry: &CatalogueOffering) -> Item {
    let offering = entry.offering.clone().unwrap_or_default();
    let market = if offering.spot { "spot" } else { "on-demand" };
    // A provider without sizes gives a pod what it needs.
    let any_or = |amount: u64, text: String| if amount == 0 { "any".to_owned() } else { text };
    let name = type_name(&offering.instance_type, offering.spot);
    Item {
        name: match offering.zone.as_str() {
            "" => format!("offering/{name}"),
            zone => format!("offering/{name}/{zone}"),
        },
        columns: vec![
            offering.instance_type.clone(),
            or_none(&offering.zone),
            market.to_owned(),
            any_or(entry.cpu_millis, format!("{}m", entry.cpu_millis)),
            any_or(entry.memory_bytes, money::bytes(entry.memory_bytes)),
            or_none(&entry.architecture),
            entry.gpus.to_string(),
            money::price(&offering),
            or_none(&entry.refused),
        ],
        object: json!({
            "kind": "Offering",
            "apiVersion": "v1",
            "offering": offering_object(&offering),
            "cpuMillis": entry.cpu_millis,
            "memoryBytes": entry.memory_bytes,
            "architecture": entry.architecture,
            "gpus": entry.gpus,
            "refused": entry.refused,
            "backend": entry.backend,
        }),
    }
}

pub(super) fn pool(pool: &Pool) -> Item {
    let all = pool.hits.saturating_add(pool.misses);
    let rate = pool.hits.saturating_mul(100).checked_div(all);
    Item {
        name: format!("pool/{}", pool.name),
        columns: vec![
            pool.name.clone(),
            pool.wanted.to_string(),
            pool.idle.to_string(),
            pool.booting.to_string(),
            pool.hits.to_string(),
            pool.misses.to_string(),
            rate.map_or_else(|| or_none(""), |rate| format!("{rate}%")),
            pool.backend.clone(),
        ],
        object: json!({
            "kind": "Pool",
            "apiVersion": "v1",
            "metadata": { "name": pool.name },
            "backend": pool.backend,
            "wanted": pool.wanted,
            "idle": pool.idle,
            "booting": pool.booting,
            "hits": pool.hits,
            "misses": pool.misses,
        }),
    }
}

fn offering_object(offering: &Offering) -> Value {
    json!({
        "instanceType": offering.instance_type,
        "zone": offering.zone,
        "spot": offering.spot,
        "pricePerHourMicros": offering.price_micros,
        "priceIsAtMost": offering.price_is_at_most,
        "priceIsEstimate": offering.price_is_estimate,
    })
}

/// Returns an instance type, with ` (spot)` for spot.
pub(super) fn type_of(offering: Option<&Offering>) -> String {
    offering.map_or_else(|| or_none(""), |it| type_name(&it.instance_type, it.spot))
}

fn type_name(name: &str, is_spot: bool) -> String {
    let name = or_none(name);
    if is_spot { format!("{name} (spot)") } else { name }
}

/// Returns the price of an offering an hour.
pub(super) fn price_of(offering: Option<&Offering>) -> String {
    offering.map_or_else(|| or_none(""), money::price)
}

/// Returns a text, or `<none>` for an empty text, as kubectl does.
pub(super) fn or_none(text: &str) -> String {
    if text.is_empty() { "<none>".to_owned() } else { text.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_has_a_value_for_each_column() {
        let items = [
            (pod(&Pod::default(), 0), PODS),
            (cell(&Cell::default(), 0), CELLS),
            (event(&Event::default()), EVENTS),
            (pod_usage(&PodUsage::default()), METRICS),
            (type_usage(&TypeUsage::default()), USAGE),
            (backend(&Backend::default()), BACKENDS),
            (offering(&CatalogueOffering::default()), OFFERINGS),
            (pool(&Pool::default()), POOLS),
        ];
        for (item, columns) in items {
            assert_eq!(item.columns.len(), columns.names.len(), "{}", item.name);
            assert!(columns.usual <= columns.names.len());
            assert!(item.object["kind"].is_string(), "{}", item.name);
        }
    }

    #[test]
    fn spot_is_shown_with_the_type_and_a_silent_cell_in_its_status() {
        let offering =
            Offering { instance_type: "t3.nano".into(), spot: true, ..Default::default() };
        assert_eq!(type_of(Some(&offering)), "t3.nano (spot)");
        let mut cell = Cell { phase: CellPhase::CellBound.into(), ..Default::default() };
        assert_eq!(status_of_cell(&cell), "Silent (Bound)");
        cell.connected = true;
        assert_eq!(status_of_cell(&cell), "Bound");
    }

    #[test]
    fn hit_rate_of_a_pool_needs_a_pod() {
        let rate =
            |hits, misses| pool(&Pool { hits, misses, ..Default::default() }).columns[6].clone();
        assert_eq!((rate(0, 0), rate(3, 1)), ("<none>".to_owned(), "75%".to_owned()));
    }
}
