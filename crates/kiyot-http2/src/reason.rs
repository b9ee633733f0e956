//! The codes that say why a stream or a connection ends.

use std::fmt;

/// An error code (RFC 9113, 7). Any number may come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reason(u32);

impl Reason {
    /// Nothing is wrong.
    pub const NO_ERROR: Self = Self(0);
    /// The peer violated the protocol.
    pub const PROTOCOL_ERROR: Self = Self(1);
    /// The peer violated the flow-control protocol.
    pub const FLOW_CONTROL_ERROR: Self = Self(3);
    /// A frame came behind the end of its stream.
    pub const STREAM_CLOSED: Self = Self(5);
    /// A frame has a length that it may not have.
    pub const FRAME_SIZE_ERROR: Self = Self(6);
    /// Nothing was done with the stream: it may be sent again.
    pub const REFUSED_STREAM: Self = Self(7);
    /// The stream is not wanted any more.
    pub const CANCEL: Self = Self(8);
    /// A header block can't be read.
    pub const COMPRESSION_ERROR: Self = Self(9);
    /// The peer does too much.
    pub const ENHANCE_YOUR_CALM: Self = Self(11);
}

/// Their names, by number.
const NAMES: [&str; 14] = [
    "NO_ERROR",
    "PROTOCOL_ERROR",
    "INTERNAL_ERROR",
    "FLOW_CONTROL_ERROR",
    "SETTINGS_TIMEOUT",
    "STREAM_CLOSED",
    "FRAME_SIZE_ERROR",
    "REFUSED_STREAM",
    "CANCEL",
    "COMPRESSION_ERROR",
    "CONNECT_ERROR",
    "ENHANCE_YOUR_CALM",
    "INADEQUATE_SECURITY",
    "HTTP_1_1_REQUIRED",
];

impl From<u32> for Reason {
    fn from(code: u32) -> Self {
        Self(code)
    }
}

impl From<Reason> for u32 {
    fn from(reason: Reason) -> Self {
        reason.0
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match NAMES.get(self.0 as usize) {
            Some(name) => f.write_str(name),
            None => write!(f, "error {}", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_numbers_are_those_of_the_rfc() {
        for (reason, text) in [
            (Reason::NO_ERROR, "NO_ERROR"),
            (Reason::CANCEL, "CANCEL"),
            (Reason::ENHANCE_YOUR_CALM, "ENHANCE_YOUR_CALM"),
        ] {
            assert_eq!(reason.to_string(), text);
        }
        assert_eq!(Reason::from(0xd).to_string(), "HTTP_1_1_REQUIRED");
        assert_eq!(Reason::from(0xe).to_string(), "error 14");
        let known = [
            Reason::PROTOCOL_ERROR,
            Reason::STREAM_CLOSED,
            Reason::REFUSED_STREAM,
            Reason::COMPRESSION_ERROR,
        ];
        assert_eq!(
            known.map(|reason| reason.to_string()),
            ["PROTOCOL_ERROR", "STREAM_CLOSED", "REFUSED_STREAM", "COMPRESSION_ERROR"]
        );
    }
}
