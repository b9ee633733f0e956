//! Heads of HTTP/1.1 messages, as far as a tunnel must know them. Pure; takes any bytes.

/// Longest head that is taken, the empty line included.
pub(super) const MAX_HEAD: usize = 64 << 10;

/// Why bytes are no head.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum HeadError {
    /// It doesn't end where it must.
    #[error("an HTTP head of more than {MAX_HEAD} bytes")]
    TooLong,
    /// Not HTTP/1.
    #[error("no HTTP/1 head: {0}")]
    Malformed(&'static str),
}

/// The head of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RequestHead {
    /// Its method.
    pub(super) method: String,
    /// Its target.
    pub(super) target: String,
    /// Bytes of its first line, the line's end included.
    first_line: usize,
}

/// How the body of an answer ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Body {
    /// After so many bytes.
    Length(u64),
    /// With its last chunk.
    Chunked,
    /// With the connection.
    Close,
}

/// The head of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct AnswerHead {
    /// Its status code.
    pub(super) status: u16,
    /// How its body ends.
    pub(super) body: Body,
    /// Bytes of it, the empty line included.
    pub(super) length: usize,
}

impl RequestHead {
    /// The request with another target; all else, and what follows the head in `bytes`, stays as it
    /// is.
    pub(super) fn retargeted(&self, bytes: &[u8], target: &str) -> Vec<u8> {
        let mut out = format!("{} {target} HTTP/1.1\r\n", self.method).into_bytes();
        out.extend_from_slice(bytes.get(self.first_line..).unwrap_or_default());
        out
    }

    /// The token of its target: the one component of the path.
    pub(super) fn token(&self) -> Option<&str> {
        let path = self.target.split_once('?').map_or(self.target.as_str(), |(path, _)| path);
        path.strip_prefix('/').filter(|token| !token.is_empty() && !token.contains('/'))
    }
}

/// The head that `bytes` begin with; `None` if it isn't whole yet. `seen` bytes were looked at
/// before.
pub(super) fn request(bytes: &[u8], seen: usize) -> Result<Option<RequestHead>, HeadError> {
    let Some(end) = end_of_head(bytes, seen)? else { return Ok(None) };
    let (first_line, line) =
        lines(&bytes[..end]).next().ok_or(HeadError::Malformed("it is empty"))?;
    let line = std::str::from_utf8(line)
        .map_err(|_| HeadError::Malformed("its first line is not text"))?;
    let mut words = line.split(' ');
    let (Some(method), Some(target), Some(version), None) =
        (words.next(), words.next(), words.next(), words.next())
    else {
        return Err(HeadError::Malformed("its first line is not method, target and version"));
    };
    if version != "HTTP/1.1" && version != "HTTP/1.0" {
        return Err(HeadError::Malformed("its version is not HTTP/1.1"));
    }
    if method.is_empty() || !method.bytes().all(|b| b.is_ascii_uppercase()) {
        return Err(HeadError::Malformed("its method is not upper-case letters"));
    }
    if target.is_empty() || !target.bytes().all(|b| b.is_ascii_graphic()) {
        return Err(HeadError::Malformed("its target is not printable"));
    }
    Ok(Some(RequestHead { method: method.to_owned(), target: target.to_owned(), first_line }))
}

/// The head that the bytes of an answer begin with; `None` if it isn't whole yet. `seen` bytes were
/// looked at before.
pub(super) fn answer(bytes: &[u8], seen: usize) -> Result<Option<AnswerHead>, HeadError> {
    let Some(end) = end_of_head(bytes, seen)? else { return Ok(None) };
    let mut lines = lines(&bytes[..end]);
    let (_, line) = lines.next().ok_or(HeadError::Malformed("it is empty"))?;
    let mut words = line.splitn(3, |b| *b == b' ');
    if !words.next().is_some_and(|version| version.starts_with(b"HTTP/1.")) {
        return Err(HeadError::Malformed("its version is not HTTP/1"));
    }
    let status = words
        .next()
        .and_then(number)
        .and_then(|status| u16::try_from(status).ok())
        .filter(|status| (100..1000).contains(status));
    let status =
        status.ok_or(HeadError::Malformed("its status is not a number of three digits"))?;
    let mut body = Body::Close;
    for (_, line) in lines {
        let Some(colon) = line.iter().position(|b| *b == b':') else { continue };
        let (name, value) = (&line[..colon], line[colon + 1..].trim_ascii());
        if name.eq_ignore_ascii_case(b"transfer-encoding")
            && value.to_ascii_lowercase().ends_with(b"chunked")
        {
            body = Body::Chunked;
        } else if name.eq_ignore_ascii_case(b"content-length") && body == Body::Close {
            body = Body::Length(
                number(value).ok_or(HeadError::Malformed("its content-length is no number"))?,
            );
        }
    }
    if status < 200 || status == 204 || status == 304 {
        body = Body::Length(0);
    }
    Ok(Some(AnswerHead { status, body, length: end }))
}

