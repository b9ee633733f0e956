//! Functions of arbitrary bytes for everything that kiyot parses from others. They panic if a
//! property does not hold. `fuzz_targets/` has a target for each function.

#[cfg(not(debug_assertions))]
compile_error!(
    "kiyot has no fuzzing code without debug assertions; allowed: debug assertions, as cargo-fuzz \
     sets them"
);

use std::{ffi::OsStr, os::unix::ffi::OsStrExt, path::Path, time::Duration};

use bytes::BytesMut;
use kiyot::{
    annotations,
    backends::milpa::{fuzzing as cells, logs},
    proxy::{fuzzing, peek},
    workload::{WorkloadError, read_workload},
};
use kiyot_config as config;
use kiyot_ec2::provider::price_list::Listed;
use kiyot_engine::{
    placement::{CatalogueFile, Needs, Rules, misses, rank},
    request::{CellRequest, InstanceType, keys::KEYS},
};
use kiyot_link::bootstrap::CellFile;
use kiyot_linux::mountinfo::{self, Mount};
use kiyot_manifest as manifest;
use kiyot_proto::{
    bounds::{Bounded, BoundsError},
    cell, cri,
};
use kiyot_sim::WorkloadPod;
use kiyot_values::price::Price;
use milpactl::spdy::{Decoder, Frame, FrameError, MAX_CONTROL_BYTES};
use prost::Message;
use tokio::runtime::{Builder, Runtime};

pub use kiyot::{
    backends::milpa::{fuzzing::answers, streaming::fuzzing::head, volumes::fuzzing::volumes},
    proxy::fuzzing::frame,
};
pub use kiyot_http2::fuzzing::{kubelet, runtime};

mod disk;
pub mod seeds;

/// Function of a target.
pub type Target = fn(&[u8]);

/// All targets, by name.
pub const TARGETS: [(&str, Target); 19] = [
    ("peek", peek),
    ("merge", merge),
    ("frame", frame),
    ("runtime", runtime),
    ("kubelet", kubelet),
    ("head", head),
    ("spdy", spdy),
    ("config", config),
    ("manifest", manifest),
    ("annotations", annotations),
    ("catalogue", catalogue),
    ("product", product),
    ("workload", workload),
    ("events", events),
    ("answers", answers),
    ("log", log),
    ("netns", netns),
    ("volumes", volumes),
    ("files", files),
];

/// Peeks at a `RunPodSandboxRequest`, and compares the result with prost's if prost decodes it.
pub fn peek(data: &[u8]) {
    let pod = peek::Pod::run(data);
    let peeked =
        (pod.runtime_handler(), pod.name(), pod.namespace(), pod.label("a"), pod.annotation("a"));
    for path in [&[1][..], &[1, 1], &[3, 1, 2], &[]] {
        let _ = (peek::bytes(data, path), peek::string(data, path));
    }
    let Ok(read) = cri::RunPodSandboxRequest::decode(data) else { return };
    let config = read.config.unwrap_or_default();
    let metadata = config.metadata.unwrap_or_default();
    // prost reads an entry of a map as length-delimited even if its wire type differs; Go and peek
    // skip such an entry.
    let of_map =
        |(number, value)| matches!(number, 6 | 7) && !matches!(value, peek::Value::Bytes(_));
    let mut odd = false;
    let _ = peek::visit(data, &[1], &mut |config| {
        odd |= peek::Fields::new(config).flatten().any(of_map)
    });
    if odd {
        return;
    }
    // CRI has no groups: prost skips them, and peek refuses them.
    let (Ok(handler), Ok(name), Ok(namespace), Ok(label), Ok(annotation)) = peeked else { return };
    assert_eq!(
        (handler, name, namespace),
        (read.runtime_handler.as_str(), metadata.name.as_str(), metadata.namespace.as_str())
    );
    assert_eq!(label, config.labels.get("a").map(String::as_str));
    assert_eq!(annotation, config.annotations.get("a").map(String::as_str));
}

/// Merges responses, separated by `|||`.
pub fn merge(data: &[u8]) {
    let mut parts: Vec<&[u8]> = Vec::new();
    let mut rest = data;
    while let Some(at) = rest.windows(3).position(|window| window == b"|||") {
        parts.push(&rest[..at]);
        rest = &rest[at + 3..];
    }
    fuzzing::merge(&parts, rest);
}

/// Decodes frames of a streaming server, whole and in parts of a few bytes.
pub fn spdy(data: &[u8]) {
    let whole = spdy_frames(data, data.len());
    assert_eq!(spdy_frames(data, 1), whole);
    assert_eq!(spdy_frames(data, 7), whole);
    assert!(whole.1 <= data.len());
}

