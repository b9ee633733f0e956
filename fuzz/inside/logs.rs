//! Fuzz target: a log from a cell, with failures and kills in an order made from any bytes.

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
use kiyot_engine::id::{CellId, ContainerId};
use tokio::runtime::Runtime;

use super::{
    LogRoute, Logs,
    source::{Part, Source},
};
use crate::backends::milpa::failure::{Code, Failure};

/// Path of the log below the cell's `pod_dir`.
const CELL_PATH: &str = "logs/c/0.log";
/// Deadline for expected events, with a paused clock.
const DEADLINE: Duration = Duration::from_secs(60 * 60);
/// Limit of the steps of an input, so that each input ends soon.
const MAX_STEPS: usize = 64;

/// Failure of a read.
#[derive(Debug, Clone, Copy)]
enum Fault {
    /// The link breaks after the first part.
    Broken,
    /// The link is absent.
    Unavailable,
    /// The cell is silent after the first part.
    Silent,
    /// The cell reports that the log is absent.
    NotFound,
    /// The cell reports a shorter log.
    Shorter,
}

/// Fake log of a cell, read in parts.
struct FakeLog {
    log: Mutex<Vec<u8>>,
    part: usize,
    faults: Mutex<VecDeque<Fault>>,
}

impl FakeLog {
    fn faults(&self) -> std::sync::MutexGuard<'_, VecDeque<Fault>> {
        self.faults.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn log(&self) -> std::sync::MutexGuard<'_, Vec<u8>> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[async_trait]
impl Source for FakeLog {
    async fn read(
        &self,
        path: &str,
        position: u64,
    ) -> Result<BoxStream<'static, Result<Part, Failure>>, Failure> {
        assert_eq!(path, CELL_PATH);
        let fault = self.faults().pop_front();
        let log = self.log();
        let position = usize::try_from(position).unwrap_or(usize::MAX);
        // After any failure the position is in the log.
        let rest = log
            .get(position..)
            .unwrap_or_else(|| panic!("position {position} of {} bytes is read", log.len()));
        // An empty part has no meaning.
        let parts =
            rest.chunks(self.part).map(|part| Ok(Part::Bytes(Bytes::copy_from_slice(part))));
        let mut parts: Vec<_> = parts.chain([Ok(Part::Bytes(Bytes::new()))]).collect();
        match fault {
            None => Ok(stream::iter(parts).boxed()),
            Some(Fault::Broken) => {
                parts.truncate(1);
                parts.push(Err(Failure::cell(Code::Unavailable, "the link broke")));
                Ok(stream::iter(parts).boxed())
            }
            Some(Fault::Silent) => {
                parts.truncate(1);
                Ok(stream::iter(parts).chain(stream::pending()).boxed())
            }
            Some(Fault::Unavailable) => Err(Failure::cell(Code::Unavailable, "no link")),
            Some(Fault::NotFound) => Err(Failure::cell(Code::NotFound, "no such log")),
            Some(Fault::Shorter) => Err(Failure::cell(Code::OutOfRange, "beyond its end")),
        }
    }

    async fn trim(&self, _: &str, position: u64) -> Result<(), Failure> {
        assert!(position <= self.log().len() as u64);
        Ok(())
    }
}

/// Consecutive runs of kiyot, and their files on the node.
struct Scene<'a> {
    new_runtime: &'a dyn Fn() -> Runtime,
    runtime: Runtime,
    logs: Arc<Logs>,
    fake: Arc<FakeLog>,
    cell: CellId,
    container: ContainerId,
    path: PathBuf,
    base: i64,
    /// Rotated files, and whether each must end with a line end.
    rotated: Vec<(PathBuf, bool)>,
    /// Set if a failed read may have left the log within a line.
    faulty: bool,
    /// Set if the cell reported a log that is too long, which hides later growth.
    overstated: bool,
}

