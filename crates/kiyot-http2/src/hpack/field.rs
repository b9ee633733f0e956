//! One field of a header block, as it is kept: read and checked once, however often it comes.

use bytes::Bytes;
use http::{
    HeaderName, HeaderValue, Method, StatusCode, header,
    uri::{Authority, PathAndQuery, Scheme},
};

/// What begins with a colon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pseudo {
    Authority,
    Method,
    Path,
    Scheme,
    Status,
}

/// What a field says whose name begins with a colon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum PseudoValue {
    Authority(Authority),
    Method(Method),
    Path(PathAndQuery),
    Scheme(Scheme),
    Status(StatusCode),
}

impl PseudoValue {
    fn parse(what: Pseudo, value: &[u8]) -> Option<Self> {
        match what {
            // grpc-go says the path that it dials, where it was not told what to say. No CRI server
            // looks at it, and a URI can't have it.
            Pseudo::Authority => Some(Self::Authority(
                Authority::try_from(value).unwrap_or(Authority::from_static("localhost")),
            )),
            Pseudo::Method => Method::from_bytes(value).ok().map(Self::Method),
            // RFC 9113, 8.3.1
            Pseudo::Path if !value.starts_with(b"/") && value != b"*" => None,
            Pseudo::Path => PathAndQuery::try_from(value).ok().map(Self::Path),
            Pseudo::Scheme => Scheme::try_from(value).ok().map(Self::Scheme),
            Pseudo::Status => StatusCode::from_bytes(value).ok().map(Self::Status),
        }
    }
}

/// The name of a field.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Name {
    Pseudo(Pseudo),
    Header(HeaderName),
    /// One that HTTP/2 has not: in capitals, of one connection, or no name at all.
    Invalid,
}

/// A field of a header block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Field {
    pub(crate) name: Name,
    pub(crate) value: HeaderValue,
    /// Of a name with a colon.
    pub(crate) pseudo: Option<PseudoValue>,
    /// Whether name and value are such as may be.
    pub(crate) is_valid: bool,
    /// How long the name is.
    pub(super) name_length: usize,
    /// How long the value came.
    value_length: usize,
}

impl Name {
    pub(super) fn parse(name: &[u8]) -> Self {
        match name {
            b":authority" => Self::Pseudo(Pseudo::Authority),
            b":method" => Self::Pseudo(Pseudo::Method),
            b":path" => Self::Pseudo(Pseudo::Path),
            b":scheme" => Self::Pseudo(Pseudo::Scheme),
            b":status" => Self::Pseudo(Pseudo::Status),
            // RFC 9113, 8.2.2
            b"connection" | b"keep-alive" | b"proxy-connection" | b"transfer-encoding"
            | b"upgrade" => Self::Invalid,
            _ => HeaderName::from_lowercase(name).map_or(Self::Invalid, Self::Header),
        }
    }
}

impl Field {
    pub(super) fn new(name: Name, name_length: usize, value: &[u8]) -> Self {
        let value_length = value.len();
        let pseudo =
            if let Name::Pseudo(what) = name { PseudoValue::parse(what, value) } else { None };
        let (value, is_value) = match HeaderValue::from_maybe_shared(Bytes::copy_from_slice(value))
        {
            Ok(value) => (value, true),
            Err(_) => (HeaderValue::from_static(""), false),
        };
        let is_te = matches!(&name, Name::Header(name) if *name == header::TE);
        let is_valid = match name {
            Name::Pseudo(_) => is_value && pseudo.is_some(),
            Name::Header(_) => is_value && (!is_te || value == "trailers"),
            Name::Invalid => false,
        };
        Self { name, value, pseudo, is_valid, name_length, value_length }
    }

    /// What it takes of a table, and of what a list of fields may have (RFC 7541, 4.1).
    pub(crate) fn size(&self) -> usize {
        self.name_length + self.value_length + 32
    }
}