/// How many bytes the head has, the empty line included.
fn end_of_head(bytes: &[u8], seen: usize) -> Result<Option<usize>, HeadError> {
    const END: &[u8] = b"\r\n\r\n";
    let within = &bytes[..bytes.len().min(MAX_HEAD)];
    let from = seen.saturating_sub(END.len() - 1).min(within.len());
    match within[from..].windows(END.len()).position(|window| window == END) {
        Some(at) => Ok(Some(from + at + END.len())),
        None if bytes.len() >= MAX_HEAD => Err(HeadError::TooLong),
        None => Ok(None),
    }
}

/// The lines without their ends, each with the position after its end.
fn lines(head: &[u8]) -> impl Iterator<Item = (usize, &[u8])> {
    let mut at = 0;
    head.split_inclusive(|b| *b == b'\n').map(move |line| {
        at += line.len();
        (at, line.strip_suffix(b"\r\n").or(line.strip_suffix(b"\n")).unwrap_or(line))
    })
}

/// A decimal number of digits only.
fn number(digits: &[u8]) -> Option<u64> {
    let digits = std::str::from_utf8(digits)
        .ok()
        .filter(|digits| digits.bytes().all(|b| b.is_ascii_digit()))?;
    digits.parse().ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_request_is_retargeted_and_nothing_else() {
        let bytes = b"POST /abc?x=1 HTTP/1.1\r\nHost: a\r\nUpgrade: SPDY/3.1\r\n\r\nrest\0";
        let head = request(bytes, 0).unwrap().unwrap();
        assert_eq!((head.method.as_str(), head.token()), ("POST", Some("abc")));
        assert_eq!(
            head.retargeted(bytes, "/exec/T?y"),
            b"POST /exec/T?y HTTP/1.1\r\nHost: a\r\nUpgrade: SPDY/3.1\r\n\r\nrest\0"
        );
    }

    #[test]
    fn tokens_are_one_component() {
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
    fn what_is_no_request_is_refused() {
        for bad in [
            "\r\n\r\n",
            "GET /\r\n\r\n",
            "GET / HTTP/2\r\n\r\n",
            "get / HTTP/1.1\r\n\r\n",
            "GET  / HTTP/1.1\r\n\r\n",
            "GET /\x01 HTTP/1.1\r\n\r\n",
        ] {
            assert!(matches!(request(bad.as_bytes(), 0), Err(HeadError::Malformed(_))), "{bad:?}");
        }
        assert_eq!(request(&vec![b'a'; MAX_HEAD], 0), Err(HeadError::TooLong));
        assert_eq!(request(b"GET / HTTP/1.1\r\nHost", 0), Ok(None));
    }

    #[test]
    fn answers_say_how_they_end() {
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
            let head = answer(text.as_bytes(), 0).unwrap().unwrap();
            assert_eq!((head.status, head.body, head.length), (status, body, text.len()));
        }
        for bad in [
            "HTTP/2 200 OK\r\n\r\n",
            "HTTP/1.1 xx OK\r\n\r\n",
            "HTTP/1.1 20 OK\r\n\r\n",
            "HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
            "\r\n\r\n",
        ] {
            assert!(answer(bad.as_bytes(), 0).is_err(), "{bad:?}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_taken(bytes in proptest::collection::vec(any::<u8>(), 0..300), seen in 0_usize..400) {
            let _ = request(&bytes, seen);
            let _ = answer(&bytes, seen);
        }

        #[test]
        fn the_pieces_in_which_it_comes_do_not_matter(rest in "[ -~\r\n]{0,80}", cuts in proptest::collection::vec(0_usize..120, 0..5)) {
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
