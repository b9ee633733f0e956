//! Sanitising of metadata and error messages of cells, which go to the daemon's log and to the
//! kubelet: they are length-limited and stripped of control characters.

use std::fmt::Write;

use http::{
    HeaderMap, HeaderName, HeaderValue,
    header::{CONTENT_ENCODING, CONTENT_TYPE},
};

/// The most bytes of an error message from a cell. A kubelet shows 1 KiB of it in a pod's events;
/// containerd's messages about failed starts have some hundred bytes.
pub const MAX_MESSAGE_BYTES: usize = 4 << 10;
/// The end of a message that was truncated.
const ELLIPSIS: &str = " ...";
/// The header of gRPC's error message, percent-encoded.
const GRPC_MESSAGE: HeaderName = HeaderName::from_static("grpc-message");
/// The headers that a response keeps. Others, such as `grpc-status-details-bin`, would be passed on
/// unchecked.
const KEPT_HEADERS: [HeaderName; 4] = [
    CONTENT_TYPE,
    CONTENT_ENCODING,
    HeaderName::from_static("grpc-encoding"),
    HeaderName::from_static("grpc-status"),
];

/// Removes all headers of a response except [`KEPT_HEADERS`], and sanitises its message.
pub(super) fn clean(headers: &mut HeaderMap) {
    let mut kept = HeaderMap::with_capacity(KEPT_HEADERS.len());
    for name in KEPT_HEADERS {
        if let Some(value) = headers.remove(&name) {
            kept.insert(name, value);
        }
    }
    if let Some(message) = headers.remove(GRPC_MESSAGE) {
        let text = percent_decode(message.as_bytes());
        let text = String::from_utf8_lossy(&text);
        let message = if text.len() <= MAX_MESSAGE_BYTES && !text.contains(is_unsafe_control) {
            message
        } else {
            // Percent-encoded text is printable ASCII, which is a valid header value.
            HeaderValue::try_from(percent_encode(&sanitize(&text)))
                .unwrap_or_else(|_| HeaderValue::from_static(""))
        };
        kept.insert(GRPC_MESSAGE, message);
    }
    *headers = kept;
}

/// Returns a message of a cell, truncated to [`MAX_MESSAGE_BYTES`], with spaces in place of control
/// characters other than line ends and tabs.
pub fn sanitize(message: &str) -> String {
    truncate(message).replace(is_unsafe_control, " ")
}

/// Returns a text, truncated to [`MAX_MESSAGE_BYTES`] between two characters.
pub fn truncate(text: &str) -> String {
    if text.len() <= MAX_MESSAGE_BYTES {
        return text.to_owned();
    }
    let end = text.floor_char_boundary(MAX_MESSAGE_BYTES - ELLIPSIS.len());
    let mut truncated = text[..end].to_owned();
    truncated.push_str(ELLIPSIS);
    truncated
}

/// Returns whether a character is a control character other than a line end or a tab.
pub fn is_unsafe_control(character: char) -> bool {
    character.is_control() && !matches!(character, '\n' | '\t')
}

/// Decodes percent-encoding and keeps invalid sequences as they are.
fn percent_decode(text: &[u8]) -> Vec<u8> {
    let (mut bytes, mut rest) = (Vec::with_capacity(text.len()), text);
    while let Some((first, after)) = rest.split_first() {
        let mut byte = [0];
        match after.first_chunk::<2>() {
            Some(digits) if *first == b'%' && hex::decode_to_slice(digits, &mut byte).is_ok() => {
                bytes.push(byte[0]);
                rest = &after[2..];
            }
            _ => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    bytes
}

fn percent_encode(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        if (b' '..=b'~').contains(&byte) && byte != b'%' {
            encoded.push(char::from(byte));
        } else {
            // Writing to a string does not fail.
            let _ = write!(encoded, "%{byte:02X}");
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cleaned(message: &str) -> String {
        let mut headers = HeaderMap::new();
        headers.insert(GRPC_MESSAGE, HeaderValue::from_str(message).unwrap());
        headers.insert("grpc-status", HeaderValue::from_static("2"));
        headers.insert("grpc-status-details-bin", HeaderValue::from_static("AAAA"));
        headers.append("x-more", HeaderValue::from_static("first"));
        headers.append("x-more", HeaderValue::from_static("second"));
        clean(&mut headers);
        assert_eq!((headers.len(), &headers["grpc-status"]), (2, &HeaderValue::from_static("2")));
        headers.get(GRPC_MESSAGE).unwrap().to_str().unwrap().to_owned()
    }

    /// Verifies L11.
    #[test]
    fn control_characters_of_a_message_become_spaces() {
        for same in
            ["", "no such container", "50%25 of \"a\"", "a%0Ab%09c", "%C3%A4", "100%", "%zz", "%4"]
        {
            assert_eq!(cleaned(same), same);
        }
        assert_eq!(cleaned("%1b[31mred%07 %00"), " [31mred   ");
        assert_eq!(cleaned("%C2%9B1m%0A50%25%1b%C3%A4"), " 1m%0A50%25 %C3%A4");
    }

    /// Verifies L11.
    #[test]
    fn message_beyond_the_limit_is_truncated_between_characters() {
        assert_eq!(cleaned(&"x".repeat(MAX_MESSAGE_BYTES)), "x".repeat(MAX_MESSAGE_BYTES));
        let cut = cleaned(&"x".repeat(MAX_MESSAGE_BYTES + 1));
        assert_eq!(cut, format!("{} ...", "x".repeat(MAX_MESSAGE_BYTES - ELLIPSIS.len())));
        for text in ["\u{e4}".repeat(MAX_MESSAGE_BYTES), "\u{1f600}".repeat(MAX_MESSAGE_BYTES)] {
            let truncated = sanitize(&text);
            assert!((MAX_MESSAGE_BYTES - 4..=MAX_MESSAGE_BYTES).contains(&truncated.len()));
            assert!(truncated.ends_with(ELLIPSIS));
        }
    }
}
