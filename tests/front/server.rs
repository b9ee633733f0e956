//! A CRI server in a directory of its own.

use std::{path::PathBuf, sync::Arc, time::Duration};

use kiyot::{
    backends::{Backend, BackendName, cri::CriBackend, registry::Registry},
    metrics::Exposition,
    proxy::{CriServer, RunningServer, cri_calls},
};
use kiyot_config::{Routing, Server};

use crate::{
    caller::{Caller, LONG},
    fake_cells::{FakeCells, FakeCellsBackend},
};

pub(crate) struct TestServer {
    pub(crate) dir: tempfile::TempDir,
    pub(crate) running: RunningServer,
    pub(crate) cells: Arc<FakeCells>,
    /// The metrics of all calls.
    pub(crate) calls: Exposition,
}

/// Options of a test.
pub(crate) struct Setup {
    pub(crate) client_timeout: Duration,
    pub(crate) connect_timeout: Duration,
    pub(crate) max_calls: usize,
    pub(crate) runtimes: &'static [&'static str],
    /// The node backend.
    pub(crate) node: &'static str,
    pub(crate) cells: bool,
    pub(crate) routing: Routing,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            client_timeout: LONG,
            connect_timeout: LONG,
            max_calls: 10_000,
            runtimes: &["containerd"],
            node: "containerd",
            cells: true,
            routing: Routing { default: "containerd".into(), rules: vec![] },
        }
    }
}

impl Setup {
    pub(crate) fn start(self) -> TestServer {
        let dir = tempfile::tempdir().unwrap();
        let cells = Arc::new(FakeCells::default());
        let socket = |name: &str| dir.path().join(format!("{name}.sock"));
        let cri = |name: &&str| -> Arc<dyn Backend> {
            Arc::new(CriBackend::new(BackendName::new(name), socket(name), self.connect_timeout))
        };
        let mut backends: Vec<_> = self.runtimes.iter().map(cri).collect();
        if self.cells {
            backends.push(FakeCellsBackend::of(cells.clone()));
        }
        let registry = Registry::new(backends, &BackendName::new(self.node)).unwrap();
        let config = Server {
            listen: socket("kiyot"),
            client_timeout: self.client_timeout,
            max_concurrent_calls: self.max_calls,
            node_backend: Some(self.node.into()),
            ..Server::default()
        };
        let calls = cri_calls(&registry);
        let running =
            CriServer::start(&config, self.routing, registry, Some(calls.clone())).unwrap();
        TestServer { dir, running, cells, calls: Exposition::new(vec![calls]) }
    }
}

impl TestServer {
    /// Returns the socket of a container runtime.
    pub(crate) fn runtime(&self, name: &str) -> PathBuf {
        self.dir.path().join(format!("{name}.sock"))
    }

    pub(crate) fn containerd(&self) -> PathBuf {
        self.runtime("containerd")
    }

    pub(crate) async fn caller(&self) -> Caller {
        Caller::connect(&self.running.address).await
    }
}
