//! Cells on top of the netns provider.

use std::{net::IpAddr, path::PathBuf, sync::Arc};

use async_trait::async_trait;
use kiyot::backends::milpa::{
    cells::{BoundCell, CellEvent, Cells, CellsConfig, Configured, Links},
    gateway::{Admission, CellLink},
    store::{Batch, Store, Table},
};
use kiyot_engine::{
    OrderKey, Wanted,
    engine::CellError,
    id::{CellId, SandboxId},
    provider::{InstanceId, Provider},
};
use kiyot_link::bootstrap::Bootstrap;
use kiyot_local::{PauseImage, boot_id, netns::Netns};
use kiyot_proto::{cell::HelloReply, store::SandboxMeta};
use ring::digest::{SHA256, digest};
use tokio::sync::broadcast;

use super::bench::{self, Bench, LIMIT, cell_file, unconnected_link, wait_for};

/// Links without a gateway.
#[derive(Debug)]
struct NoGateway;

#[async_trait]
impl Links for NoGateway {
    fn link(&self, _cell: &CellId) -> CellLink {
        unconnected_link()
    }

    fn bootstrap(&self, cell: &CellId, token: &str, _: bool) -> Bootstrap {
        bench::bootstrap(cell, token)
    }

    fn peer_address(&self, _cell: &CellId) -> Option<IpAddr> {
        None
    }

    fn forget(&self, _cell: &CellId) {}

    async fn shut_down(&self, _cell: &CellId) -> bool {
        false
    }
}

async fn start(bench: &Bench, store: &Store) -> (Arc<Cells>, broadcast::Receiver<CellEvent>) {
    let provider: Arc<dyn Provider> =
        Arc::new(Netns::new(&bench.config, Arc::new(None::<PathBuf>), PauseImage::new(None)));
    let config =
        CellsConfig { boot_id: boot_id(), launch_timeout: LIMIT, ..CellsConfig::default() };
    let cells = Cells::start(config, store.clone(), vec![Configured::new(provider)]).await.unwrap();
    let events = cells.events();
    cells.serve(Arc::new(NoGateway));
    (cells, events)
}

fn wanted(bench: &Bench) -> Arc<Wanted> {
    let (namespace, name) = ("n".into(), "p".into());
    let key = OrderKey { pod_uid: bench.name.clone(), namespace, name, attempt: 0 };
    Arc::new(Wanted { key, ..Wanted::default() })
}

/// Waits until the process of the only cell runs, and returns the cell's instance.
async fn running_instance(bench: &Bench, cells: &Cells) -> InstanceId {
    wait_for("an instance runs", async || {
        bench.provider.list_owned().await.unwrap().iter().any(|listed| listed.state.is_alive())
    })
    .await;
    InstanceId(cells.all()[0].to_string())
}

/// Enrols and connects in place of the stub, with the token of its cell file.
async fn enrol(bench: &Bench, cells: &Cells, id: &InstanceId) {
    let token = cell_file(&bench.instance_dir(id)).bootstrap.token;
    let cell =
        cells.redeem(&id.0, &hex::encode(digest(&SHA256, token.as_bytes())), "key").await.unwrap();
    cells.linked(&cell, Some(HelloReply { cell: cell.to_string(), ..HelloReply::default() }));
}

/// Waits for the end of a cell, and returns its reason.
async fn cell_gone(events: &mut broadcast::Receiver<CellEvent>) -> String {
    loop {
        if let CellEvent::Gone { reason, .. } =
            tokio::time::timeout(LIMIT, events.recv()).await.unwrap().unwrap()
        {
            return reason;
        }
    }
}

#[tokio::test]
async fn restart_during_a_launch_keeps_the_instance_for_the_retry() {
    let bench = Bench::new();
    let store = Store::open(&bench.path().join("store")).await.unwrap();
    let (cells, _) = start(&bench, &store).await;
    let sandbox = SandboxId::mint().unwrap();
    let launch = tokio::spawn({
        let (cells, first, id) = (Arc::clone(&cells), wanted(&bench), sandbox.clone());
        async move { cells.launch(first, id, None).await }
    });
    let id = running_instance(&bench, &cells).await;
    let launcher = bench.launcher(&id);
    cells.shutdown().await;
    assert!(matches!(launch.await.unwrap(), Err(CellError::Stopping)));
    assert!(!bench.resources_of(&id).is_empty(), "the instance outlives the daemon");
    let (cells, _) = start(&bench, &store).await;
    let retry = tokio::spawn({
        let (cells, again) = (Arc::clone(&cells), wanted(&bench));
        async move { cells.launch(again, SandboxId::mint().unwrap(), None).await }
    });
    enrol(&bench, &cells, &id).await;
    let bound = retry.await.unwrap().unwrap();
    assert_eq!((bound.cell.id.as_str(), &bound.sandbox), (id.0.as_str(), &sandbox));
    assert_eq!(bench.launcher(&id), launcher, "the instance was not launched again");
    cells.terminate(&bound.cell.id, "done").await.unwrap();
    bench.assert_clean(&id);
    cells.shutdown().await;
}

#[tokio::test]
async fn bound_cell_outlives_the_daemon_and_its_later_end_is_detected() {
    let bench = Bench::new();
    let store = Store::open(&bench.path().join("store")).await.unwrap();
    let (cells, _) = start(&bench, &store).await;
    let id = SandboxId::mint().unwrap();
    let sandbox = id.to_string();
    let launch = tokio::spawn({
        let (cells, wanted) = (Arc::clone(&cells), wanted(&bench));
        async move { cells.launch(wanted, id, None).await }
    });
    let id = running_instance(&bench, &cells).await;
    enrol(&bench, &cells, &id).await;
    let BoundCell { cell, attached, .. } = launch.await.unwrap().unwrap();
    assert_eq!((cell.id.as_str(), attached.addresses.len()), (id.0.as_str(), 1));
    let mut batch = Batch::default();
    batch.put(
        Table::Sandboxes,
        &sandbox,
        &SandboxMeta { id: sandbox.clone(), cell: id.0.clone(), ..SandboxMeta::default() },
    );
    store.commit(batch).await.unwrap();
    let launcher = bench.launcher(&id);
    cells.shutdown().await;

    let (cells, mut events) = start(&bench, &store).await;
    wait_for("the cell is adopted", async || cells.get(&cell.id).is_some()).await;
    assert_eq!(bench.launcher(&id), launcher);
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(launcher), nix::sys::signal::Signal::SIGKILL)
        .unwrap();
    assert_eq!(cell_gone(&mut events).await, "its instance ended");
    bench.assert_clean(&id);
    cells.shutdown().await;
}

/// Verifies N3.
#[tokio::test]
async fn instance_without_a_record_is_terminated() {
    let bench = Bench::new();
    let launched = bench.launch().await;
    let store = Store::open(&bench.path().join("store")).await.unwrap();
    let (cells, _) = start(&bench, &store).await;
    wait_for("the instance has ended", async || {
        bench.provider.list_owned().await.unwrap().is_empty()
    })
    .await;
    bench.assert_clean(&launched.instance.id);
    cells.shutdown().await;
}
