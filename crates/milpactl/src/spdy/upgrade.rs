//! URLs of streaming servers, and the upgrade of a connection to SPDY. Pure.

use std::net::SocketAddr;

use httparse::{EMPTY_HEADER, Response, Status};

/// Longest head of a response in bytes.
pub(crate) const MAX_HEAD_BYTES: usize = 16 << 10;
/// Longest body of a refusal that is read, in bytes.
pub(crate) const MAX_REFUSAL_BYTES: usize = 4 << 10;
/// Most header fields of a response.
const MAX_HEADERS: usize = 64;
/// The protocol's name in the header Upgrade.
const SPDY: &str = "SPDY/3.1";
/// The header that names the protocol of the streams.
const PROTOCOL_HEADER: &str = "X-Stream-Protocol-Version";

/// Error of opening a connection.
#[derive(Debug, thiserror::Error)]
pub enum UpgradeError {
    /// The URL is not of a streaming server.
    #[error("streaming URL {0:?}; allowed: http://ADDRESS:PORT/TOKEN")]
    Url(String),
    /// The connection failed.
    #[error("connection to the streaming server: {0}")]
    Io(#[from] std::io::Error),
    /// The server did not answer in time.
    #[error("the streaming server did not answer within {0} s")]
    TimedOut(u64),
    /// The response is not HTTP.
    #[error("the streaming server's response is not HTTP: {0}")]
    Syntax(#[from] httparse::Error),
    /// The head of the response is too long.
    #[error("the streaming server's head is longer than {MAX_HEAD_BYTES} bytes")]
    LongHead,
    /// The server refuses.
    #[error("the streaming server refuses with {status}: {body}")]
    Refused {
        /// The status of HTTP.
        status: u16,
        /// The body, or the reason of the status.
        body: String,
    },
    /// The server chose another protocol.
    #[error("the streaming server chose the protocol {chosen:?}; allowed: {wanted}")]
    Protocol {
        /// The requested protocol.
        wanted: String,
        /// The protocol that the server chose, or "".
        chosen: String,
    },
}

/// Address and path of a streaming URL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// The address of the server.
    pub address: SocketAddr,
    /// The path with the query.
    pub path: String,
}

impl Target {
    /// Parses a URL of plain HTTP with a literal address and a port.
    ///
    /// # Errors
    /// Any other URL.
    pub fn parse(url: &str) -> Result<Self, UpgradeError> {
        let parsed = || {
            let (authority, path) = url.strip_prefix("http://")?.split_once('/')?;
            let is_path = path.bytes().all(|byte| byte.is_ascii_graphic());
            let address = authority.parse().ok().filter(|_| is_path)?;
            Some(Self { address, path: format!("/{path}") })
        };
        parsed().ok_or_else(|| UpgradeError::Url(url.chars().take(200).collect()))
    }

    /// Returns the head of the request for a protocol such as `v4.channel.k8s.io`.
    pub(crate) fn request(&self, protocol: &str) -> String {
        let Self { address, path } = self;
        format!(
            "POST {path} HTTP/1.1\r\nHost: {address}\r\nConnection: Upgrade\r\n\
             Upgrade: {SPDY}\r\n{PROTOCOL_HEADER}: {protocol}\r\n\r\n"
        )
    }
}

/// Head of a response.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ResponseHead {
    pub(crate) status: u16,
    pub(crate) reason: String,
    /// The chosen protocol, or "".
    pub(crate) protocol: String,
    /// Length of the body, if it is declared.
    pub(crate) body_bytes: Option<usize>,
    /// Length of the head in bytes.
    pub(crate) length: usize,
}

/// Parses the head of a response; `None` if it is incomplete.
pub(crate) fn response(bytes: &[u8]) -> Result<Option<ResponseHead>, UpgradeError> {
    let mut headers = [EMPTY_HEADER; MAX_HEADERS];
    let mut head = Response::new(&mut headers);
    let Status::Complete(length) = head.parse(bytes)? else {
        let is_long = bytes.len() >= MAX_HEAD_BYTES;
        return if is_long { Err(UpgradeError::LongHead) } else { Ok(None) };
    };
    let field = |name: &str| {
        let found = head.headers.iter().find(|field| field.name.eq_ignore_ascii_case(name));
        found.and_then(|field| std::str::from_utf8(field.value).ok()).map(str::trim)
    };
    Ok(Some(ResponseHead {
        status: head.code.unwrap_or_default(),
        reason: head.reason.unwrap_or_default().to_owned(),
        protocol: field(PROTOCOL_HEADER).unwrap_or_default().to_owned(),
        body_bytes: field("content-length").and_then(|length| length.parse().ok()),
        length,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn url_has_a_literal_address_a_port_and_a_printable_path() {
        let target = Target::parse("http://127.0.0.1:80/token?x=1").unwrap();
        assert_eq!((target.address.port(), target.path.as_str()), (80, "/token?x=1"));
        assert!(Target::parse("http://[::1]:80/").is_ok());
        for url in ["", "https://127.0.0.1:80/x", "http://host:80/x", "http://127.0.0.1/x"] {
            assert!(matches!(Target::parse(url), Err(UpgradeError::Url(_))), "{url}");
        }
        assert!(Target::parse("http://127.0.0.1:80/a\r\nb").is_err());
    }

    #[test]
    fn response_is_parsed_when_it_is_whole_and_bounded() {
        let text = "HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\nbody";
        assert_eq!(response(&text.as_bytes()[..30]).unwrap(), None);
        let head = response(text.as_bytes()).unwrap().unwrap();
        assert_eq!((head.status, head.body_bytes, &text[head.length..]), (404, Some(4), "body"));
        let text = "HTTP/1.1 101 S\r\nx-stream-protocol-version: v4\r\n\r\n";
        assert_eq!(response(text.as_bytes()).unwrap().unwrap().protocol, "v4");
        assert!(matches!(response(b"\x80\x03"), Err(UpgradeError::Syntax(_))));
        let long = format!("HTTP/1.1 101 S\r\nx: {}", "y".repeat(MAX_HEAD_BYTES));
        assert!(matches!(response(long.as_bytes()), Err(UpgradeError::LongHead)));
    }
}
