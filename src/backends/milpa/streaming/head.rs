//! The parts of HTTP/1.1 heads that a tunnel needs. Pure; accepts any bytes.

use httparse::{EMPTY_HEADER, ParserConfig, Request, Response, Status};

/// Longest head, including the empty line, in bytes.
pub(super) const MAX_HEAD_BYTES: usize = 64 << 10;

/// Most header fields of a head.
const MAX_HEADERS: usize = 1024;

/// Error of parsing a head.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum HeadError {
    /// The head exceeds a bound.
    #[error("an HTTP head of more than {MAX_HEAD_BYTES} bytes or {MAX_HEADERS} fields")]
    TooLong,
    #[error("no HTTP/1 head: {0}")]
    Syntax(httparse::Error),
    /// The head is not supported.
    #[error("no HTTP/1 head: {0}")]
    Unsupported(&'static str),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RequestHead {
    pub(super) method: String,
    pub(super) target: String,
    /// Offset of the target.
    target_at: usize,
}

/// End of a response's body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Body {
    /// After this many bytes.
    Length(u64),
    /// With the last chunk.
    Chunked,
    /// With the connection.
    Close,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ResponseHead {
    pub(super) status: u16,
    pub(super) body: Body,
    /// Length of the head in bytes, including the empty line.
    pub(super) length: usize,
}

impl RequestHead {
    /// Returns the request with another target; all other bytes, also after the head, stay.
    pub(super) fn retargeted(&self, bytes: &[u8], target: &str) -> Vec<u8> {
        let (before, rest) = bytes.split_at(self.target_at.min(bytes.len()));
        let after = rest.get(self.target.len()..).unwrap_or_default();
        [before, target.as_bytes(), after].concat()
    }

    /// Returns the token of the target: the only component of its path.
    pub(super) fn token(&self) -> Option<&str> {
        let path = self.target.split_once('?').map_or(self.target.as_str(), |(path, _)| path);
        path.strip_prefix('/').filter(|token| !token.is_empty() && !token.contains('/'))
    }
}

impl From<httparse::Error> for HeadError {
    fn from(error: httparse::Error) -> Self {
        match error {
            httparse::Error::TooManyHeaders => Self::TooLong,
            error => Self::Syntax(error),
        }
    }
}

/// Parses a request's head; `None` if it is incomplete. `seen` bytes were examined before.
pub(super) fn request(bytes: &[u8], seen: usize) -> Result<Option<RequestHead>, HeadError> {
    let Some(end) = end_of_head(bytes, seen)? else { return Ok(None) };
    let mut headers = vec![EMPTY_HEADER; MAX_HEADERS];
    let mut head = Request::new(&mut headers);
    let parsed = config().parse_request(&mut head, &bytes[..end])?;
    let (Status::Complete(_), Some(method), Some(target)) = (parsed, head.method, head.path) else {
        return Err(HeadError::Unsupported("the request line is absent"));
    };
    if !method.bytes().all(|byte| byte.is_ascii_uppercase()) {
        return Err(HeadError::Unsupported("the method is not in upper-case letters"));
    }
    if !target.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(HeadError::Unsupported("the target is not printable"));
    }
    Ok(Some(RequestHead {
        method: method.to_owned(),
        target: target.to_owned(),
        target_at: target.as_ptr().addr() - bytes.as_ptr().addr(),
    }))
}

/// Parses a response's head; `None` if it is incomplete. `seen` bytes were examined before.
pub(super) fn response(bytes: &[u8], seen: usize) -> Result<Option<ResponseHead>, HeadError> {
    let Some(end) = end_of_head(bytes, seen)? else { return Ok(None) };
    let mut headers = vec![EMPTY_HEADER; MAX_HEADERS];
    let mut head = Response::new(&mut headers);
    let parsed = config().parse_response(&mut head, &bytes[..end])?;
    let (Status::Complete(length), Some(status @ 100..)) = (parsed, head.code) else {
        return Err(HeadError::Unsupported("the status is not a number of three digits"));
    };
    let mut body = Body::Close;
    for field in head.headers {
        let value = field.value.trim_ascii();
        if field.name.eq_ignore_ascii_case("transfer-encoding")
            && value.to_ascii_lowercase().ends_with(b"chunked")
        {
            body = Body::Chunked;
        } else if field.name.eq_ignore_ascii_case("content-length") && body == Body::Close {
            let length = number(value);
            body = Body::Length(
                length.ok_or(HeadError::Unsupported("the content-length is not a number"))?,
            );
        }
    }
    if status < 200 || status == 204 || status == 304 {
        body = Body::Length(0);
    }
    Ok(Some(ResponseHead { status, body, length }))
}

/// Returns a configuration that skips invalid header fields, because both ends check them.
fn config() -> ParserConfig {
    let mut config = ParserConfig::default();
    config.ignore_invalid_headers_in_requests(true).ignore_invalid_headers_in_responses(true);
    config
}

/// Returns the length of the head, including the empty line.
fn end_of_head(bytes: &[u8], seen: usize) -> Result<Option<usize>, HeadError> {
    const END: &[u8] = b"\r\n\r\n";
    let within = &bytes[..bytes.len().min(MAX_HEAD_BYTES)];
    let from = seen.saturating_sub(END.len() - 1).min(within.len());
    match within[from..].windows(END.len()).position(|window| window == END) {
        Some(at) => Ok(Some(from + at + END.len())),
        None if bytes.len() >= MAX_HEAD_BYTES => Err(HeadError::TooLong),
        None => Ok(None),
    }
}

