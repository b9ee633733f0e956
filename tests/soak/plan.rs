//! The plan of a soak: shapes of pods, what happens to them, and moments of kills, all decided by a
//! seed. Pure: no clock, no socket. Any part of it can be made by itself, so that a plan has no end
//! and takes no memory.

use std::time::Duration;

use kiyot_testkit::SeededRng;

#[cfg(test)]
mod tests;

/// Callers that lead pods at once, each one pod at a time.
pub(crate) const CALLERS: usize = 4;
/// The most containers of a pod beside its init containers.
pub(crate) const MAX_CONTAINERS: usize = 3;
/// The most init containers of a pod.
pub(crate) const MAX_INIT: usize = 2;
/// The most volumes of a pod.
pub(crate) const MAX_VOLUMES: usize = 4;
/// The most steps of a pod's life between its start and its end.
pub(crate) const MAX_STEPS: usize = 6;
/// The longest grace period of a stop, in seconds.
pub(crate) const MAX_GRACE: i64 = 4;
/// The deepest tree that a container makes, in directories.
pub(crate) const MAX_DEPTH: u32 = 20_000;
/// The most files that a container makes, beside a deep tree.
pub(crate) const MAX_FILES: u32 = 2_000;
/// The most lines that a container writes at once.
pub(crate) const MAX_FLOOD: u32 = 20_000;
/// The longest line that a container writes, in KiB.
pub(crate) const MAX_LINE: u32 = 64;
/// The most children of a container's process.
pub(crate) const MAX_CHILDREN: u32 = 30;
/// The first port of the node that pods ask for; each caller has [`PORTS_OF_A_CALLER`] from there.
pub(crate) const FIRST_PORT: u16 = 20_000;
/// Ports of the node that one caller's pods ask for.
pub(crate) const PORTS_OF_A_CALLER: u16 = 100;
/// The longest time between two kills.
pub(crate) const MAX_CALM: Duration = Duration::from_secs(2);
/// Kills of the first season; each season is twice as long as the one before, up to
/// [`MAX_SEASON`]. In every other season the daemon is spared, so that what it leaks adds up.
const FIRST_SEASON: u64 = 16;
/// The most kills of a season.
const MAX_SEASON: u64 = 512;

/// The whole plan.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Plan {
    seed: u64,
}

/// A pod's backend, and how its pod says so.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// The node, as nothing says otherwise.
    Node,
    /// A cell, by the pod's annotation.
    CellByAnnotation,
    /// A cell, by the handler of the runtime class.
    CellByHandler,
}

impl Place {
    /// Is it a cell?
    pub(crate) fn is_cell(self) -> bool {
        self != Self::Node
    }
}

/// Host access that a pod requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HostAccess {
    /// No access.
    No,
    /// hostNetwork.
    Network,
    /// hostPID.
    Pid,
    /// A hostPath volume.
    Path,
    /// A privileged container.
    Privileged,
}

/// The kind of a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum VolumeKind {
    ConfigMap,
    Secret,
    Projected,
    DownwardApi,
    Disk,
    Memory,
}

impl VolumeKind {
    /// Are its files the kubelet's to write?
    pub(crate) fn is_written(self) -> bool {
        !matches!(self, Self::Disk | Self::Memory)
    }
}

/// A volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct VolumeShape {
    pub(crate) kind: VolumeKind,
    /// Bytes beside its version, for what is written.
    pub(crate) padding: usize,
}

/// The work of a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Work {
    /// Counts until it is told to stop, and exits with 0.
    Counts,
    /// Counts, and does not hear SIGTERM.
    Stubborn,
    /// Counts to a number and exits with a code.
    Exits { lines: u32, code: i32 },
    /// Writes many lines at once.
    Floods { lines: u32 },
    /// Writes one long line.
    LongLine { kib: u32 },
    /// Makes a deep tree of directories.
    Deep { levels: u32 },
    /// Makes many small files.
    Files { files: u32 },
    /// Starts children that outlive their parent's interest.
    Children { children: u32 },
    /// Names a program that is not there.
    NoProgram,
    /// Names an image that can't be pulled.
    NoImage,
}

impl Work {
    /// Does it run until it is stopped?
    pub(crate) fn stays(self) -> bool {
        !matches!(self, Self::Exits { .. } | Self::NoProgram | Self::NoImage)
    }
}

/// A container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ContainerShape {
    pub(crate) work: Work,
    /// Index of the volume where it makes its trees and files; else its own layer.
    pub(crate) volume: Option<usize>,
    /// Its standard streams are a terminal.
    pub(crate) tty: bool,
}

/// An event in the life of a running pod. Containers and volumes are meant by their index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// A probe by exec, with the exit code that its program has.
    Probe { container: usize, code: i32 },
    /// The container is stopped and its next attempt made.
    Restart { container: usize, grace: i64 },
    /// A volume is written anew.
    Update { volume: usize },
    /// The log is read.
    Logs { container: usize },
    /// All is listed and asked for its status, and its statistics.
    Look,
    /// The kubelet is started again, and writes another `config.seen`.
    KubeletRestarts,
    /// A port of the node is connected to.
    Connect,
}

