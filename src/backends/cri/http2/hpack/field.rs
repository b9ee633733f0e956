//! One field of a header block, as it is kept: read and checked once, however often it comes.

use bytes::Bytes;
use http::{HeaderName, HeaderValue, header};

/// What begins with a colon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in super::super) enum Pseudo {
    Authority,
    Method,
    Path,
    Scheme,
    Status,
}

/// The name of a field.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in super::super) enum Name {
    Pseudo(Pseudo),
    Header(HeaderName),
    /// One that HTTP/2 has not: in capitals, of one connection, or no name at all.
    Bad,
}

/// A field of a header block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in super::super) struct Field {
    pub(in super::super) name: Name,
    pub(in super::super) value: HeaderValue,
    /// Whether name and value are such as may be.
    pub(in super::super) is_fine: bool,
    /// How long the name is.
    pub(super) name_length: usize,
    /// How long the value came.
    value_length: usize,
}

impl Name {
    pub(super) fn read(name: &[u8]) -> Self {
        match name {
            b":authority" => Self::Pseudo(Pseudo::Authority),
            b":method" => Self::Pseudo(Pseudo::Method),
            b":path" => Self::Pseudo(Pseudo::Path),
            b":scheme" => Self::Pseudo(Pseudo::Scheme),
            b":status" => Self::Pseudo(Pseudo::Status),
            // RFC 9113, 8.2.2
            b"connection" | b"keep-alive" | b"proxy-connection" | b"transfer-encoding" | b"upgrade" => Self::Bad,
            _ => HeaderName::from_lowercase(name).map_or(Self::Bad, Self::Header),
        }
    }
}

impl Field {
    pub(super) fn new(name: Name, name_length: usize, value: &[u8]) -> Self {
        let value_length = value.len();
        let (value, is_value) = match HeaderValue::from_maybe_shared(Bytes::copy_from_slice(value)) {
            Ok(value) => (value, true),
            Err(_) => (HeaderValue::from_static(""), false),
        };
        let is_te = matches!(&name, Name::Header(name) if *name == header::TE);
        let is_fine = is_value && name != Name::Bad && (!is_te || value == "trailers");
        Self { name, value, is_fine, name_length, value_length }
    }

    /// What it takes of a table, and of what a list of fields may have (RFC 7541, 4.1).
    pub(in super::super) fn size(&self) -> usize {
        self.name_length + self.value_length + 32
    }
}
