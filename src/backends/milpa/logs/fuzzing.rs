//! What a cell may say of a log, and when, as any bytes. For kiyot-fuzz alone.

use std::{
    collections::VecDeque,
    fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use async_trait::async_trait;
use bytes::Bytes;
use futures::{
    StreamExt as _,
    stream::{self, BoxStream},
};
use tokio::runtime::Runtime;
use tonic::Status;

use super::{
    LogRoute, Logs,
    source::{Part, Source},
};
use crate::backends::milpa::id::{CellId, ContainerId};

/// Where the log is, beneath the cell's `pod_dir`.
const IN_CELL: &str = "logs/c/0.log";
/// Time for what must happen. A runtime whose clock is paused does not wait for it.
const PATIENCE: Duration = Duration::from_secs(60 * 60);
/// Steps of one log, so that each has its end soon.
const STEPS: usize = 64;

/// What goes wrong with one reading.
#[derive(Debug, Clone, Copy)]
enum Fault {
    /// The link breaks after the first part.
    Broken,
    /// There is no link.
    Unavailable,
    /// Nothing more comes after the first part.
    Silent,
    /// The cell says that there is no such log.
    NotFound,
    /// The cell says that it has less.
    Less,
}

/// A cell's log, told in parts.
struct Told {
    log: Mutex<Vec<u8>>,
    part: usize,
    faults: Mutex<VecDeque<Fault>>,
}

impl Told {
    fn faults(&self) -> std::sync::MutexGuard<'_, VecDeque<Fault>> {
        self.faults.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn log(&self) -> std::sync::MutexGuard<'_, Vec<u8>> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[async_trait]
impl Source for Told {
    async fn read(
        &self,
        path: &str,
        position: u64,
    ) -> Result<BoxStream<'static, Result<Part, Status>>, Status> {
        assert_eq!(path, IN_CELL);
        let fault = self.faults().pop_front();
        let log = self.log();
        let position = usize::try_from(position).unwrap_or(usize::MAX);
        // No fault makes it ask for what there never was.
        let rest = log
            .get(position..)
            .unwrap_or_else(|| panic!("position {position} of {} bytes is asked for", log.len()));
        // An empty part says nothing.
        let parts =
            rest.chunks(self.part).map(|part| Ok(Part::Bytes(Bytes::copy_from_slice(part))));
        let mut parts: Vec<_> = parts.chain([Ok(Part::Bytes(Bytes::new()))]).collect();
        match fault {
            None => Ok(stream::iter(parts).boxed()),
            Some(Fault::Broken) => {
                parts.truncate(1);
                parts.push(Err(Status::unavailable("the link broke")));
                Ok(stream::iter(parts).boxed())
            }
            Some(Fault::Silent) => {
                parts.truncate(1);
                Ok(stream::iter(parts).chain(stream::pending()).boxed())
            }
            Some(Fault::Unavailable) => Err(Status::unavailable("no link")),
            Some(Fault::NotFound) => Err(Status::not_found("no such log")),
            Some(Fault::Less) => Err(Status::out_of_range("beyond its end")),
        }
    }

    async fn trim(&self, _: &str, position: u64) -> Result<(), Status> {
        assert!(position <= self.log().len() as u64);
        Ok(())
    }
}

/// One life of kiyot after the other, and what they leave on the node.
struct Node<'a> {
    life: &'a dyn Fn() -> Runtime,
    runtime: Runtime,
    logs: Arc<Logs>,
    told: Arc<Told>,
    cell: CellId,
    container: ContainerId,
    path: PathBuf,
    base: i64,
    /// The files that were taken away, and whether each must end with a line.
    rotated: Vec<(PathBuf, bool)>,
    /// Whether a reading may have failed in whose middle the log still is.
    faulty: bool,
    /// Whether the cell said that there is more than there is: then nobody hears of what comes
    /// next.
    lied: bool,
}

