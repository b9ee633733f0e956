//! The plan of a soak: shapes of pods, their steps, and the kills, derived from a seed. It is pure,
//! without clock and socket. Each part is computed from its number: the plan is endless and needs
//! no memory.

use std::time::Duration;

use kiyot_testkit::SeededRng;

#[cfg(test)]
mod tests;

/// The number of concurrent callers. Each has one pod at a time.
pub(crate) const CALLERS: usize = 4;
/// The maximal number of containers of a pod, without init containers.
pub(crate) const MAX_CONTAINERS: usize = 3;
pub(crate) const MAX_INIT: usize = 2;
pub(crate) const MAX_VOLUMES: usize = 4;
/// The maximal number of steps between a pod's start and its removal.
pub(crate) const MAX_STEPS: usize = 6;
/// The longest grace period of a stop, in seconds.
pub(crate) const MAX_GRACE_SECONDS: i64 = 4;
/// The maximal depth of a container's directory tree.
pub(crate) const MAX_DEPTH: u32 = 20_000;
/// The maximal number of files that a container creates in a directory.
pub(crate) const MAX_FILES: u32 = 2_000;
/// The maximal number of lines that a container writes at once.
pub(crate) const MAX_FLOOD_LINES: u32 = 20_000;
/// The longest line of a container, in KiB.
pub(crate) const MAX_LINE_KIB: u32 = 64;
/// The maximal number of children of a container's process.
pub(crate) const MAX_CHILDREN: u32 = 30;
/// The first host port; each caller owns the next [`PORTS_PER_CALLER`].
pub(crate) const FIRST_PORT: u16 = 20_000;
pub(crate) const PORTS_PER_CALLER: u16 = 100;
/// The longest time between two kills.
pub(crate) const MAX_KILL_PAUSE: Duration = Duration::from_secs(2);
/// The number of kills in the first phase. Each phase is twice as long as the previous, up to
/// [`MAX_PHASE`]. In every other phase the daemon is not killed, so that leaks add up.
const FIRST_PHASE: u64 = 16;
/// The maximal number of kills in a phase.
const MAX_PHASE: u64 = 512;

/// The plan of a seed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Plan {
    seed: u64,
}

/// The backend of a pod, with the field of the pod that selects it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// The node, by default.
    Node,
    /// A cell, by the pod's annotation.
    CellByAnnotation,
    /// A cell, by the runtime class.
    CellByHandler,
}

impl Place {
    pub(crate) fn is_cell(self) -> bool {
        self != Self::Node
    }
}

/// Host access that a pod requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HostAccess {
    /// No host access.
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
    /// Returns whether the kubelet writes files to the volume.
    pub(crate) fn is_written(self) -> bool {
        !matches!(self, Self::Disk | Self::Memory)
    }
}

/// The shape of a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct VolumeShape {
    pub(crate) kind: VolumeKind,
    /// The number of bytes that the kubelet writes beside the version.
    pub(crate) padding: usize,
}

/// The program of a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Work {
    /// Counts until SIGTERM, and exits with 0.
    Counts,
    /// Counts, and ignores SIGTERM.
    Stubborn,
    /// Counts to a number and exits with a code.
    Exits { lines: u32, code: i32 },
    /// Writes many lines at once.
    Floods { lines: u32 },
    /// Writes one long line.
    LongLine { kib: u32 },
    /// Creates a deep directory tree.
    Deep { levels: u32 },
    /// Creates many small files.
    Files { files: u32 },
    /// Starts children and does not wait for them.
    Children { children: u32 },
    /// Names an absent program.
    NoProgram,
    /// Names an image that can't be pulled.
    NoImage,
}

impl Work {
    /// Returns whether the program runs until it is stopped.
    pub(crate) fn runs_until_stopped(self) -> bool {
        !matches!(self, Self::Exits { .. } | Self::NoProgram | Self::NoImage)
    }
}

/// The shape of a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ContainerShape {
    pub(crate) work: Work,
    /// The volume in which the program creates its trees and files: an index, or the writable
    /// layer.
    pub(crate) volume: Option<usize>,
    /// Has a terminal on the standard streams.
    pub(crate) tty: bool,
}

/// A step of a running pod. Containers and volumes are indices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// An exec probe, with its exit code.
    Probe { container: usize, code: i32 },
    /// Stops a container and starts its next attempt.
    Restart { container: usize, grace: i64 },
    /// Updates a volume.
    Update { volume: usize },
    /// Reads the log.
    Logs { container: usize },
    /// Reads the lists, statuses and statistics.
    Look,
    /// Restarts the kubelet, which then sends another `config.seen`.
    KubeletRestarts,
    /// Connects to a host port.
    Connect,
}

/// The way in which a pod is removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Removal {
    /// Stops the containers and then the sandbox, and removes each.
    InOrder,
    /// Stops and removes the sandbox together with its containers.
    AtOnce,
    /// Stops the sandbox by two concurrent calls.
    Twice,
}

/// The plan of a pod from its creation to its removal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Lifecycle {
    pub(crate) caller: usize,
    pub(crate) number: u64,
    pub(crate) place: Place,
    pub(crate) access: HostAccess,
    pub(crate) volumes: Vec<VolumeShape>,
    pub(crate) init: Vec<ContainerShape>,
    pub(crate) containers: Vec<ContainerShape>,
    pub(crate) ports: Vec<u16>,
    /// The grace period, in seconds.
    pub(crate) grace: i64,
    pub(crate) steps: Vec<Step>,
    pub(crate) end: Removal,
}