/// The end of a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    /// Containers are stopped in order, then the sandbox; then each is removed.
    InOrder,
    /// The sandbox is stopped and removed with all that is in it.
    AtOnce,
    /// Two callers stop it at the same time.
    Twice,
}

/// The plan of a pod's whole life.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Life {
    pub(crate) caller: usize,
    pub(crate) number: u64,
    pub(crate) place: Place,
    pub(crate) access: HostAccess,
    pub(crate) volumes: Vec<VolumeShape>,
    pub(crate) init: Vec<ContainerShape>,
    pub(crate) containers: Vec<ContainerShape>,
    /// Ports of the node.
    pub(crate) ports: Vec<u16>,
    /// Seconds.
    pub(crate) grace: i64,
    pub(crate) steps: Vec<Step>,
    pub(crate) end: End,
}

impl Life {
    /// Must the pod be refused?
    pub(crate) fn is_refused(&self) -> bool {
        self.place.is_cell() && self.access != HostAccess::No
    }
}

/// The process that is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Victim {
    Daemon,
    Agent,
    CellContainerd,
    Cell,
    NodeContainerd,
}

impl Victim {
    pub(crate) const ALL: [Self; 5] =
        [Self::Daemon, Self::Agent, Self::CellContainerd, Self::Cell, Self::NodeContainerd];
}

/// A kill.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Strike {
    /// The time since the one before.
    pub(crate) after: Duration,
    pub(crate) victim: Victim,
    /// The number of the cell, modulo those that are there.
    pub(crate) cell: usize,
}

impl Plan {
    /// The plan of a seed.
    pub(crate) fn of(seed: u64) -> Self {
        Self { seed }
    }

    fn rng(self, of: u64, number: u64) -> SeededRng {
        let mut rng = SeededRng::of(self.seed);
        let salt = rng.next(1 << 50);
        let mut rng = SeededRng::of(salt ^ SeededRng::of(of).next(1 << 50));
        SeededRng::of(rng.next(1 << 50).wrapping_add(number))
    }

    /// Returns a life of a caller's, from 0.
    pub(crate) fn life(self, caller: usize, number: u64) -> Life {
        let mut rng = self.rng(caller as u64 + 1, number);
        let place = rng.pick(&[
            Place::Node,
            Place::Node,
            Place::CellByAnnotation,
            Place::CellByAnnotation,
            Place::CellByAnnotation,
            Place::CellByHandler,
        ]);
        let access = access(&mut rng, place);
        let volumes: Vec<_> =
            (0..rng.next(MAX_VOLUMES as u64 + 1)).map(|_| volume(&mut rng)).collect();
        let init = (0..if rng.one_in(3) { 1 + rng.next(MAX_INIT as u64) } else { 0 })
            .map(|_| ContainerShape {
                work: Work::Exits { lines: 1 + number_of(&mut rng, 3), code: 0 },
                volume: None,
                tty: false,
            })
            .collect();
        let containers: Vec<_> = (0..1 + rng.next(MAX_CONTAINERS as u64))
            .map(|_| container(&mut rng, &volumes))
            .collect();
        let ports = ports(&mut rng, caller, access);
        let steps = (0..rng.next(MAX_STEPS as u64 + 1))
            .map(|_| step(&mut rng, &containers, &volumes))
            .collect();
        let grace = rng.next(u64::try_from(MAX_GRACE).unwrap_or(0) + 1);
        let end = rng.pick(&[End::InOrder, End::InOrder, End::AtOnce, End::Twice]);
        Life {
            caller,
            number,
            place,
            access,
            volumes,
            init,
            containers,
            ports,
            grace: i64::try_from(grace).unwrap_or(MAX_GRACE),
            steps,
            end,
        }
    }

    /// Returns a life in which everything must work, as nothing is killed any more.
    pub(crate) fn calm_life(self, caller: usize, place: Place) -> Life {
        let counts = ContainerShape { work: Work::Counts, volume: None, tty: false };
        let number = u64::MAX - u64::from(place.is_cell());
        Life {
            caller,
            number,
            place,
            access: HostAccess::No,
            volumes: vec![
                VolumeShape { kind: VolumeKind::ConfigMap, padding: 100 },
                VolumeShape { kind: VolumeKind::Memory, padding: 0 },
            ],
            init: vec![ContainerShape { work: Work::Exits { lines: 1, code: 0 }, ..counts }],
            containers: vec![counts, counts],
            ports: ports_from(caller, 1),
            grace: MAX_GRACE,
            steps: vec![
                Step::Probe { container: 0, code: 0 },
                Step::Probe { container: 1, code: 7 },
                Step::Update { volume: 0 },
                Step::Restart { container: 1, grace: 1 },
                Step::Look,
                Step::Logs { container: 0 },
            ],
            end: End::InOrder,
        }
    }

