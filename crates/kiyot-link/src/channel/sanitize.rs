//! Metadata and error messages of cells, which go to the daemon's log and to the kubelet: limited
//! in length, and without control characters.

use std::fmt::Write;

use http::{
    HeaderMap, HeaderName, HeaderValue,
    header::{CONTENT_ENCODING, CONTENT_TYPE},
};

/// The bytes of the longest error message that is taken from a cell. A kubelet shows 1 KiB of one
/// in a pod's events; what containerd says of a failed start has some hundred bytes.
pub const LONGEST_MESSAGE: usize = 4 << 10;
/// Stands for the part of a message that was cut off.
const CUT: &str = " ...";
/// Where gRPC has the message of a failure, percent-encoded.
const MESSAGE: HeaderName = HeaderName::from_static("grpc-message");
/// The metadata of an answer that a caller here needs. Anything else, as the details of a failure,
/// would be passed on unread.
const NEEDED: [HeaderName; 4] = [
    CONTENT_TYPE,
    CONTENT_ENCODING,
    HeaderName::from_static("grpc-encoding"),
    HeaderName::from_static("grpc-status"),
];

/// Removes from the metadata of an answer all that is not needed, and sanitizes its message.
pub(super) fn clean(head: &mut HeaderMap) {
    let mut needed = HeaderMap::with_capacity(NEEDED.len());
    for name in NEEDED {
        if let Some(value) = head.remove(&name) {
            needed.insert(name, value);
        }
    }
    if let Some(message) = head.remove(MESSAGE) {
        let told = decoded(message.as_bytes());
        let told = String::from_utf8_lossy(&told);
        let message = if told.len() <= LONGEST_MESSAGE && !told.contains(is_no_word) {
            message
        } else {
            // Made of printable ASCII: it is a value of a head.
            HeaderValue::try_from(encoded(&sanitize(&told)))
                .unwrap_or_else(|_| HeaderValue::from_static(""))
        };
        needed.insert(MESSAGE, message);
    }
    *head = needed;
}

/// Returns a cell's words without control characters other than line ends and tabs, and no longer
/// than [`LONGEST_MESSAGE`].
pub fn sanitize(words: &str) -> String {
    shortened(words).replace(is_no_word, " ")
}

/// Returns a text, or as much of it as fits into [`LONGEST_MESSAGE`].
pub fn shortened(text: &str) -> String {
    if text.len() <= LONGEST_MESSAGE {
        return text.to_owned();
    }
    let mut short = text[..text.floor_char_boundary(LONGEST_MESSAGE - CUT.len())].to_owned();
    short.push_str(CUT);
    short
}

/// Returns whether a character is a control character other than a line end or a tab.
pub fn is_no_word(character: char) -> bool {
    character.is_control() && !matches!(character, '\n' | '\t')
}

/// Decodes percent-encoding; invalid sequences stay as they are.
fn decoded(text: &[u8]) -> Vec<u8> {
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

fn encoded(text: &str) -> String {
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
        let mut head = HeaderMap::new();
        head.insert(MESSAGE, HeaderValue::from_str(message).unwrap());
        head.insert("grpc-status", HeaderValue::from_static("2"));
        head.insert("grpc-status-details-bin", HeaderValue::from_static("AAAA"));
        head.append("x-more", HeaderValue::from_static("one"));
        head.append("x-more", HeaderValue::from_static("other"));
        clean(&mut head);
        assert_eq!((head.len(), &head["grpc-status"]), (2, &HeaderValue::from_static("2")));
        head.get(MESSAGE).unwrap().to_str().unwrap().to_owned()
    }

    /// Verifies L11.
    #[test]
    fn words_stay_and_what_is_none_becomes_a_blank() {
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
    fn message_beyond_the_limit_is_cut_between_characters() {
        assert_eq!(cleaned(&"x".repeat(LONGEST_MESSAGE)), "x".repeat(LONGEST_MESSAGE));
        let cut = cleaned(&"x".repeat(LONGEST_MESSAGE + 1));
        assert_eq!(cut, format!("{} ...", "x".repeat(LONGEST_MESSAGE - CUT.len())));
        for text in ["\u{e4}".repeat(LONGEST_MESSAGE), "\u{1f600}".repeat(LONGEST_MESSAGE)] {
            let short = sanitize(&text);
            assert!((LONGEST_MESSAGE - 4..=LONGEST_MESSAGE).contains(&short.len()));
            assert!(short.ends_with(CUT));
        }
    }
}
