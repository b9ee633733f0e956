//! A provider whose cells are tasks with a fake containerd: everything between the CRI service and
//! the cell's containerd is real.

use std::{
    collections::{BTreeMap, HashMap},
    path::PathBuf,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use kiyot_cell::uplink::Uplink;
use kiyot_engine::{
    Wanted,
    id::CellId,
    placement::{Catalogue, Market, Offering},
    provider::{
        Attached, Attachment, Capabilities, ErrorClass, Instance, InstanceId, InstanceState,
        LaunchSpec, Provider, ProviderError, Termination, Terminations,
    },
};
use kiyot_local::netns;
use kiyot_proto::cri;
use kiyot_testkit::fake_cell::{FakeCell, Options};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// A provider of fake cells.
#[derive(Debug)]
pub(crate) struct FakeProvider {
    dir: PathBuf,
    cells: Mutex<HashMap<CellId, Running>>,
    launched: Mutex<Vec<CellId>>,
    /// The instance types: by default one that fits every pod.
    pub(crate) catalogue: Mutex<Catalogue>,
    /// Catalogue and parameters can't be read while this is set.
    pub(crate) is_unreadable: AtomicBool,
    /// Tags of the last launch.
    pub(crate) tags: Mutex<BTreeMap<String, String>>,
    /// Candidates of the last launch.
    pub(crate) candidates: Mutex<Vec<Offering>>,
    /// Offerings without capacity.
    pub(crate) full: Mutex<Vec<Offering>>,
    /// Number of launches that were called, with or without a permit.
    pub(crate) called: AtomicUsize,
    /// Permits of launches.
    pub(crate) gate: tokio::sync::Semaphore,
    /// Permits of terminations.
    pub(crate) way_out: tokio::sync::Semaphore,
    most: AtomicUsize,
    /// Number of requested terminations.
    pub(crate) asked_to_end: AtomicUsize,
    /// Terminations fail while this is set.
    pub(crate) refuses_to_end: AtomicBool,
    /// Prefix of the ids that cells choose.
    ids: String,
    /// Runtime handlers of the containerd of later cells; `None` for a containerd without status.
    pub(crate) handlers: Mutex<Option<Vec<cri::RuntimeHandler>>>,
}

#[derive(Debug)]
struct Running {
    cell: FakeCell,
    end: CancellationToken,
    task: JoinHandle<()>,
}

impl FakeProvider {
    pub(crate) fn new(dir: PathBuf, ids: &str) -> Arc<Self> {
        let open = || tokio::sync::Semaphore::new(tokio::sync::Semaphore::MAX_PERMITS);
        Arc::new(Self {
            dir,
            cells: Mutex::default(),
            launched: Mutex::default(),
            catalogue: Mutex::new(Catalogue::any_size(offering())),
            is_unreadable: AtomicBool::new(false),
            tags: Mutex::default(),
            candidates: Mutex::default(),
            full: Mutex::default(),
            called: AtomicUsize::new(0),
            gate: open(),
            way_out: open(),
            most: AtomicUsize::new(0),
            asked_to_end: AtomicUsize::new(0),
            refuses_to_end: AtomicBool::new(false),
            ids: ids.to_owned(),
            handlers: Mutex::default(),
        })
    }

    /// Returns the only running cell.
    pub(crate) fn only(&self) -> FakeCell {
        let cells = self.cells.lock().unwrap();
        assert_eq!(cells.len(), 1, "cells that run");
        cells.values().next().unwrap().cell.clone()
    }

    /// Returns the cell that was launched as number `n`, from 0.
    pub(crate) fn nth(&self, n: usize) -> FakeCell {
        let id = self.launched.lock().unwrap()[n].clone();
        self.cells.lock().unwrap()[&id].cell.clone()
    }

    /// Returns the number of running cells.
    pub(crate) fn running(&self) -> usize {
        self.cells.lock().unwrap().len()
    }

    /// Returns the largest number of cells that ran at a time.
    pub(crate) fn most(&self) -> usize {
        self.most.load(Ordering::SeqCst)
    }

    /// Returns the number of launches.
    pub(crate) fn launched(&self) -> usize {
        self.launched.lock().unwrap().len()
    }

    /// Holds all launches until `gate` has permits again.
    pub(crate) fn hold_launches(&self) {
        self.gate.forget_permits(self.gate.available_permits());
    }

    /// Ends the agents of all cells. The cells keep running.
    pub(crate) fn silence(&self) {
        self.cells.lock().unwrap().values().for_each(|running| running.end.cancel());
    }

    fn readable(&self, doing: &str) -> Result<(), ProviderError> {
        match self.is_unreadable.load(Ordering::SeqCst) {
            true => Err(ProviderError::transient(doing, "the test says no")),
            false => Ok(()),
        }
    }

    /// Ends the only cell, as if it had ended by itself.
    pub(crate) fn crash(&self) {
        for running in self.cells.lock().unwrap().values() {
            running.end.cancel();
            running.cell.with(|state| state.crashed = true);
        }
    }
}

impl Running {
    fn instance(&self, id: &CellId) -> Instance {
        instance(id, !self.cell.with(|state| state.crashed))
    }
}

fn offering() -> Offering {
    Offering { instance_type: "fake".to_owned(), zone: "here".to_owned(), market: Market::OnDemand }
}

fn instance(cell: &CellId, running: bool) -> Instance {
    let state = if running { InstanceState::Running } else { InstanceState::Stopped };
    Instance::new(InstanceId(cell.as_str().to_owned()), cell.clone(), offering(), state)
}

#[async_trait]
impl Provider for FakeProvider {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            provider: "qemu",
            own_kernel: true,
            own_users: true,
            own_devices: true,
            listing_period: Duration::from_millis(100),
            ..netns::CAPABILITIES
        }
    }

    async fn catalogue(&self) -> Result<Catalogue, ProviderError> {
        self.readable("read the catalogue")?;
        Ok(self.catalogue.lock().unwrap().clone())
    }

    async fn parameters(&self, _: &Wanted) -> Result<BTreeMap<String, String>, ProviderError> {
        self.readable("read the images").map(|()| BTreeMap::new())
    }

    async fn launch(&self, spec: &LaunchSpec, _: &str) -> Result<Instance, ProviderError> {
        self.called.fetch_add(1, Ordering::SeqCst);
        self.gate.acquire().await.unwrap().forget();
        let candidates: Vec<Offering> = spec.offerings().cloned().collect();
        self.candidates.lock().unwrap().clone_from(&candidates);
        let full = self.full.lock().unwrap().clone();
        let chosen = candidates.iter().find(|candidate| !full.contains(candidate)).cloned();
        let Some(offering) = chosen else {
            return Err(ProviderError::no_capacity("launch an instance", candidates));
        };
        let private = self.dir.join(spec.cell.as_str());
        let home = Uplink::new(spec.bootstrap.clone(), &private, "fake").unwrap();
        let ways = Options { ids: self.ids.clone(), heartbeat: None };
        let cell = FakeCell::new(spec.cell.as_str(), home.handle(), ways);
        cell.with(|state| state.handlers = self.handlers.lock().unwrap().clone());
        let (end, own) = (CancellationToken::new(), cell.clone());
        let stop = end.clone();
        let task = tokio::spawn(async move {
            home.run(|info| own.service(info), stop).await;
        });
        self.launched.lock().unwrap().push(spec.cell.clone());
        self.tags.lock().unwrap().clone_from(&spec.tags);
        let mut cells = self.cells.lock().unwrap();
        cells.insert(spec.cell.clone(), Running { cell, end, task });
        self.most.fetch_max(cells.len(), Ordering::SeqCst);
        Ok(Instance { offering, ..instance(&spec.cell, true) })
    }

    async fn attach(&self, _: &InstanceId, _: &Attachment) -> Result<Attached, ProviderError> {
        Ok(Attached::already_made(vec!["10.200.0.2".parse().unwrap()]))
    }

    async fn list_owned(&self) -> Result<Vec<Instance>, ProviderError> {
        let cells = self.cells.lock().unwrap();
        Ok(cells.iter().map(|(id, running)| running.instance(id)).collect())
    }

    async fn describe(&self, instance: &InstanceId) -> Result<Instance, ProviderError> {
        let (cells, id) = (self.cells.lock().unwrap(), CellId::parse(&instance.0).unwrap());
        cells.get(&id).map(|running| running.instance(&id)).ok_or_else(|| {
            ProviderError::without_cause(ErrorClass::NotFound, "describe a fake cell")
        })
    }

    async fn detach(&self, _: &InstanceId) -> Result<(), ProviderError> {
        Ok(())
    }

    async fn terminate(&self, instances: &[InstanceId]) -> Terminations {
        self.asked_to_end.fetch_add(1, Ordering::SeqCst);
        self.way_out.acquire().await.unwrap().forget();
        if self.refuses_to_end.load(Ordering::SeqCst) {
            let error = ProviderError::transient("end a fake cell", "the test says no");
            return instances.iter().map(|id| (id.clone(), Err(error.clone()))).collect();
        }
        for instance in instances {
            let running = self.cells.lock().unwrap().remove(&CellId::parse(&instance.0).unwrap());
            if let Some(Running { end, task, .. }) = running {
                end.cancel();
                task.await.unwrap();
            }
        }
        instances.iter().map(|id| (id.clone(), Ok(Termination::Confirmed))).collect()
    }

    async fn console(&self, _: &InstanceId) -> Result<String, ProviderError> {
        Ok(String::new())
    }

    async fn check(&self) -> Result<(), ProviderError> {
        Ok(())
    }
}