    /// Returns a kill, from 0.
    pub(crate) fn strike(self, number: u64) -> Strike {
        let mut rng = self.rng(0, number);
        let after =
            Duration::from_micros(rng.next(u64::try_from(MAX_CALM.as_micros()).unwrap_or(1)));
        let all: &[Victim] =
            if spares_the_daemon(number) { &Victim::ALL[1..] } else { &Victim::ALL };
        let victim = rng.pick(all);
        Strike { after, victim, cell: usize::try_from(rng.next(1 << 30)).unwrap_or(0) }
    }
}

/// Returns the season of a kill.
fn season(strike: u64) -> u64 {
    let (mut season, mut length, mut begin) = (0, FIRST_SEASON, 0);
    while begin + length <= strike {
        begin += length;
        length = (length * 2).min(MAX_SEASON);
        season += 1;
    }
    season
}

/// Decides that the daemon is not killed in this season.
pub(crate) fn spares_the_daemon(strike: u64) -> bool {
    season(strike) % 2 == 1
}

fn access(rng: &mut SeededRng, place: Place) -> HostAccess {
    match (place.is_cell(), rng.next(8)) {
        (true, 0) => rng.pick(&[
            HostAccess::Network,
            HostAccess::Pid,
            HostAccess::Path,
            HostAccess::Privileged,
        ]),
        // In the PID namespace of the node, two attempts could not be told apart.
        (false, 0) => HostAccess::Network,
        _ => HostAccess::No,
    }
}

fn number_of(rng: &mut SeededRng, below: u32) -> u32 {
    u32::try_from(rng.next(u64::from(below))).unwrap_or(0)
}

fn volume(rng: &mut SeededRng) -> VolumeShape {
    let kind = rng.pick(&[
        VolumeKind::ConfigMap,
        VolumeKind::Secret,
        VolumeKind::Projected,
        VolumeKind::DownwardApi,
        VolumeKind::Disk,
        VolumeKind::Memory,
    ]);
    let padding = rng.pick(&[0, 1, 1000, 100_000]);
    VolumeShape { kind, padding }
}

fn container(rng: &mut SeededRng, volumes: &[VolumeShape]) -> ContainerShape {
    let work = match rng.next(16) {
        0 | 1 => Work::Stubborn,
        2 => Work::Exits {
            lines: number_of(rng, 5),
            code: 1 + i32::try_from(rng.next(100)).unwrap_or(0),
        },
        3 => Work::Floods { lines: 1 + number_of(rng, MAX_FLOOD) },
        4 => Work::LongLine { kib: 1 + number_of(rng, MAX_LINE) },
        5 => Work::Deep { levels: 1 + number_of(rng, MAX_DEPTH) },
        6 => Work::Files { files: 1 + number_of(rng, MAX_FILES) },
        7 => Work::Children { children: 1 + number_of(rng, MAX_CHILDREN) },
        8 => rng.pick(&[Work::NoProgram, Work::NoImage]),
        _ => Work::Counts,
    };
    let own: Vec<usize> =
        (0..volumes.len()).filter(|index| !volumes[*index].kind.is_written()).collect();
    let volume = (!own.is_empty() && rng.one_in(2)).then(|| rng.pick(&own));
    // Lines through a terminal end in "\r\n"; where there is one, no line is counted.
    ContainerShape { work, volume, tty: rng.one_in(10) }
}

fn ports_from(caller: usize, many: u16) -> Vec<u16> {
    let caller = u16::try_from(caller).unwrap_or(0);
    (0..many).map(|number| FIRST_PORT + caller * PORTS_OF_A_CALLER + number).collect()
}

fn ports(rng: &mut SeededRng, caller: usize, access: HostAccess) -> Vec<u16> {
    match rng.next(4) {
        // On the node's network a port of the pod is the node's anyway.
        _ if access == HostAccess::Network => Vec::new(),
        0 => ports_from(caller, 1 + u16::try_from(rng.next(3)).unwrap_or(0)),
        _ => Vec::new(),
    }
}

fn step(rng: &mut SeededRng, containers: &[ContainerShape], volumes: &[VolumeShape]) -> Step {
    let container = usize::try_from(rng.next(containers.len() as u64)).unwrap_or(0);
    let written: Vec<usize> =
        (0..volumes.len()).filter(|index| volumes[*index].kind.is_written()).collect();
    match rng.next(10) {
        0..=2 => Step::Probe { container, code: rng.pick(&[0, 0, 7, 100]) },
        3 | 4 => Step::Restart { container, grace: i64::try_from(rng.next(3)).unwrap_or(0) },
        5 | 6 if !written.is_empty() => Step::Update { volume: rng.pick(&written) },
        7 => Step::KubeletRestarts,
        8 => Step::Connect,
        9 => Step::Look,
        _ => Step::Logs { container },
    }
}
