//! The words of a failed call. They are a cell's, and go to the daemon's log and to the kubelet.

use std::fmt::Write;

use http::{HeaderMap, HeaderValue};

/// Where gRPC has them, percent-encoded.
const MESSAGE: &str = "grpc-message";
/// Where they are once more, in a form that nobody here reads.
const DETAILS: &str = "grpc-status-details-bin";

/// Takes from a failure what a log or a terminal would not show as words: control characters, but
/// for line ends and tabs. And the details, which would be passed on unread.
pub(super) fn clean(head: &mut HeaderMap) {
    head.remove(DETAILS);
    let Some(message) = head.get_mut(MESSAGE) else { return };
    let told = decoded(message.as_bytes());
    let told = String::from_utf8_lossy(&told);
    if told.contains(is_no_word) {
        // Made of printable ASCII: it is a value of a head.
        *message = HeaderValue::try_from(encoded(&told.replace(is_no_word, " ")))
            .unwrap_or_else(|_| HeaderValue::from_static(""));
    }
}

/// Whether a character is none that a log or a terminal shows as a part of words: a control
/// character, but for line ends and tabs.
pub fn is_no_word(character: char) -> bool {
    character.is_control() && !matches!(character, '\n' | '\t')
}

/// What is not percent-encoded as it must be stays as it is.
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
        head.insert(DETAILS, HeaderValue::from_static("AAAA"));
        clean(&mut head);
        assert!(head.get(DETAILS).is_none());
        head.get(MESSAGE).unwrap().to_str().unwrap().to_owned()
    }

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
}