impl Lifecycle {
    pub(crate) fn is_refused(&self) -> bool {
        self.place.is_cell() && self.access != HostAccess::No
    }
}

/// The process to kill.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Target {
    Daemon,
    Agent,
    CellContainerd,
    Cell,
    NodeContainerd,
}

impl Target {
    pub(crate) const ALL: [Self; 5] =
        [Self::Daemon, Self::Agent, Self::CellContainerd, Self::Cell, Self::NodeContainerd];
}

/// A kill of the plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Kill {
    /// The time since the previous kill.
    pub(crate) after: Duration,
    pub(crate) victim: Target,
    /// The index of the cell, modulo the number of cells.
    pub(crate) cell: usize,
}

impl Plan {
    pub(crate) fn of(seed: u64) -> Self {
        Self { seed }
    }

    fn rng(self, of: u64, number: u64) -> SeededRng {
        let mut rng = SeededRng::of(self.seed);
        let salt = rng.next(1 << 50);
        let mut rng = SeededRng::of(salt ^ SeededRng::of(of).next(1 << 50));
        SeededRng::of(rng.next(1 << 50).wrapping_add(number))
    }

    /// Returns a pod of a caller by its number, counted from 0.
    pub(crate) fn life(self, caller: usize, number: u64) -> Lifecycle {
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
        let grace = rng.next(u64::try_from(MAX_GRACE_SECONDS).unwrap_or(0) + 1);
        let end = rng.pick(&[Removal::InOrder, Removal::InOrder, Removal::AtOnce, Removal::Twice]);
        Lifecycle {
            caller,
            number,
            place,
            access,
            volumes,
            init,
            containers,
            ports,
            grace: i64::try_from(grace).unwrap_or(MAX_GRACE_SECONDS),
            steps,
            end,
        }
    }

    /// Returns a pod for which every call must succeed, because no process is killed any more.
    pub(crate) fn undisturbed_pod(self, caller: usize, place: Place) -> Lifecycle {
        let counts = ContainerShape { work: Work::Counts, volume: None, tty: false };
        let number = u64::MAX - u64::from(place.is_cell());
        Lifecycle {
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
            grace: MAX_GRACE_SECONDS,
            steps: vec![
                Step::Probe { container: 0, code: 0 },
                Step::Probe { container: 1, code: 7 },
                Step::Update { volume: 0 },
                Step::Restart { container: 1, grace: 1 },
                Step::Look,
                Step::Logs { container: 0 },
            ],
            end: Removal::InOrder,
        }
    }

    /// Returns a kill by its number, counted from 0.
    pub(crate) fn kill(self, number: u64) -> Kill {
        let mut rng = self.rng(0, number);
        let after =
            Duration::from_micros(rng.next(u64::try_from(MAX_KILL_PAUSE.as_micros()).unwrap_or(1)));
        let all: &[Target] = if spares_daemon(number) { &Target::ALL[1..] } else { &Target::ALL };
        let victim = rng.pick(all);
        Kill { after, victim, cell: usize::try_from(rng.next(1 << 30)).unwrap_or(0) }
    }
}

fn phase(kill: u64) -> u64 {
    let (mut phase, mut length, mut begin) = (0, FIRST_PHASE, 0);
    while begin + length <= kill {
        begin += length;
        length = (length * 2).min(MAX_PHASE);
        phase += 1;
    }
    phase
}

/// Returns whether the phase of this kill does not kill the daemon.
pub(crate) fn spares_daemon(kill: u64) -> bool {
    phase(kill) % 2 == 1
}

fn access(rng: &mut SeededRng, place: Place) -> HostAccess {
    match (place.is_cell(), rng.next(8)) {
        (true, 0) => rng.pick(&[
            HostAccess::Network,
            HostAccess::Pid,
            HostAccess::Path,
            HostAccess::Privileged,
        ]),
        // Two attempts in the node's PID namespace could not be distinguished: hostPID is left out.
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
        3 => Work::Floods { lines: 1 + number_of(rng, MAX_FLOOD_LINES) },
        4 => Work::LongLine { kib: 1 + number_of(rng, MAX_LINE_KIB) },
        5 => Work::Deep { levels: 1 + number_of(rng, MAX_DEPTH) },
        6 => Work::Files { files: 1 + number_of(rng, MAX_FILES) },
        7 => Work::Children { children: 1 + number_of(rng, MAX_CHILDREN) },
        8 => rng.pick(&[Work::NoProgram, Work::NoImage]),
        _ => Work::Counts,
    };
    let own: Vec<usize> =
        (0..volumes.len()).filter(|index| !volumes[*index].kind.is_written()).collect();
    let volume = (!own.is_empty() && rng.one_in(2)).then(|| rng.pick(&own));
    // A terminal ends lines with "\r\n": these lines are not counted.
    ContainerShape { work, volume, tty: rng.one_in(10) }
}

fn ports_from(caller: usize, many: u16) -> Vec<u16> {
    let caller = u16::try_from(caller).unwrap_or(0);
    (0..many).map(|number| FIRST_PORT + caller * PORTS_PER_CALLER + number).collect()
}

fn ports(rng: &mut SeededRng, caller: usize, access: HostAccess) -> Vec<u16> {
    match rng.next(4) {
        // A pod in the node's network has its ports without a mapping.
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
