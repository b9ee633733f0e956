//! Pod specs, built from their shapes.

use std::{collections::BTreeMap, path::PathBuf};

use kiyot_testkit::{Container, Pod, Source, cri};

use crate::plan::{ContainerShape, HostAccess, Lifecycle, Place, VolumeKind, VolumeShape, Work};

/// An image of a registry that refuses every connection.
const NO_IMAGE: &str = "127.0.0.1:1/absent:1";
/// The first container port to which host ports lead.
const CONTAINER_PORT: i32 = 8080;
/// A script that counts until SIGTERM.
const COUNTS: &str =
    "trap 'exit 0' TERM; i=0; while :; do i=$((i+1)); echo line $i; sleep 0.5; done";
/// A script that waits until SIGTERM.
const WAITS: &str = "trap 'exit 0' TERM; while :; do sleep 0.5; done";

pub(crate) fn volume_name(index: usize) -> String {
    format!("volume-{index}")
}

/// Returns the path of a volume in each container.
pub(crate) fn volume_path(index: usize) -> String {
    format!("/v/{index}")
}

pub(crate) fn container_name(index: usize) -> String {
    format!("main-{index}")
}

pub(crate) fn init_name(index: usize) -> String {
    format!("init-{index}")
}

/// Returns the word on the command line that marks the first process of a container.
pub(crate) fn mark(uid: &str, name: &str) -> String {
    format!("{MARK}{uid}:{name}")
}

/// The prefix of every [`mark`].
pub(crate) const MARK: &str = "soak:";

/// Returns the files that the kubelet writes to a volume. Two files have the version: a torn update
/// is visible.
pub(crate) fn files(shape: VolumeShape, version: u32) -> BTreeMap<String, Vec<u8>> {
    let text = format!("{version}\n").into_bytes();
    BTreeMap::from([
        ("a-version".to_owned(), text.clone()),
        ("padding".to_owned(), vec![b'x'; shape.padding]),
        ("z-version".to_owned(), text),
    ])
}

/// Returns a script that prints both versions of a volume.
pub(crate) fn version_script(index: usize) -> String {
    format!("cd -P {}/..data && cat a-version z-version", volume_path(index))
}

pub(crate) fn pod(life: &Lifecycle) -> Pod {
    let mut pod = Pod::new(&format!("soak-{}-{}", life.caller, life.number));
    match life.place {
        Place::Node => {}
        Place::CellByAnnotation => pod = pod.in_cell(),
        Place::CellByHandler => pod.runtime_handler = "kiyot".to_owned(),
    }
    pod.grace = life.grace;
    pod.host_network = life.access == HostAccess::Network;
    pod.host_pid = life.access == HostAccess::Pid;
    pod.ports = (0i32..)
        .zip(&life.ports)
        .flat_map(|(index, port)| {
            [cri::Protocol::Tcp, cri::Protocol::Udp].map(|protocol| cri::PortMapping {
                protocol: protocol.into(),
                host_port: i32::from(*port),
                container_port: CONTAINER_PORT + index,
                host_ip: String::new(),
            })
        })
        .collect();
    for (index, volume) in life.volumes.iter().enumerate() {
        pod = pod.volume(&volume_name(index), source(*volume));
    }
    if life.access == HostAccess::Path {
        pod = pod.volume("host", Source::HostPath(PathBuf::from("/etc")));
    }
    pod
}

pub(crate) fn init(life: &Lifecycle, index: usize, uid: &str) -> Container {
    container(life, life.init[index], &init_name(index), uid)
}

pub(crate) fn main(life: &Lifecycle, index: usize, uid: &str) -> Container {
    container(life, life.containers[index], &container_name(index), uid)
}

fn source(shape: VolumeShape) -> Source {
    let files = files(shape, 0);
    match shape.kind {
        VolumeKind::ConfigMap => Source::ConfigMap(files),
        VolumeKind::Secret => Source::Secret(files),
        VolumeKind::Projected => Source::Projected(files),
        VolumeKind::DownwardApi => Source::DownwardApi(files),
        VolumeKind::Disk => Source::EmptyDir { memory: false },
        VolumeKind::Memory => Source::EmptyDir { memory: true },
    }
}

fn container(life: &Lifecycle, shape: ContainerShape, name: &str, uid: &str) -> Container {
    let at = shape.volume.map_or_else(|| "/tmp".to_owned(), volume_path);
    let mut container = Container::script(name, &script(shape.work, &at));
    container.command.push(mark(uid, name));
    container.tty = shape.tty;
    container.privileged = life.access == HostAccess::Privileged;
    match shape.work {
        Work::NoProgram => container.command = vec!["/no/such/program".to_owned()],
        Work::NoImage => container.image = NO_IMAGE.to_owned(),
        _ => {}
    }
    for index in 0..life.volumes.len() {
        container = container.mount(&volume_name(index), &volume_path(index));
    }
    if life.access == HostAccess::Path {
        container = container.mount("host", "/host");
    }
    container
}

fn script(work: Work, at: &str) -> String {
    match work {
        Work::Counts | Work::NoProgram | Work::NoImage => COUNTS.to_owned(),
        Work::Stubborn => COUNTS.replacen("'exit 0'", "''", 1),
        Work::Exits { lines, code } => format!(
            "i=0; while [ $i -lt {lines} ]; do i=$((i+1)); echo line $i; sleep 0.2; done; \
             exit {code}"
        ),
        Work::Floods { lines } => {
            format!("i=0; while [ $i -lt {lines} ]; do i=$((i+1)); echo line $i; done; {WAITS}")
        }
        Work::LongLine { kib } => {
            format!("head -c {kib}k /dev/zero | tr '\\0' x; echo; {COUNTS}")
        }
        // Each process creates 50 levels: `mkdir` is not a builtin of the shell.
        Work::Deep { levels } => format!(
            "( cd {at}; p=d; while [ ${{#p}} -lt 99 ]; do p=$p/d; done; n=0; \
             while [ $n -lt {levels} ]; do mkdir -p $p && cd -P $p || break; \
             n=$((n+50)); done ) 2> /dev/null; {COUNTS}"
        ),
        Work::Files { files } => format!(
            "i=0; while [ $i -lt {files} ]; do i=$((i+1)); : > {at}/file-$i; done; {COUNTS}"
        ),
        Work::Children { children } => {
            format!("i=0; while [ $i -lt {children} ]; do i=$((i+1)); sleep 1000 & done; {COUNTS}")
        }
    }
}