impl Node<'_> {
    fn follow(&self) {
        let route = LogRoute {
            container: self.container.clone(),
            node_path: self.path.clone(),
            cell_path: IN_CELL.to_owned(),
            base: self.base,
        };
        let source = Arc::clone(&self.told) as Arc<dyn Source>;
        if let Err(status) = self.runtime.block_on(self.logs.follow_from(&self.cell, source, route))
        {
            panic!("{status}");
        }
    }

    fn drain(&mut self) {
        self.runtime.block_on(self.logs.drain(&self.container, PATIENCE));
        self.faulty = !self.told.faults().is_empty();
    }

    fn reopen(&mut self) {
        self.base = self
            .runtime
            .block_on(self.logs.reopen(&self.container))
            .unwrap_or_else(|status| panic!("{status}"));
    }

    /// As the kubelet does it.
    fn rotate(&mut self) {
        let old = self.path.with_extension(format!("log.{}", self.rotated.len()));
        rename(&self.path, &old);
        let whole =
            !self.faulty && !self.lied && self.told.log().last().is_none_or(|byte| *byte == b'\n');
        self.reopen();
        self.rotated.push((old, whole));
    }

    /// kiyot is killed, and comes again.
    fn crash(&mut self) {
        self.logs = Logs::new();
        self.lied = false;
        // The kernel still does what it was asked for.
        self.runtime = (self.life)();
        self.follow();
    }

    fn step(&mut self, kind: u8, rest: &mut &[u8]) {
        let mut take = |most: usize| {
            let (taken, after) = rest.split_at(most.min(rest.len()));
            *rest = after;
            taken
        };
        match kind % 8 {
            0 | 1 => {
                let length = usize::from(take(1).first().copied().unwrap_or_default());
                let size = {
                    let mut log = self.told.log();
                    log.extend_from_slice(take(length));
                    if kind.is_multiple_of(8) {
                        log.push(b'\n');
                    }
                    log.len() as u64
                };
                self.logs.grown(&self.cell, IN_CELL, size);
            }
            2 => self.drain(),
            3 => self.rotate(),
            4 => self.crash(),
            5 => self.reopen(),
            6 => {
                let faults = [
                    Fault::Broken,
                    Fault::Unavailable,
                    Fault::Silent,
                    Fault::NotFound,
                    Fault::Less,
                ];
                let which =
                    usize::from(take(1).first().copied().unwrap_or_default()) % faults.len();
                self.told.faults().push_back(faults[which]);
                self.faulty = true;
            }
            // What a cell says of a log's size may be wrong.
            _ => {
                let size = take(8).iter().fold(0, |size, byte| size << 8 | u64::from(*byte));
                self.lied |= size > self.told.log().len() as u64;
                self.logs.grown(&self.cell, IN_CELL, size);
            }
        }
    }
}

/// Follows a log whose cell, link and kubelet do what the bytes say, each life of kiyot in a
/// runtime of its own, on files in `dir`. Whatever happens, the files one after the other are the
/// cell's log, and where nothing failed each of them ends with a line: who reads one after the
/// other reads each line once.
///
/// # Panics
/// If not.
pub fn log(life: &dyn Fn() -> Runtime, dir: &Path, bytes: &[u8]) {
    let (Ok(cell), Ok(container)) =
        (CellId::parse("cell-aaaaaaaaaaaa"), ContainerId::parse(&format!("milpa{:a<59}", "")))
    else {
        return;
    };
    let Some((&part, mut rest)) = bytes.split_first() else { return };
    let told = Arc::new(Told {
        log: Mutex::default(),
        part: usize::from(part).max(1),
        faults: Mutex::default(),
    });
    let (runtime, logs, path) = (life(), Logs::new(), dir.join("0.log"));
    let mut node = Node {
        life,
        runtime,
        logs,
        told,
        cell,
        container,
        path,
        base: 0,
        rotated: Vec::new(),
        faulty: false,
        lied: false,
    };
    node.follow();
    for _ in 0..STEPS {
        let Some((&kind, after)) = rest.split_first() else { break };
        rest = after;
        node.step(kind, &mut rest);
    }
    node.told.faults().clear();
    node.drain();
    let mut all = Vec::new();
    for (path, whole) in &node.rotated {
        let file = read(path);
        assert!(
            !whole || file.last().is_none_or(|byte| *byte == b'\n'),
            "{} ends within a line: {:?}",
            path.display(),
            String::from_utf8_lossy(&file)
        );
        all.extend(file);
    }
    all.extend(read(&node.path));
    assert_eq!(String::from_utf8_lossy(&all), String::from_utf8_lossy(&node.told.log()));
}

fn read(path: &Path) -> Vec<u8> {
    fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn rename(from: &Path, to: &Path) {
    fs::rename(from, to).unwrap_or_else(|error| panic!("{}: {error}", from.display()));
}
