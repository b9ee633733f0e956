//! Choice of instances for pods.

use std::time::Duration;

use kiyot_values::problems::{Field, Table};

use super::read;

/// Memory of a pod without a memory limit, in bytes.
const MEMORY_BYTES: u64 = 512 << 20;
/// Range of that memory: no instance has more.
const MIN_MEMORY_BYTES: u64 = 1 << 20;
const MAX_MEMORY_BYTES: u64 = 64 << 40;
/// Time for which a pod that prefers spot waits for spot, and its range.
const SPOT_DEADLINE: Duration = Duration::from_secs(60);
const MAX_SPOT_DEADLINE: Duration = Duration::from_secs(600);
/// Most zones, and the longest name of a zone, in bytes.
const MAX_ZONES: usize = 32;
const MAX_ZONE_BYTES: usize = 64;
/// Longest name or glob, in bytes.
const MAX_GLOB_BYTES: usize = 255;

/// Choice of instances for pods.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    /// Memory of a pod without a memory limit, in bytes; not 0.
    pub default_memory: u64,
    /// Globs of instance types that no pod gets.
    pub exclude: Vec<String>,
    /// Zones of instances; empty for all.
    pub zones: Vec<String>,
    /// Time for which a pod with the launch type Spot-Preferred waits for spot.
    pub spot_deadline: Duration,
}

impl Default for Placement {
    fn default() -> Self {
        Self {
            default_memory: MEMORY_BYTES,
            exclude: Vec::new(),
            zones: Vec::new(),
            spot_deadline: SPOT_DEADLINE,
        }
    }
}

impl Placement {
    pub(super) fn read(mut table: Table<'_>) -> Self {
        let mut placement = Self::default();
        table.set("default_memory", &mut placement.default_memory, |field| {
            read::bytes_in(field, "from 1Mi to 64Ti", MIN_MEMORY_BYTES..=MAX_MEMORY_BYTES)
        });
        table.set("exclude", &mut placement.exclude, exclude);
        table.set("zones", &mut placement.zones, zones);
        table.set("spot_deadline", &mut placement.spot_deadline, |field| {
            read::duration(field, Duration::ZERO..=MAX_SPOT_DEADLINE)
        });
        table.finish();
        placement
    }
}

fn exclude(field: Field<'_>) -> Option<Vec<String>> {
    Some(field.items().into_iter().filter_map(glob).collect())
}

fn zones(field: Field<'_>) -> Option<Vec<String>> {
    let mut items = field.items();
    if items.len() > MAX_ZONES {
        let given = items.len();
        items.swap_remove(0).refuse(format!("is one of {given} zones; allowed: {MAX_ZONES}"));
        return None;
    }
    Some(items.into_iter().filter_map(zone).collect())
}

fn zone(field: Field<'_>) -> Option<String> {
    field.read("the name of a zone such as us-east-1a", |text| {
        let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
        let fits = (1..=MAX_ZONE_BYTES).contains(&text.len()) && text.bytes().all(is_allowed);
        fits.then(|| text.to_owned())
    })
}

fn glob(field: Field<'_>) -> Option<String> {
    field.read("an instance type such as t2.nano, or a glob such as t2.*", |text| {
        let is_allowed = |byte: u8| {
            byte.is_ascii_alphanumeric() || [b'.', b'-', b'_', b'*', b'?'].contains(&byte)
        };
        let fits = (1..=MAX_GLOB_BYTES).contains(&text.len()) && text.bytes().all(is_allowed);
        fits.then(|| text.to_owned())
    })
}
