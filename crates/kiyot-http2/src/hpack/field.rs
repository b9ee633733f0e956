//! Fields of header blocks, parsed and validated once for each table entry.

use bytes::Bytes;
use http::{
    HeaderName, HeaderValue, Method, StatusCode, header,
    uri::{Authority, PathAndQuery, Scheme},
};

/// Name of a pseudo-header field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pseudo {
    Authority,
    Method,
    Path,
    Scheme,
    Status,
}

/// Value of a pseudo-header field.
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
            // grpc-go sends the socket's path as `:authority` by default, which is invalid in a
            // URI. No CRI server uses it.
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

/// Name of a field.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Name {
    Pseudo(Pseudo),
    Header(HeaderName),
    /// Not allowed in HTTP/2: upper case, connection-specific or malformed.
    Invalid,
}

/// Field of a header block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Field {
    pub(crate) name: Name,
    pub(crate) value: HeaderValue,
    /// Value of a pseudo-header field.
    pub(crate) pseudo: Option<PseudoValue>,
    /// False for a name or value that is not allowed.
    pub(crate) is_valid: bool,
    pub(super) name_length: usize,
    /// Length of the received value. An invalid `value` is empty.
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

    /// Returns the size in a table and in a header list (RFC 7541, 4.1).
    pub(crate) fn size(&self) -> usize {
        self.name_length + self.value_length + 32
    }
}