/// Parses a decimal number of digits only.
fn number(digits: &[u8]) -> Option<u64> {
    let digits = std::str::from_utf8(digits)
        .ok()
        .filter(|digits| digits.bytes().all(|byte| byte.is_ascii_digit()))?;
    digits.parse().ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn retargeting_replaces_only_the_target() {
        let bytes = b"POST /abc?x=1 HTTP/1.1\r\nHost: a\r\nUpgrade: SPDY/3.1\r\n\r\nrest\0";
        let head = request(bytes, 0).unwrap().unwrap();
        assert_eq!((head.method.as_str(), head.token()), ("POST", Some("abc")));
        assert_eq!(
            head.retargeted(bytes, "/exec/T?y"),
            b"POST /exec/T?y HTTP/1.1\r\nHost: a\r\nUpgrade: SPDY/3.1\r\n\r\nrest\0"
        );
        let bytes = b"\r\nGET /a HTTP/1.0\nno field\r\nX : y\r\n\r\n\xff";
        let head = request(bytes, 0).unwrap().unwrap();
        let expected = b"\r\nGET /bcd HTTP/1.0\nno field\r\nX : y\r\n\r\n\xff";
        assert_eq!(head.retargeted(bytes, "/bcd"), expected);
    }

    #[test]
    fn token_is_the_only_component_of_the_path() {
        for (target, token) in [
            ("/a", Some("a")),
            ("/", None),
            ("a", None),
            ("/a/b", None),
            ("//a", None),
            ("http://h/a", None),
            ("*", None),
        ] {
            let head =
                request(format!("GET {target} HTTP/1.1\r\n\r\n").as_bytes(), 0).unwrap().unwrap();
            assert_eq!(head.token(), token, "{target}");
        }
    }

    #[test]
    fn invalid_request_is_refused() {
        for bad in [
            "\r\n\r\n",
            "GET /\r\n\r\n",
            "GET / HTTP/2\r\n\r\n",
            "get / HTTP/1.1\r\n\r\n",
            "GET  / HTTP/1.1\r\n\r\n",
            "GET /\x01 HTTP/1.1\r\n\r\n",
        ] {
            let found = request(bad.as_bytes(), 0);
            let is_refused = matches!(found, Err(HeadError::Syntax(_) | HeadError::Unsupported(_)));
            assert!(is_refused, "{bad:?}: {found:?}");
        }
        let fields = format!("GET / HTTP/1.1\r\n{}\r\n", "a:\r\n".repeat(MAX_HEADERS + 1));
        assert_eq!(request(fields.as_bytes(), 0), Err(HeadError::TooLong));
        assert_eq!(request(&vec![b'a'; MAX_HEAD_BYTES], 0), Err(HeadError::TooLong));
        assert_eq!(request(b"GET / HTTP/1.1\r\nHost", 0), Ok(None));
    }

    #[test]
    fn response_head_determines_the_end_of_the_body() {
        for (text, status, body) in [
            ("HTTP/1.1 101 Switching Protocols\r\nUpgrade: SPDY/3.1\r\n\r\n", 101, Body::Length(0)),
            ("HTTP/1.1 404 Not Found\r\ncontent-LENGTH:  12 \r\n\r\n", 404, Body::Length(12)),
            (
                "HTTP/1.1 500\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n",
                500,
                Body::Chunked,
            ),
            ("HTTP/1.0 200 OK\r\n\r\n", 200, Body::Close),
        ] {
            let head = response(text.as_bytes(), 0).unwrap().unwrap();
            assert_eq!((head.status, head.body, head.length), (status, body, text.len()));
        }
        for bad in [
            "HTTP/2 200 OK\r\n\r\n",
            "HTTP/1.1 xx OK\r\n\r\n",
            "HTTP/1.1 20 OK\r\n\r\n",
            "HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
            "\r\n\r\n",
        ] {
            assert!(response(bad.as_bytes(), 0).is_err(), "{bad:?}");
        }
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_do_not_panic(
            bytes in proptest::collection::vec(any::<u8>(), 0..300), seen in 0_usize..400
        ) {
            let _ = request(&bytes, seen);
            let _ = response(&bytes, seen);
        }

        #[test]
        fn parsing_is_independent_of_the_pieces(
            rest in "[ -~\r\n]{0,80}", cuts in proptest::collection::vec(0_usize..120, 0..5)
        ) {
            let bytes = [b"GET /t HTTP/1.1\r\n".as_slice(), rest.as_bytes(), b"\r\n\r\n"].concat();
            let whole = request(&bytes, 0);
            let (mut cuts, mut seen, mut found) = (cuts, 0, Ok(None));
            cuts.sort_unstable();
            for cut in cuts.into_iter().map(|cut| cut.min(bytes.len())).chain([bytes.len()]) {
                found = request(&bytes[..cut], seen);
                if found != Ok(None) { break; }
                seen = cut;
            }
            prop_assert_eq!(found, whole);
        }
    }
}
