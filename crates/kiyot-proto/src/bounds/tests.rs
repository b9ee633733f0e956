use std::process::Command;

use bytes::Bytes;
use proptest::prelude::*;
use prost::Message;

use super::*;
use crate::{cell, cri};

include!(concat!(env!("OUT_DIR"), "/each.rs"));

/// The environment variable with name and file of the message for a child process to decode.
const CHILD_MESSAGE: &str = "KIYOT_TEST_MESSAGE";
/// The process's memory beside a message, in KiB: two partly used huge pages, and the allocator's
/// caches.
const SLACK_KIB: usize = 5 << 10;

/// Encodes a length-delimited field.
fn field(number: u32, content: &[u8]) -> Vec<u8> {
    let mut field = Vec::new();
    prost::encoding::encode_key(number, prost::encoding::WireType::LengthDelimited, &mut field);
    prost::encoding::encode_varint(content.len() as u64, &mut field);
    field.extend_from_slice(content);
    field
}

/// A function that makes a message of at most the given number of bytes.
type Maker = Box<dyn Fn(usize) -> Vec<u8>>;

/// Returns a maker that repeats an entry.
fn repeated(entry: Vec<u8>) -> Maker {
    Box::new(move |length| entry.repeat(length / entry.len()))
}

/// Returns a maker for each field that allocates, at any depth. Its messages have only this field.
fn makers(shape: &'static Shape) -> Vec<Maker> {
    // Key and length of a field have at most 7 bytes.
    let around = |number: u32, maker: Maker| -> Maker {
        Box::new(move |length| field(number, &maker(length.saturating_sub(7))))
    };
    let mut all: Vec<Maker> = Vec::new();
    for (number, kind) in shape.fields {
        let number = *number;
        match kind {
            Field::Text => all.push(around(number, Box::new(|length| vec![b'x'; length]))),
            Field::Texts => all.push(repeated(field(number, b""))),
            // Equal keys would share a map entry.
            Field::Map => all.push(Box::new(move |length| {
                let entry = |key: u32| {
                    let digits: Vec<_> = (0..4).map(|at| (key >> (7 * at)) as u8 & 0x7f).collect();
                    field(number, &field(1, &digits))
                };
                let keys = u32::try_from(length / entry(0).len()).unwrap();
                (0..keys).flat_map(entry).collect()
            })),
            Field::Numbers => {
                all.push(around(number, Box::new(|length| vec![1; length])));
                let mut one = Vec::new();
                prost::encoding::encode_key(number, prost::encoding::WireType::Varint, &mut one);
                one.push(1);
                all.push(repeated(one));
            }
            Field::Message(part) => {
                all.extend(makers(part).into_iter().map(|maker| around(number, maker)));
            }
            Field::Messages(part) => {
                all.push(repeated(field(number, b"")));
                for maker in makers(part) {
                    all.push(repeated(field(number, &maker(16))));
                    all.push(around(number, maker));
                }
            }
        }
    }
    all
}

/// Returns the allowed message of a type that needs the most memory, within a few percent. The
/// maker with the most memory per byte makes it.
fn worst<M: Bounded + Default>() -> Option<Vec<u8>> {
    const SAMPLE: usize = 1024;
    let weight = |message: &[u8]| {
        let unbounded = Shape { encoded: usize::MAX, decoded: usize::MAX, ..M::SHAPE };
        unbounded.check(message).unwrap_or_default() * SAMPLE / message.len().max(1)
    };
    let maker =
        makers(const { &M::SHAPE }).into_iter().max_by_key(|maker| weight(&maker(SAMPLE)))?;
    // The memory grows with the length. A long message is made only a few times.
    let fitting = M::SHAPE.decoded.saturating_mul(SAMPLE) / weight(&maker(SAMPLE)).max(1);
    let lengths = std::iter::successors(
        Some(fitting.min(M::SHAPE.encoded).min(MAX_RESPONSE_BYTES)),
        |length| Some(length - length / 64 - 1),
    );
    lengths.map(maker).find(|message| M::SHAPE.check(message).is_ok())
}

/// Returns a value of `/proc/self/status`, in KiB.
fn status_kib(key: &str) -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with(key)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Decodes the worst allowed message of a type in its own process, and compares the process's
/// growth with the counted memory.
fn measure<M: Bounded + Default>() {
    let Some(message) = worst::<M>() else { return };
    let counted = M::SHAPE.check(&message).unwrap();
    let encoded = std::env::temp_dir().join(format!("kiyot-measure-{}", std::process::id()));
    std::fs::write(&encoded, &message).unwrap();
    let child = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "bounds::tests::decoded_messages_need_at_most_the_counted_memory",
            "--nocapture",
        ])
        .env(CHILD_MESSAGE, format!("{} {}", M::SHAPE.name, encoded.display()))
        .output()
        .unwrap();
    std::fs::remove_file(&encoded).unwrap();
    let output = String::from_utf8_lossy(&child.stderr).into_owned();
    let grown = output.lines().find_map(|line| line.strip_prefix("grown by KiB "));
    let grown: usize =
        grown.unwrap_or_else(|| panic!("{}: {output}", M::SHAPE.name)).parse().unwrap();
    assert!(counted <= M::SHAPE.decoded);
    assert!(
        grown <= counted / 1024 + SLACK_KIB,
        "{}: {} bytes need {grown} KiB, counted {} KiB",
        M::SHAPE.name,
        message.len(),
        counted / 1024
    );
}

