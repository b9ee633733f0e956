use proptest::{collection::vec, prelude::*};

use super::*;
use crate::error::Violation;

fn read(decoder: &mut Decoder, block: &[u8]) -> Result<Vec<Field>, Violation> {
    let mut fields = Vec::new();
    decoder.decode(block, |field| fields.push(field.clone()))?;
    Ok(fields)
}

fn pairs(fields: &[Field]) -> Vec<(String, String)> {
    let pair = |field: &Field| {
        let name = match &field.name {
            Name::Header(name) => name.as_str().to_owned(),
            other => format!("{other:?}"),
        };
        (name, field.value.to_str().unwrap().to_owned())
    };
    fields.iter().map(pair).collect()
}

fn bytes(hex: &str) -> Vec<u8> {
    hex.split_whitespace().map(|byte| u8::from_str_radix(byte, 16).unwrap()).collect()
}

/// Three responses with a table of 256 bytes; the last evicts entries (RFC 7541, C.6).
#[test]
fn rfc_responses_are_decoded() {
    let mut decoder = Decoder::new();
    // A table size update to 256 at the front.
    let first = bytes(
        "3f e1 01 48 82 64 02 58 85 ae c3 77 1a 4b 61 96 d0 7a be 94 10 54 d4 44 a8 20 05 \
         95 04 0b 81 66 e0 82 a6 2d 1b ff 6e 91 9d 29 ad 17 18 63 c7 8f 0b 97 c8 e9 ae 82 \
         ae 43 d3",
    );
    let fields = pairs(&read(&mut decoder, &first).unwrap());
    assert_eq!(fields[0].1, "302");
    assert_eq!(
        fields[1..],
        [
            ("cache-control".into(), "private".into()),
            ("date".into(), "Mon, 21 Oct 2013 20:13:21 GMT".into()),
            ("location".into(), "https://www.example.com".into()),
        ]
    );
    let second = pairs(&read(&mut decoder, &bytes("48 83 64 0e ff c1 c0 bf")).unwrap());
    assert_eq!(second[0].1, "307");
    assert_eq!(second[1..], fields[1..]);
    let third = bytes(
        "88 c1 61 96 d0 7a be 94 10 54 d4 44 a8 20 05 95 04 0b 81 66 e0 84 a6 2d 1b ff c0 \
         5a 83 9b d9 ab 77 ad 94 e7 82 1d d7 f2 e6 c7 b3 35 df df cd 5b 39 60 d5 af 27 08 \
         7f 36 72 c1 ab 27 0f b5 29 1f 95 87 31 60 65 c0 03 ed 4e e5 b1 06 3d 50 07",
    );
    let third = pairs(&read(&mut decoder, &third).unwrap());
    assert_eq!(
        third[5],
        ("set-cookie".into(), "foo=ASDJKHQKBZXOQWEOPIUAXQWEOIU; max-age=3600; version=1".into())
    );
    // 307 and the first date are evicted: they were older than these three.
    assert!(read(&mut decoder, &[0x80 | 65]).is_err());
    assert!(read(&mut decoder, &[0x80 | 64]).is_ok());
}

#[test]
fn malformed_block_is_a_compression_error() {
    for bad in [
        "80",
        "c0",
        "40",
        "40 01",
        "82 3f e1 01",
        "3f e2 1f",
        "00 85 ff",
        "7f ff ff ff ff 7f",
        "00 81 ff 00",
    ] {
        let error = read(&mut Decoder::new(), &bytes(bad)).unwrap_err();
        assert_eq!(error.0, crate::Reason::COMPRESSION_ERROR, "{bad}");
    }
}

#[test]
fn invalid_field_is_flagged_and_indexed() {
    for (name, value) in [
        ("Upper", "x"),
        ("connection", "close"),
        ("te", "gzip"),
        ("a b", "x"),
        ("fine", "a\nb"),
        ("", "x"),
    ] {
        let (mut encoder, mut decoder, mut block) = (Encoder::new(), Decoder::new(), Vec::new());
        encoder.put(&mut block, name.as_bytes(), value.as_bytes(), false, false);
        encoder.put(&mut block, b"fine", b"yes", false, false);
        // Both are indexed.
        block.extend([0x80 | 63, 0x80 | 62]);
        let fine: Vec<bool> =
            read(&mut decoder, &block).unwrap().iter().map(|field| field.is_valid).collect();
        assert_eq!(fine, [false, true, false, true], "{name:?}");
    }
}

#[test]
fn secret_is_never_indexed_and_varying_value_is_indexed_once() {
    let (mut encoder, mut decoder) = (Encoder::new(), Decoder::new());
    let mut block = |name: &str, value: &str, varies, secret| {
        let mut block = Vec::new();
        encoder.put(&mut block, name.as_bytes(), value.as_bytes(), varies, secret);
        assert_eq!(
            pairs(&read(&mut decoder, &block).unwrap()),
            [(name.to_owned(), value.to_owned())]
        );
        block
    };
    for _ in 0..2 {
        assert_eq!(block("authorization", "x", false, true), [0x1f, 8, 1, b'x']);
    }
    assert_eq!(block("grpc-timeout", "1S", true, false).len(), 17);
    assert_eq!(block("grpc-timeout", "2S", true, false), [0x0f, 47, 2, b'2', b'S']);
    assert_eq!(block("a", "b", false, false).len(), 5);
    assert_eq!(block("a", "b", false, false), [0x80 | 62]);
}

fn field() -> impl Strategy<Value = (String, String, bool, bool)> {
    // Few names and values, so that they repeat.
    (
        "[a-c]{1,2}|x-long-name-of-a-field|content-type",
        "[ -~]{0,3}|[a-z]{0,80}",
        any::<bool>(),
        proptest::bool::weighted(0.1),
    )
}

proptest! {
    /// Consecutive blocks, while the table size changes.
    #[test]
    fn blocks_round_trip(
        blocks in vec((vec(field(), 1..8), proptest::option::of(0_usize..5000)), 1..10),
    ) {
        let (mut encoder, mut decoder) = (Encoder::new(), Decoder::new());
        for (fields, max_size) in blocks {
            if let Some(max_size) = max_size {
                encoder.set_max_size(max_size / 2);
                encoder.set_max_size(max_size);
            }
            let mut block = Vec::new();
            encoder.begin_block(&mut block);
            for (name, value, varies, secret) in &fields {
                encoder.put(&mut block, name.as_bytes(), value.as_bytes(), *varies, *secret);
            }
            let expected: Vec<_> =
                fields.into_iter().map(|(name, value, ..)| (name, value)).collect();
            prop_assert_eq!(pairs(&read(&mut decoder, &block).unwrap()), expected);
        }
    }

    #[test]
    fn arbitrary_blocks_do_not_panic(blocks in vec(vec(any::<u8>(), 0..60), 1..6)) {
        let mut decoder = Decoder::new();
        for block in blocks {
            if read(&mut decoder, &block).is_err() {
                break;
            }
        }
    }
}
