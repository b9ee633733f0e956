//! Choice of instances for pods.

use std::time::Duration;

use super::read;
use crate::problems::{Field, Table};

/// Memory of a pod without a memory limit, in bytes.
const MEMORY_BYTES: u64 = 512 << 20;
/// Range of that memory: no instance has more.
const MIN_MEMORY_BYTES: u64 = 1 << 20;
const MAX_MEMORY_BYTES: u64 = 64 << 40;
/// Longest name or glob, in bytes.
const MAX_GLOB_BYTES: usize = 255;

/// Choice of instances for pods.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    /// Memory of a pod without a memory limit, in bytes; not 0.
    pub default_memory: u64,
    /// Globs of instance types that no pod gets.
    pub exclude: Vec<String>,
}

impl Default for Placement {
    fn default() -> Self {
        Self { default_memory: MEMORY_BYTES, exclude: Vec::new() }
    }
}

impl Placement {
    pub(super) fn read(mut table: Table<'_>) -> Self {
        let mut placement = Self::default();
        table.set("default_memory", &mut placement.default_memory, |field| {
            read::bytes_in(field, "from 1Mi to 64Ti", MIN_MEMORY_BYTES..=MAX_MEMORY_BYTES)
        });
        table.set("exclude", &mut placement.exclude, exclude);
        table.finish();
        placement
    }
}

fn exclude(field: Field<'_>) -> Option<Vec<String>> {
    Some(field.items().into_iter().filter_map(glob).collect())
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