/// Decodes the message in the child process, and prints the process's growth.
fn print_growth<M: Bounded + Default>(message: &Bytes) {
    // Allocations of the first decoding don't count.
    drop(M::decode(Bytes::new()));
    let before = status_kib("VmHWM");
    let decoded = M::decode(message.clone()).unwrap();
    eprintln!("grown by KiB {}", status_kib("VmHWM") - before);
    drop(decoded);
}

macro_rules! measure_all {
    ($($message:ty,)*) => {
        /// Measures each message; in a child process, decodes the given message.
        fn measure_all() {
            let Ok(given) = std::env::var(CHILD_MESSAGE) else {
                let is_response = |name: &str| !name.ends_with("Request");
                $(if is_response(<$message>::SHAPE.name) { measure::<$message>(); })*
                return;
            };
            let (name, path) = given.split_once(' ').unwrap();
            let message = Bytes::from(std::fs::read(path).unwrap());
            $(if <$message>::SHAPE.name == name { print_growth::<$message>(&message); })*
        }

        /// Checks for each type that a message is not reported as malformed if prost decodes it.
        fn decodes_all(bytes: &[u8]) {
            $(
                let shape = <$message>::SHAPE;
                let checked = shape.check(bytes);
                if <$message>::decode(bytes).is_ok() {
                    assert!(
                        !matches!(checked, Err(BoundsError::Malformed { .. })),
                        "{}: {bytes:?}", shape.name
                    );
                }
            )*
        }
    };
}

for_each_message!(measure_all);

/// Verifies L16.
#[test]
fn decoded_messages_need_at_most_the_counted_memory() {
    measure_all();
}

/// Verifies L16.
#[test]
fn snapshot_of_empty_containers_is_refused_before_it_is_decoded() {
    let snapshot = field(2, b"").repeat((MAX_CONTROL_FRAME_BYTES - 64) / 2);
    let event = field(2, &field(2, &field(1, &snapshot)));
    assert!(event.len() <= MAX_CONTROL_FRAME_BYTES);
    let refused = decode::<cell::FromCell>(event.into()).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "message kiyot.cell.v1.FromCell needs more than 8388608 bytes of memory when it is decoded"
    );
}

/// Verifies L16.
#[test]
fn nested_message_is_limited_by_its_own_type() {
    let hello = cell::HelloReply { build_id: "x".repeat(17 << 10), ..Default::default() };
    let message = cell::FromCell { message: Some(cell::from_cell::Message::Hello(hello)) };
    let refused = decode::<cell::FromCell>(message.encode_to_vec().into()).unwrap_err();
    assert!(
        matches!(
            refused,
            BoundsError::Length { name: "kiyot.cell.v1.HelloReply", limit: 16384, .. }
        ),
        "{refused}"
    );
}

/// Returns a status as large as that of a container in a large pod.
fn container(n: usize, texts: usize) -> cri::ContainerStatus {
    let text = |what: &str| format!("{what}-{n}-{}", "x".repeat(texts));
    let labels = || (0..8).map(|n| (format!("io.kubernetes.label-{n}"), text("value"))).collect();
    cri::ContainerStatus {
        id: format!("{n:064}"),
        metadata: Some(cri::ContainerMetadata { name: text("name"), attempt: 3 }),
        state: 1,
        created_at: i64::MAX,
        started_at: i64::MAX,
        finished_at: i64::MAX,
        image: Some(cri::ImageSpec { image: text("image"), ..Default::default() }),
        image_ref: text("reference"),
        labels: labels(),
        annotations: labels(),
        log_path: text("/log"),
        resources: Some(cri::ContainerResources::default()),
        user: Some(cri::ContainerUser {
            linux: Some(cri::LinuxContainerUser {
                supplemental_groups: (0..32).collect(),
                ..Default::default()
            }),
        }),
        ..Default::default()
    }
}

fn samples(n: usize) -> Vec<cell::Sample> {
    (0..n)
        .map(|n| cell::Sample {
            name: format!("container_some_thing_{n:02}_seconds_total"),
            value: u64::MAX,
            labels: vec![cell::Label { key: "cpu".to_owned(), value: "total".to_owned() }; n % 2],
        })
        .collect()
}

