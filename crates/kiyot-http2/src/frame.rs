//! Frames (RFC 9113, 4 and 6).

use super::{Reason, error::Violation};

pub(super) const HEADER_LEN: usize = 9;
/// Largest payload of a frame in both directions: SETTINGS_MAX_FRAME_SIZE stays at its initial
/// value.
pub(super) const MAX_PAYLOAD_BYTES: usize = 16 << 10;
/// Connection preface of a client (RFC 9113, 3.4).
pub(super) const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Largest window and largest stream id.
pub(super) const MAX_U31: u32 = (1 << 31) - 1;

pub(super) const DATA: u8 = 0;
pub(super) const HEADERS: u8 = 1;
pub(super) const PRIORITY: u8 = 2;
pub(super) const RST_STREAM: u8 = 3;
pub(super) const SETTINGS: u8 = 4;
pub(super) const PUSH_PROMISE: u8 = 5;
pub(super) const PING: u8 = 6;
pub(super) const GOAWAY: u8 = 7;
pub(super) const WINDOW_UPDATE: u8 = 8;
pub(super) const CONTINUATION: u8 = 9;

pub(super) const END_STREAM: u8 = 1;
pub(super) const ACK: u8 = 1;
pub(super) const END_HEADERS: u8 = 4;
pub(super) const PADDED: u8 = 8;
pub(super) const PRIORITY_FLAG: u8 = 32;

/// Header of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Head {
    pub(super) length: usize,
    pub(super) kind: u8,
    pub(super) flags: u8,
    pub(super) stream: u32,
}

impl Head {
    /// Parses the header at the front; `None` if there are too few bytes.
    pub(super) fn parse(bytes: &[u8]) -> Option<Self> {
        let &[a, b, c, kind, flags, w, x, y, z] = bytes.first_chunk::<HEADER_LEN>()?;
        let length = usize::from(a) << 16 | usize::from(b) << 8 | usize::from(c);
        Some(Self { length, kind, flags, stream: u32::from_be_bytes([w, x, y, z]) & MAX_U31 })
    }

    /// Encodes the header.
    pub(super) fn bytes(self) -> [u8; HEADER_LEN] {
        let [_, a, b, c] = (self.length as u32).to_be_bytes();
        let [w, x, y, z] = self.stream.to_be_bytes();
        [a, b, c, self.kind, self.flags, w, x, y, z]
    }

    pub(super) fn has(self, flag: u8) -> bool {
        self.flags & flag != 0
    }
}

/// Appends a frame.
pub(super) fn put(out: &mut Vec<u8>, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
    out.extend_from_slice(&Head { length: payload.len(), kind, flags, stream }.bytes());
    out.extend_from_slice(payload);
}

/// Appends SETTINGS with these ids and values.
pub(super) fn put_settings(out: &mut Vec<u8>, settings: &[(u16, u32)]) {
    let payload: Vec<u8> = settings
        .iter()
        .flat_map(|(id, value)| [id.to_be_bytes().as_slice(), &value.to_be_bytes()].concat())
        .collect();
    put(out, SETTINGS, 0, 0, &payload);
}

/// Strips padding, and in HEADERS the priority.
pub(super) fn strip_padding(head: Head, mut payload: &[u8]) -> Result<&[u8], Violation> {
    let mut padding = 0;
    if head.has(PADDED) {
        let (&length, rest) = payload
            .split_first()
            .ok_or(Violation(Reason::FRAME_SIZE_ERROR, "padded frame without a pad length"))?;
        (padding, payload) = (usize::from(length), rest);
    }
    if head.kind == HEADERS && head.has(PRIORITY_FLAG) {
        if be_u32(payload) & MAX_U31 == head.stream {
            return Err(Violation(Reason::PROTOCOL_ERROR, "stream depends on itself"));
        }
        payload = payload
            .get(5..)
            .ok_or(Violation(Reason::FRAME_SIZE_ERROR, "HEADERS too short for its priority"))?;
    }
    let length = payload
        .len()
        .checked_sub(padding)
        .ok_or(Violation(Reason::PROTOCOL_ERROR, "padding exceeds the payload"))?;
    Ok(&payload[..length])
}

/// Returns the first four bytes as a number.
pub(super) fn be_u32(payload: &[u8]) -> u32 {
    payload.first_chunk().map_or(0, |bytes| u32::from_be_bytes(*bytes))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn frame_header_round_trips(
            length in 0_usize..1 << 24,
            kind: u8,
            flags: u8,
            stream in 0..=MAX_U31,
        ) {
            let head = Head { length, kind, flags, stream };
            prop_assert_eq!(Head::parse(&head.bytes()), Some(head));
            prop_assert_eq!(Head::parse(&head.bytes()[..8]), None);
        }

        #[test]
        fn padding_and_priority_are_stripped(
            payload: Vec<u8>,
            padding: Option<u8>,
            priority: bool,
        ) {
            let (mut flags, mut bytes) = (0, Vec::new());
            if let Some(padding) = padding {
                flags |= PADDED;
                bytes.push(padding);
            }
            if priority {
                flags |= PRIORITY_FLAG;
                bytes.extend([7; 5]);
            }
            bytes.extend(&payload);
            bytes.extend(vec![0; usize::from(padding.unwrap_or_default())]);
            let head = Head { length: bytes.len(), kind: HEADERS, flags, stream: 1 };
            prop_assert_eq!(strip_padding(head, &bytes).unwrap(), payload);
        }

        #[test]
        fn arbitrary_payload_is_stripped_without_panic(
            payload: Vec<u8>,
            flags: u8,
            kind in 0_u8..2,
        ) {
            let head = Head { length: payload.len(), kind, flags, stream: 1 };
            if let Ok(rest) = strip_padding(head, &payload) {
                prop_assert!(rest.len() <= payload.len());
            }
        }
    }
}
