//! Error codes.

use std::fmt;

/// Error code of RST_STREAM and GOAWAY (RFC 9113, 7). Unknown codes are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reason(u32);

impl Reason {
    /// Graceful end.
    pub const NO_ERROR: Self = Self(0);
    /// Protocol error.
    pub const PROTOCOL_ERROR: Self = Self(1);
    /// Flow-control protocol violated.
    pub const FLOW_CONTROL_ERROR: Self = Self(3);
    /// Frame received on a closed stream.
    pub const STREAM_CLOSED: Self = Self(5);
    /// Frame with an invalid length.
    pub const FRAME_SIZE_ERROR: Self = Self(6);
    /// Stream not processed; it may be sent again.
    pub const REFUSED_STREAM: Self = Self(7);
    /// Stream no longer needed.
    pub const CANCEL: Self = Self(8);
    /// Header block that can't be decoded.
    pub const COMPRESSION_ERROR: Self = Self(9);
    /// Peer causes excessive load.
    pub const ENHANCE_YOUR_CALM: Self = Self(11);
}

/// Names, by code.
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
    fn names_and_codes_match_the_rfc() {
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