/// Returns the frames without their data, the number of the data's bytes, and the violation.
fn spdy_frames(data: &[u8], part: usize) -> (Vec<Frame>, usize, Option<FrameError>) {
    let (mut decoder, mut buffer) = (Decoder::default(), BytesMut::new());
    let (mut frames, mut bytes_of_data) = (Vec::new(), 0);
    for part in data.chunks(part.max(1)) {
        buffer.extend_from_slice(part);
        loop {
            match decoder.next(&mut buffer) {
                Ok(Some(Frame::Data { stream, bytes, end })) => {
                    assert!(end || !bytes.is_empty());
                    bytes_of_data += bytes.len();
                    if end {
                        frames.push(Frame::Data { stream, bytes: Default::default(), end });
                    }
                }
                Ok(Some(frame)) => frames.push(frame),
                Ok(None) => break,
                Err(error) => return (frames, bytes_of_data, Some(error)),
            }
        }
        assert!(buffer.len() < 8 + MAX_CONTROL_BYTES);
    }
    (frames, bytes_of_data, None)
}

/// Parses a configuration.
pub fn config(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    if let Ok(config) = config::parse("fuzz", text, []) {
        assert_eq!(config::Diff::between(&config, &config), config::Diff::default());
        assert_eq!(config.reloaded(&config, "fuzz"), Ok(config));
    }
}

/// Parses a manifest, and peeks at its requests.
pub fn manifest(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let file = manifest::File { name: "fuzz".into(), text: text.into() };
    if let Ok(manifest) = manifest::parse_files(&[file]) {
        let node = manifest::Node::default();
        for pod in &manifest.pods {
            let request = pod.run_pod_sandbox(&node, 0);
            peek(&request.encode_to_vec());
            let sandbox = request.config.unwrap_or_default();
            for container in pod.all_containers() {
                pod.container_config(container, &node, &sandbox, &container.image, 0);
            }
        }
    }
}

/// Parses annotations: lines of a key, `=` and a value.
pub fn annotations(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let pairs: Vec<_> = text
        .lines()
        .filter_map(|line| line.split_once('='))
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .collect();
    let pairs = || pairs.iter().map(|(key, value)| (key, value));
    let request = annotations::parse(pairs());
    let unknown = annotations::unknown_keys(pairs());
    let shown = annotations::shown_keys(&unknown);
    assert!(!shown.contains(char::is_control) && shown.chars().count() < 10_000);
    // An unknown key is ignored, a misspelt key refused.
    for key in unknown {
        assert_eq!(annotations::parse([(&key.to_owned(), &String::new())]), Ok(Default::default()));
    }
    match request {
        Ok(CellRequest { instance_type: Some(glob @ InstanceType::Glob(_)), .. }) => {
            glob.matches(text.lines().last().unwrap_or_default());
        }
        Ok(_) => {}
        Err(problems) => assert!(problems.list.len() <= 2 * KEYS.len(), "{problems}"),
    }
}

/// Parses the pods of a simulation.
pub fn workload(data: &[u8]) {
    match read_workload(data) {
        Ok(pods) => {
            assert!(!pods.is_empty());
            let month = Duration::from_secs(31 * 24 * 3600);
            for WorkloadPod { arrival, duration, namespace, .. } in pods {
                assert!(arrival <= month && duration <= month);
                assert!((1..=63).contains(&namespace.len()));
            }
        }
        Err(WorkloadError::Rows { named, all }) => {
            assert!(!named.is_empty() && named.len() <= all);
            assert!(named.iter().all(|row| row.line > 0 && !row.reason.is_empty()));
        }
        Err(_) => {}
    }
}

/// Parses a catalogue, and chooses from it for a pod without annotations.
pub fn catalogue(data: &[u8]) {
    let Ok(CatalogueFile { catalogue, set_aside }) = CatalogueFile::parse(data) else { return };
    let lines = data.iter().filter(|byte| matches!(byte, b'\n' | b'\r')).count() as u64 + 1;
    for row in &set_aside {
        assert!((1..=lines).contains(&row.line) && row.reason.len() < 1000, "{row:?}");
    }
    assert!(!catalogue.entries().is_empty());
    let (needs, rules) = (Needs::default(), Rules::default());
    let ranked = rank(&catalogue, &needs, &rules, &());
    assert!(ranked.is_sorted_by_key(|candidate| candidate.price));
    for candidate in &ranked {
        assert!(catalogue.offerings().any(|offering| offering == candidate.offering));
    }
    let missed = misses(&catalogue, &needs, &rules, None, usize::MAX);
    assert!(missed.iter().all(|miss| !miss.reasons.is_empty()));
    assert_eq!(ranked.is_empty(), missed.len() == catalogue.entries().len());
}