impl Scene<'_> {
    fn follow(&self) {
        let route = LogRoute {
            container: self.container.clone(),
            node_path: self.path.clone(),
            cell_path: CELL_PATH.to_owned(),
            base: self.base,
        };
        let source = Arc::clone(&self.fake) as Arc<dyn Source>;
        if let Err(failure) =
            self.runtime.block_on(self.logs.follow_from(&self.cell, source, route))
        {
            panic!("{failure}");
        }
    }

    fn drain(&mut self) {
        self.runtime.block_on(self.logs.drain(&self.container, DEADLINE));
        self.faulty = !self.fake.faults().is_empty();
    }

    fn reopen(&mut self) {
        self.base = self
            .runtime
            .block_on(self.logs.reopen(&self.container))
            .unwrap_or_else(|failure| panic!("{failure}"));
    }

    /// Rotates like the kubelet.
    fn rotate(&mut self) {
        let old = self.path.with_extension(format!("log.{}", self.rotated.len()));
        rename(&self.path, &old);
        let whole = !self.faulty
            && !self.overstated
            && self.fake.log().last().is_none_or(|byte| *byte == b'\n');
        self.reopen();
        self.rotated.push((old, whole));
    }

    /// Simulates a kill and a restart of kiyot.
    fn crash(&mut self) {
        self.logs = Logs::new();
        self.overstated = false;
        // The kernel completes its pending writes.
        self.runtime = (self.new_runtime)();
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
                    let mut log = self.fake.log();
                    log.extend_from_slice(take(length));
                    if kind.is_multiple_of(8) {
                        log.push(b'\n');
                    }
                    log.len() as u64
                };
                self.logs.on_growth(&self.cell, CELL_PATH, size);
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
                    Fault::Shorter,
                ];
                let which =
                    usize::from(take(1).first().copied().unwrap_or_default()) % faults.len();
                self.fake.faults().push_back(faults[which]);
                self.faulty = true;
            }
            // The reported size may be wrong.
            _ => {
                let size = take(8).iter().fold(0, |size, byte| size << 8 | u64::from(*byte));
                self.overstated |= size > self.fake.log().len() as u64;
                self.logs.on_growth(&self.cell, CELL_PATH, size);
            }
        }
    }
}

/// Follows a log on files in `dir`, with a runtime for each run of kiyot. The bytes decide how
/// cell, link and kubelet behave. The files in order must be the cell's log. Without failures each
/// file must end with a line end, so that a reader of the files reads each line once.
///
/// # Panics
/// If a property does not hold.
pub fn log(new_runtime: &dyn Fn() -> Runtime, dir: &Path, bytes: &[u8]) {
    let (Ok(cell), Ok(container)) =
        (CellId::parse("cell-aaaaaaaaaaaa"), ContainerId::parse(&format!("milpa{:a<59}", "")))
    else {
        return;
    };
    let Some((&part, mut rest)) = bytes.split_first() else { return };
    let fake = Arc::new(FakeLog {
        log: Mutex::default(),
        part: usize::from(part).max(1),
        faults: Mutex::default(),
    });
    let (runtime, logs, path) = (new_runtime(), Logs::new(), dir.join("0.log"));
    let mut node = Scene {
        new_runtime,
        runtime,
        logs,
        fake,
        cell,
        container,
        path,
        base: 0,
        rotated: Vec::new(),
        faulty: false,
        overstated: false,
    };
    node.follow();
    for _ in 0..MAX_STEPS {
        let Some((&kind, after)) = rest.split_first() else { break };
        rest = after;
        node.step(kind, &mut rest);
    }
    node.fake.faults().clear();
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
    assert_eq!(String::from_utf8_lossy(&all), String::from_utf8_lossy(&node.fake.log()));
}

fn read(path: &Path) -> Vec<u8> {
    fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn rename(from: &Path, to: &Path) {
    fs::rename(from, to).unwrap_or_else(|error| panic!("{}: {error}", from.display()));
}
