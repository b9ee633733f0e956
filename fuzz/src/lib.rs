//! What kiyot reads from others, as functions of any bytes: they panic if it reads them wrongly. `fuzz_targets/` has one target for each.

use kiyot::{
    annotations::CellRequest,
    backends::milpa::{streaming, verbs},
    config, manifest,
    proxy::{fuzzing, peek},
};
use kiyot_proto::cri;
use prost::Message;

/// Peeks at a `RunPodSandboxRequest`. Where prost reads it too, both must find the same.
pub fn peek(data: &[u8]) {
    let pod = peek::Pod::of(data);
    let peeked = (pod.runtime_handler(), pod.name(), pod.namespace(), pod.label("a"), pod.annotation("a"));
    for path in [&[1][..], &[1, 1], &[3, 1, 2], &[]] {
        let _ = (peek::bytes(data, path), peek::string(data, path));
    }
    let Ok(read) = cri::RunPodSandboxRequest::decode(data) else { return };
    let config = read.config.unwrap_or_default();
    let metadata = config.metadata.unwrap_or_default();
    // Groups are no part of CRI: prost skips them, and here they are refused.
    let (Ok(handler), Ok(name), Ok(namespace), Ok(label), Ok(annotation)) = peeked else { return };
    assert_eq!((handler, name, namespace), (read.runtime_handler.as_str(), metadata.name.as_str(), metadata.namespace.as_str()));
    assert_eq!(label, config.labels.get("a").map(String::as_str));
    assert_eq!(annotation, config.annotations.get("a").map(String::as_str));
}

/// Merges answers, divided by the bytes `|||`.
pub fn merge(data: &[u8]) {
    let mut parts: Vec<&[u8]> = Vec::new();
    let mut rest = data;
    while let Some(at) = rest.windows(3).position(|window| window == b"|||") {
        parts.push(&rest[..at]);
        rest = &rest[at + 3..];
    }
    fuzzing::merge(&parts, rest);
}

/// Looks at the frame of a message, and learns ids from it.
pub fn frame(data: &[u8]) {
    fuzzing::frame(data);
}

/// Reads the heads of HTTP requests and answers of streams.
pub fn head(data: &[u8]) {
    streaming::fuzzing::request(data);
    streaming::fuzzing::answer(data);
}

/// Reads a configuration.
pub fn config(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    if let Ok(config) = config::parse("fuzz", text, []) {
        assert_eq!(config::Diff::between(&config, &config), config::Diff::default());
        assert_eq!(config.reloaded(&config, "fuzz"), Ok(config));
    }
}

/// Reads a manifest.
pub fn manifest(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    if let Ok(manifest) = manifest::parse("fuzz", text) {
        for pod in &manifest.pods {
            let request = pod.run_pod_sandbox(&manifest::Node::default(), 0).encode_to_vec();
            peek(&request);
        }
    }
}

/// Reads annotations: lines of a key, `=` and a value.
pub fn annotations(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let pairs: Vec<_> = text.lines().filter_map(|line| line.split_once('=')).map(|(key, value)| (key.to_owned(), value.to_owned())).collect();
    let _ = CellRequest::parse(pairs.iter().map(|(key, value)| (key, value)));
    let _ = CellRequest::unknown_keys(pairs.iter().map(|(key, value)| (key, value)));
}

/// Reads and applies what an agent says.
pub fn events(data: &[u8]) {
    verbs::fuzzing::events(data);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SEEDS: [&[u8]; 6] = [
        b"",
        b"\x0a\x06\x0a\x04\x0a\x02ab\x12\x01h",
        b"\x00\x00\x00\x00\x03\x0a\x01x|||\x00\x00\x00\x00\x00|||\x0a\x01y",
        b"POST /token HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        b"[backends.containerd]\ntype = \"cri\"\n[[routing.rule]]\nname = \"a\"\nnamespace = [\"b\"]\nbackend = \"containerd\"\n",
    ];

    fn all(data: &[u8]) {
        for target in [peek, merge, frame, head, config, manifest, annotations, events] {
            target(data);
        }
    }

    #[test]
    fn every_target_takes_every_seed_and_its_parts() {
        for seed in SEEDS {
            for end in 0..=seed.len() {
                all(&seed[..end]);
            }
        }
        for file in ["examples/pod-in-a-cell.yaml", "examples/opt-out.toml", "config/kiyot.toml"] {
            all(&std::fs::read(format!("{}/../{file}", env!("CARGO_MANIFEST_DIR"))).unwrap());
        }
    }

    proptest! {
        #[test]
        fn every_target_takes_any_bytes(data in prop::collection::vec(any::<u8>(), 0..300)) {
            all(&data);
        }
    }
}
