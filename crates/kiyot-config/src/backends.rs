//! `[backends.NAME]`: backends that run pods.

use std::{collections::BTreeMap, path::PathBuf, time::Duration};

use kiyot_values::{
    names::{MAX_LABEL_BYTES, is_label},
    problems::{Field, Table},
};

use super::{MilpaBackend, read};

/// Default socket of containerd.
pub(super) const CONTAINERD_SOCKET: &str = "/run/containerd/containerd.sock";
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
const MIN_CONNECT_TIMEOUT: Duration = Duration::from_millis(100);
const MAX_CONNECT_TIMEOUT: Duration = Duration::from_secs(2 * 60);

/// Backend, by its key `type`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BackendConfig {
    /// `cri`: a container runtime on this node.
    Cri(CriBackend),
    /// `milpa`: cells.
    Milpa(Box<MilpaBackend>),
}

/// Container runtime on this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CriBackend {
    /// Unix socket of its CRI v1.
    pub socket: PathBuf,
    /// Time for which a call waits for a connection.
    pub connect_timeout: Duration,
}

impl Default for CriBackend {
    fn default() -> Self {
        Self { socket: CONTAINERD_SOCKET.into(), connect_timeout: CONNECT_TIMEOUT }
    }
}

#[derive(Debug, Clone, Copy)]
enum Type {
    Cri,
    Milpa,
}

pub(super) fn read(field: Field<'_>) -> BTreeMap<String, BackendConfig> {
    let mut backends = BTreeMap::new();
    for (name, field) in field.entries() {
        if !is_label(&name) {
            field.refuse(format!(
                "is not a valid name; allowed: 1 to {MAX_LABEL_BYTES} characters of a-z, \
                                  0-9 and -, not - at either end"
            ));
        }
        if let Some(backend) = field.table().and_then(read_one) {
            backends.insert(name, backend);
        }
    }
    backends
}

fn read_one(mut table: Table<'_>) -> Option<BackendConfig> {
    // Without its type the other keys are unknown.
    let kind = table
        .need("type", "\"cri\" or \"milpa\"")?
        .choice(&[("cri", Type::Cri), ("milpa", Type::Milpa)])?;
    Some(match kind {
        Type::Cri => BackendConfig::Cri(CriBackend::read(table)),
        Type::Milpa => BackendConfig::Milpa(Box::new(MilpaBackend::read(table))),
    })
}

impl CriBackend {
    fn read(mut table: Table<'_>) -> Self {
        let mut backend = Self::default();
        table.set("socket", &mut backend.socket, read::socket);
        table.set("connect_timeout", &mut backend.connect_timeout, |field| {
            read::duration(field, MIN_CONNECT_TIMEOUT..=MAX_CONNECT_TIMEOUT)
        });
        table.finish();
        backend
    }
}
