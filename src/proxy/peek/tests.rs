use std::collections::HashMap;

use kiyot_proto::cri;
use proptest::prelude::*;
use prost::Message;

use super::*;

fn request(
    name: &str,
    labels: HashMap<String, String>,
    annotations: HashMap<String, String>,
    handler: &str,
) -> cri::RunPodSandboxRequest {
    let metadata = Some(cri::PodSandboxMetadata {
        name: name.into(),
        uid: "uid".into(),
        namespace: "ns".into(),
        attempt: 3,
    });
    let config = cri::PodSandboxConfig {
        metadata,
        labels,
        annotations,
        hostname: "host".into(),
        ..Default::default()
    };
    cri::RunPodSandboxRequest { config: Some(config), runtime_handler: handler.into() }
}

#[test]
fn config_in_two_occurrences_is_read_as_one() {
    let first = request("a", [("k".to_string(), "1".to_string())].into(), HashMap::new(), "one");
    let second = cri::RunPodSandboxRequest {
        config: Some(cri::PodSandboxConfig {
            labels: [("k".to_string(), "2".to_string())].into(),
            ..Default::default()
        }),
        runtime_handler: "two".into(),
    };
    let mut bytes = first.encode_to_vec();
    bytes.extend(second.encode_to_vec());
    let pod = Pod::run(&bytes);
    assert_eq!(pod.name(), Ok("a"));
    assert_eq!(pod.namespace(), Ok("ns"));
    assert_eq!(pod.label("k"), Ok(Some("2")));
    assert_eq!(pod.runtime_handler(), Ok("two"));
}

#[test]
fn pod_to_restore_reads_like_a_pod_to_run() {
    let run = request(
        "a",
        [("k".to_string(), "1".to_string())].into(),
        [("t".to_string(), "kiyot".to_string())].into(),
        "one",
    );
    let restore = cri::RestorePodRequest {
        checkpoint_path: "/c".into(),
        config: run.config.clone(),
        runtime_handler: "one".into(),
        ..Default::default()
    };
    let bytes = restore.encode_to_vec();
    let pod = Pod::restore(&bytes);
    assert_eq!(
        (pod.name(), pod.namespace(), pod.runtime_handler()),
        (Ok("a"), Ok("ns"), Ok("one"))
    );
    assert_eq!((pod.label("k"), pod.annotation("t")), (Ok(Some("1")), Ok(Some("kiyot"))));
    assert_eq!(
        cri::RunPodSandboxRequest::decode(&*pod.to_run_request()).unwrap().config,
        run.config
    );
    let bytes = run.encode_to_vec();
    assert_eq!(*Pod::run(&bytes).to_run_request(), *bytes);
}

/// Verifies R6.
#[test]
fn pod_that_stays_on_the_node_loses_its_handler_alone() {
    let mut run =
        request("a", [("k".to_string(), "1".to_string())].into(), HashMap::new(), "kiyot");
    let mut bytes = run.encode_to_vec();
    bytes.extend(b"\xfa\x3f\x05later");
    run.runtime_handler.clear();
    let expected = [run.encode_to_vec(), b"\xfa\x3f\x05later".to_vec()].concat();
    assert_eq!(Pod::run(&bytes).without_handler(), Ok(expected));
    assert_eq!(without_field(&[0x0a, 0x05, b'a'], 2), Err(Malformed));
}

#[test]
fn group_is_malformed() {
    assert_eq!(string(&[0x0b, 0x0c], &[1]), Err(Malformed));
}

#[test]
fn field_number_zero_is_malformed() {
    assert_eq!(string(&[0x02, 0x00], &[1]), Err(Malformed));
}

#[test]
fn truncated_value_is_malformed() {
    assert_eq!(string(&[0x0a, 0x05, b'a'], &[1]), Err(Malformed));
    assert_eq!(
        string(&[0x0a, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f], &[1]),
        Err(Malformed)
    );
}

#[test]
fn string_that_is_not_utf8_is_malformed() {
    assert_eq!(string(&[0x0a, 0x01, 0xff], &[1]), Err(Malformed));
}

#[test]
fn map_entry_without_a_value_is_empty() {
    let bytes =
        request("a", [("k".to_string(), String::new())].into(), HashMap::new(), "").encode_to_vec();
    assert_eq!(Pod::run(&bytes).label("k"), Ok(Some("")));
    assert_eq!(Pod::run(&bytes).label("l"), Ok(None));
}

#[test]
fn map_entry_of_a_fixed_wire_type_is_ignored() {
    // labels (field 6) as four bytes, then a host name. Go skips the first; prost decodes it as the
    // entry { "a": "1" }.
    let bytes = [0x0a, 0x08, 0x35, 0x06, 0x0a, 0x01, 0x61, 0x12, 0x01, 0x31];
    assert_eq!(Pod::run(&bytes).label("a"), Ok(None));
    assert_eq!(string(&bytes, &[1, 2]), Ok("1"));
    assert_eq!(
        cri::RunPodSandboxRequest::decode(bytes.as_slice()).unwrap().config.unwrap().labels["a"],
        "1"
    );
}

proptest! {
    #[test]
    fn fields_that_prost_encodes_are_read(
        name in ".{0,20}",
        handler in "[a-z]{0,10}",
        labels in proptest::collection::hash_map("[a-z./]{0,5}", ".{0,10}", 0..6),
        annotations in proptest::collection::hash_map("[a-z./]{0,5}", ".{0,300}", 0..6),
    ) {
        let bytes = request(&name, labels.clone(), annotations.clone(), &handler).encode_to_vec();
        let pod = Pod::run(&bytes);
        prop_assert_eq!(pod.name(), Ok(name.as_str()));
        prop_assert_eq!(pod.namespace(), Ok("ns"));
        prop_assert_eq!(pod.runtime_handler(), Ok(handler.as_str()));
        for (key, value) in &labels {
            prop_assert_eq!(pod.label(key), Ok(Some(value.as_str())));
        }
        for (key, value) in &annotations {
            prop_assert_eq!(pod.annotation(key), Ok(Some(value.as_str())));
        }
        prop_assert_eq!(pod.label("absent key"), Ok(None));
    }

    #[test]
    fn random_message_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let pod = Pod::run(&bytes);
        let _ = (pod.name(), pod.namespace(), pod.runtime_handler());
        let _ = (pod.label("k"), pod.annotation("k"));
        let _ = (has_field(&bytes, 3), string(&bytes, &[1, 1, 1, 1]));
        prop_assert!(Fields::new(&bytes).count() <= bytes.len());
    }

    #[test]
    fn message_that_prost_decodes_is_read_alike(
        bytes in proptest::collection::vec(
            prop_oneof![Just(0x0a_u8), Just(0x12), 0_u8..8, any::<u8>()],
            0..60,
        ),
    ) {
        let decoded = cri::RunPodSandboxResponse::decode(bytes.as_slice());
        if let (Ok(decoded), Ok(read)) = (decoded, string(&bytes, &[1])) {
            prop_assert_eq!(decoded.pod_sandbox_id, read);
        }
    }

    #[test]
    fn truncated_message_never_panics(
        annotations in proptest::collection::hash_map("[a-z]{0,5}", ".{0,40}", 0..6),
        cut in 0_usize..400,
    ) {
        let bytes = request("name", HashMap::new(), annotations, "kiyot").encode_to_vec();
        let _ = Pod::run(&bytes[..cut.min(bytes.len())]).annotation("k");
    }
}