/// Parses a product of AWS's price list.
pub fn product(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    match Listed::parse(text, "us-east-1") {
        Ok(listed) => {
            assert!(listed.price > Price::FREE && text.contains("us-east-1"), "{listed:?}");
            let fits = |c: char| c.is_ascii_alphanumeric() || ['.', '-', '_'].contains(&c);
            let name = &listed.instance_type;
            assert!((1..=64).contains(&name.len()) && name.chars().all(fits), "{name:?}");
        }
        Err(unusable) => assert!(unusable.to_string().len() < 200),
    }
}

/// Decodes and applies an agent's reports. The check of bounds accepts the form of each message
/// that can be decoded.
pub fn events(data: &[u8]) {
    let checked = cell::FromCell::SHAPE.check(data);
    if cell::FromCell::decode(data).is_ok() {
        assert!(!matches!(checked, Err(BoundsError::Malformed { .. })), "{checked:?}");
    }
    cells::events(data);
}

/// Copies a log to the node, through failures of the cell, its link and the daemon.
pub fn log(data: &[u8]) {
    let Ok(dir) = tempfile::tempdir() else { return };
    logs::fuzzing::log(&life, dir.path(), data);
}

/// Returns a runtime for a run of the daemon, with a paused clock where possible.
fn life() -> Runtime {
    let mut builder = Builder::new_current_thread();
    builder.enable_all();
    #[cfg(any(test, feature = "targets"))]
    builder.start_paused(true);
    builder.build().unwrap_or_else(|error| panic!("{error}"))
}

/// Parses files of the provider and of the node, and a cell's boot file.
pub fn netns(data: &[u8]) {
    kiyot_local::fuzzing::files(data);
    mounts(data);
    match CellFile::parse(Path::new("cell.json"), data) {
        Ok(file) => {
            let kept = serde_json::to_vec_pretty(&file)
                .unwrap_or_else(|error| panic!("can't be written: {error}"));
            assert_eq!(CellFile::parse(Path::new("cell.json"), &kept).ok(), Some(file));
        }
        // The error does not quote the file, which may have a token.
        Err(error) => assert!(format!("{error} {error:?}").len() < 300),
    }
}

/// Reads lines of `/proc/self/mountinfo` as the kernel would write them. Bytes 0 separate the roots
/// and points of the mounts in `data`.
fn mounts(data: &[u8]) {
    let mut text = Vec::new();
    let mut expected = Vec::new();
    let mut words = data.split(|byte| *byte == 0);
    while let (Some(root), Some(point)) = (words.next(), words.next()) {
        text.extend(b"36 35 98:0 ");
        escape(root, &mut text);
        text.push(b' ');
        escape(point, &mut text);
        text.extend(b" rw,noatime master:1 - cgroup2 name rw,nsdelegate\n");
        let path = |bytes| Path::new(OsStr::from_bytes(bytes)).to_owned();
        expected.push(Mount {
            device: "98:0".to_owned(),
            root: path(root),
            point: path(point),
            kind: "cgroup2".to_owned(),
            options: "rw,nsdelegate".to_owned(),
        });
    }
    assert_eq!(mountinfo::parse(&text), expected);
}

/// Escapes a path like `seq_path` of the kernel: blanks, line ends, backslashes and, in recent
/// kernels, `#` become three octal digits.
fn escape(path: &[u8], text: &mut Vec<u8>) {
    for byte in path {
        match byte {
            b' ' | b'\t' | b'\n' | b'\\' | b'#' => text.extend(format!("\\{byte:03o}").bytes()),
            _ => text.push(*byte),
        }
    }
}

/// Changes files in a cell. The first byte selects arbitrary or planned changes.
pub fn files(data: &[u8]) {
    match data.split_first() {
        Some((kind, rest)) if kind.is_multiple_of(2) => disk::changes(rest),
        Some((_, rest)) => disk::update(rest),
        None => {}
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn every_target_takes_its_seeds_and_their_parts() {
        for (name, target) in TARGETS {
            for seed in seeds::of(name) {
                let step = 1 + seed.len() / 400;
                for end in (0..seed.len()).step_by(step).chain([seed.len()]) {
                    target(&seed[..end]);
                }
            }
        }
    }

    #[test]
    fn every_target_has_seeds_a_program_and_a_line_in_the_documentation() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let documentation = std::fs::read_to_string(root.join("README.md")).unwrap();
        for (name, _) in TARGETS {
            assert!(!seeds::of(name).is_empty(), "{name}");
            assert!(root.join(format!("fuzz_targets/{name}.rs")).is_file(), "{name}");
            assert!(documentation.contains(&format!("\n| `{name}` |")), "{name}");
        }
    }

    proptest! {
        #[test]
        fn every_target_takes_any_bytes(data in prop::collection::vec(any::<u8>(), 0..300)) {
            for (_, target) in TARGETS {
                target(&data);
            }
        }
    }
}
