//! Pods as a kubelet would be told of them, made from their shapes.

use std::{collections::BTreeMap, path::PathBuf};

use kiyot_testkit::{Container, Pod, Source, cri};

use crate::plan::{ContainerShape, HostAccess, Life, Place, VolumeKind, VolumeShape, Work};

/// An image in a registry to which every connection is refused at once.
const NO_IMAGE: &str = "127.0.0.1:1/absent:1";
/// The port of a container that ports of the node lead to; the next ones follow.
const CONTAINER_PORT: i32 = 8080;
/// Counts until SIGTERM.
const COUNTS: &str =
    "trap 'exit 0' TERM; i=0; while :; do i=$((i+1)); echo line $i; sleep 0.5; done";
/// Does nothing until SIGTERM.
const WAITS: &str = "trap 'exit 0' TERM; while :; do sleep 0.5; done";

/// The name of a volume.
pub(crate) fn volume_name(index: usize) -> String {
    format!("volume-{index}")
}

/// The path of a volume in each container.
pub(crate) fn volume_path(index: usize) -> String {
    format!("/v/{index}")
}

/// The name of a container.
pub(crate) fn container_name(index: usize) -> String {
    format!("main-{index}")
}

/// The name of an init container.
pub(crate) fn init_name(index: usize) -> String {
    format!("init-{index}")
}

/// A word in the command line of the first process of each container of this name.
pub(crate) fn mark(uid: &str, name: &str) -> String {
    format!("{MARK}{uid}:{name}")
}

/// The beginning of every [`mark`].
pub(crate) const MARK: &str = "soak:";

/// The files of a volume that the kubelet writes: two that say their version, so that half a
/// version would be seen.
pub(crate) fn files(shape: VolumeShape, version: u32) -> BTreeMap<String, Vec<u8>> {
    let text = format!("{version}\n").into_bytes();
    BTreeMap::from([
        ("a-version".to_owned(), text.clone()),
        ("padding".to_owned(), vec![b'x'; shape.padding]),
        ("z-version".to_owned(), text),
    ])
}

/// A program that says the version of a volume twice.
pub(crate) fn asks_version(index: usize) -> String {
    format!("cd -P {}/..data && cat a-version z-version", volume_path(index))
}

/// The pod of a life.
pub(crate) fn pod(life: &Life) -> Pod {
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

/// An init container of a pod.
pub(crate) fn init(life: &Life, index: usize, uid: &str) -> Container {
    container(life, life.init[index], &init_name(index), uid)
}

/// A container of a pod.
pub(crate) fn main(life: &Life, index: usize, uid: &str) -> Container {
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

fn container(life: &Life, shape: ContainerShape, name: &str, uid: &str) -> Container {
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
            "i=0; while [ $i -lt {lines} ]; do i=$((i+1)); echo line $i; sleep 0.2; done; exit {code}"
        ),
        Work::Floods { lines } => {
            format!("i=0; while [ $i -lt {lines} ]; do i=$((i+1)); echo line $i; done; {WAITS}")
        }
        Work::LongLine { kib } => {
            format!("head -c {kib}k /dev/zero | tr '\\0' x; echo; {COUNTS}")
        }
        // 50 levels a program: `mkdir` is not one of the shell's own.
        Work::Deep { levels } => format!(
            "( cd {at}; p=d; while [ ${{#p}} -lt 99 ]; do p=$p/d; done; n=0; \
             while [ $n -lt {levels} ]; do mkdir -p $p && cd -P $p || break; n=$((n+50)); done ) 2> /dev/null; {COUNTS}"
        ),
        Work::Files { files } => format!(
            "i=0; while [ $i -lt {files} ]; do i=$((i+1)); : > {at}/file-$i; done; {COUNTS}"
        ),
        Work::Children { children } => {
            format!("i=0; while [ $i -lt {children} ]; do i=$((i+1)); sleep 1000 & done; {COUNTS}")
        }
    }
}