fn stats(n: usize) -> cri::ContainerStats {
    let value = || Some(cri::UInt64Value { value: u64::MAX });
    let psi = || {
        let data = || Some(cri::PsiData { total: u64::MAX, avg10: 1.0, avg60: 1.0, avg300: 1.0 });
        Some(cri::PsiStats { full: data(), some: data() })
    };
    cri::ContainerStats {
        attributes: Some(cri::ContainerAttributes { id: format!("{n:064}"), ..Default::default() }),
        cpu: Some(cri::CpuUsage {
            timestamp: i64::MAX,
            usage_core_nano_seconds: value(),
            usage_nano_cores: value(),
            psi: psi(),
        }),
        memory: Some(cri::MemoryUsage {
            timestamp: i64::MAX,
            working_set_bytes: value(),
            available_bytes: value(),
            usage_bytes: value(),
            rss_bytes: value(),
            page_faults: value(),
            major_page_faults: value(),
            psi: psi(),
        }),
        writable_layer: Some(cri::FilesystemUsage {
            timestamp: i64::MAX,
            fs_id: Some(cri::FilesystemIdentifier { mountpoint: "/var/lib".to_owned() }),
            used_bytes: value(),
            inodes_used: value(),
        }),
        ..Default::default()
    }
}

fn event(event: cell::event::Event) -> Bytes {
    let event = cell::WatchEvent { watch: 1, event: Some(cell::Event { event: Some(event) }) };
    let message = cell::FromCell { message: Some(cell::from_cell::Message::Event(event)) };
    message.encode_to_vec().into()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Verifies L16.
    #[test]
    fn events_of_large_pods_are_never_refused(
        containers in 0_usize..=256,
        texts in 0_usize..=64,
        annotations in 0_usize..=250_000,
        metrics in 0_usize..=50,
    ) {
        let annotations = [("huge".to_owned(), "x".repeat(annotations))].into();
        let snapshot = cell::Snapshot {
            sandboxes: vec![cri::PodSandboxStatus { annotations, ..Default::default() }],
            containers: (0..containers).map(|n| container(n, texts)).collect(),
            logs: (0..containers)
                .map(|n| cell::LogGrown { path: format!("logs/{n:030}/0.log"), size: u64::MAX })
                .collect(),
        };
        decode::<cell::FromCell>(event(cell::event::Event::Snapshot(snapshot))).unwrap();
        let beat = cell::Heartbeat {
            containers: (0..containers).map(stats).collect(),
            sandbox: None,
            ephemeral_storage: u64::MAX,
            metrics: Some(cell::Metrics {
                pod: samples(metrics),
                timestamp: i64::MAX,
                containers: (0..containers)
                    .map(|n| cell::ContainerSamples {
                        container: format!("{n:064}"),
                        timestamp: i64::MAX,
                        samples: samples(metrics),
                    })
                    .collect(),
            }),
        };
        decode::<cell::FromCell>(event(cell::event::Event::Heartbeat(beat))).unwrap();
    }
}

proptest! {
    #[test]
    fn message_that_prost_decodes_is_never_malformed(
        bytes in prop::collection::vec(any::<u8>(), 0..64),
        changed in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
    ) {
        decodes_all(&bytes);
        let mut message = event(cell::event::Event::Container(container(1, 3))).to_vec();
        for (at, byte) in changed {
            let at = at.index(message.len());
            message[at] = byte;
        }
        decodes_all(&message);
    }
}

/// Verifies L16.
#[test]
fn exec_response_at_the_limit_is_accepted() {
    let answer = cri::ExecSyncResponse {
        stdout: vec![b'x'; MAX_EXEC_RESPONSE_BYTES - 16],
        ..Default::default()
    };
    decode::<cri::ExecSyncResponse>(answer.encode_to_vec().into()).unwrap();
    let other = cell::GetFileReply { content: vec![b'x'; MAX_RESPONSE_BYTES].into(), exists: true };
    decode::<cell::GetFileReply>(other.encode_to_vec().into()).unwrap();
}

/// Verifies L16.
#[test]
fn field_with_a_wrong_wire_type_is_refused() {
    // A field `annotations` whose key has the wire type of a varint: prost reads a map entry.
    let odd = [8 << 3, 0];
    assert!(cri::PodSandboxStatus::decode(&odd[..]).is_ok());
    let refused = cri::PodSandboxStatus::SHAPE.check(&odd).unwrap_err();
    assert_eq!(refused, BoundsError::WireType { name: "runtime.v1.PodSandboxStatus" });
    // A group.
    let refused = cri::PodSandboxStatus::SHAPE.check(&[0x63, 0x64]).unwrap_err();
    assert_eq!(refused, BoundsError::WireType { name: "runtime.v1.PodSandboxStatus" });
}
