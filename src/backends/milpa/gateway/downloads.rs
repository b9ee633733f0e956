//! Downloads of the agent's program, by HTTP/1.1 on the TCP port.
//!
//! A bootstrap script on a stock image has curl and the boot data: the authority's certificate, a
//! cell and its token (HTTP Basic). The token is not spent: the agent needs it to enrol.

use std::{
    convert::Infallible,
    future::ready,
    io,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use base64::{Engine, prelude::BASE64_STANDARD};
use bytes::Bytes;
use http::{HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Empty, combinators::UnsyncBoxBody};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use kiyot_engine::id::CellId;
use kiyot_link::certificate::sha256;
use rustls::ServerConfig;
use tokio::time::{Instant, timeout};
use tokio_rustls::server::TlsStream;

use super::{
    Admission, Refusal,
    agent_program::AgentProgram,
    conn_limit::{ConnLimit, ConnPermit},
    counted_stream::CountedStream,
    refusal_log::RefusalLog,
};

/// The path of the agent's program.
const PATH: &str = "/agent";
/// The most bytes of a request's head. hyper accepts no lower limit.
const MAX_HEAD_BYTES: usize = 8 * 1024;
/// The most header fields of a request.
const MAX_HEADERS: usize = 32;
/// The most downloads at a time.
const MAX_DOWNLOADS: usize = 64;
/// The most downloads of a cell at a time.
const MAX_DOWNLOADS_PER_CELL: usize = 2;
/// The time for which an ended download still counts, so that a cell that repeats it does not fill
/// the node's network.
const COOLDOWN: Duration = Duration::from_secs(5);
/// The timeout of a download. The kernel closes a connection earlier if the peer acknowledges
/// nothing.
const DOWNLOAD_TIMEOUT: Duration = Duration::from_secs(30 * 60);

type Body = UnsyncBoxBody<Bytes, io::Error>;

/// The agent's program, and its downloads.
#[derive(Debug)]
pub(super) struct Downloads {
    program: AgentProgram,
    pub(super) tls: Arc<ServerConfig>,
    limit: ConnLimit<CellId>,
}

impl Downloads {
    pub(super) fn new(program: AgentProgram, tls: ServerConfig) -> Self {
        Self { program, tls: Arc::new(tls), limit: limit() }
    }

    /// Serves a connection with a single request. The permit is returned once the request has shown
    /// a valid token.
    pub(super) async fn serve(
        &self,
        stream: TlsStream<CountedStream>,
        permit: ConnPermit,
        admission: &dyn Admission,
        log: &RefusalLog,
        head_timeout: Duration,
    ) {
        let permit = Mutex::new(Some(permit));
        let service = service_fn(|request: Request<Incoming>| {
            let response = self.respond(&request, admission);
            let response = response.unwrap_or_else(|refused| {
                if let (Refused::Token(Some(refusal)), Some(suppressed)) =
                    (&refused, log.download.admit())
                {
                    let error = refusal as &dyn std::error::Error;
                    tracing::warn!(error, suppressed, "download of the agent program refused");
                }
                refused.response()
            });
            if response.status().is_success() {
                permit.lock().unwrap_or_else(PoisonError::into_inner).take();
            }
            ready(Ok::<_, Infallible>(response))
        });
        let served = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(head_timeout)
            .max_buf_size(MAX_HEAD_BYTES)
            .max_headers(MAX_HEADERS)
            .keep_alive(false)
            .serve_connection(TokioIo::new(stream), service);
        if let Ok(Err(error)) = timeout(DOWNLOAD_TIMEOUT, served).await
            && let Some(suppressed) = log.handshake.admit()
        {
            tracing::debug!(%error, suppressed, "download of the agent program failed");
        }
    }

    fn respond(
        &self,
        request: &Request<Incoming>,
        admission: &dyn Admission,
    ) -> Result<Response<Body>, Refused> {
        let (cell, token) = credentials(request.headers().get(header::AUTHORIZATION))
            .ok_or(Refused::Token(None))?;
        let cell = admission
            .expects(&cell, &sha256(token.as_bytes()))
            .map_err(|refusal| Refused::Token(Some(refusal)))?;
        if request.uri().path() != PATH {
            return Err(Refused::Path);
        }
        if request.method() != Method::GET {
            return Err(Refused::Method);
        }
        let permit = self.limit.acquire(cell.clone(), Instant::now()).ok_or(Refused::Busy)?;
        tracing::debug!(%cell, bytes = self.program.size(), "agent program is downloaded");
        let body = self.program.body().map_frame(move |frame| {
            // Held until the body is dropped.
            let _ = &permit;
            frame
        });
        let mut response = Response::new(body.boxed_unsync());
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_LENGTH, self.program.size().into());
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
        Ok(response)
    }
}

fn limit() -> ConnLimit<CellId> {
    ConnLimit::new(MAX_DOWNLOADS, MAX_DOWNLOADS_PER_CELL, COOLDOWN)
}

/// The reason for refusing a request.
#[derive(Debug)]
enum Refused {
    /// The request has no token, or an invalid one.
    Token(Option<Refusal>),
    Path,
    Method,
    Busy,
}

impl Refused {
    fn response(&self) -> Response<Body> {
        let mut response =
            Response::new(Empty::new().map_err(|never| match never {}).boxed_unsync());
        let (status, header) = match self {
            // Without this header, wget does not send its credentials.
            Self::Token(_) => (
                StatusCode::UNAUTHORIZED,
                Some((header::WWW_AUTHENTICATE, HeaderValue::from_static("Basic realm=\"kiyot\""))),
            ),
            Self::Path => (StatusCode::NOT_FOUND, None),
            Self::Method => (
                StatusCode::METHOD_NOT_ALLOWED,
                Some((header::ALLOW, HeaderValue::from_static("GET"))),
            ),
            Self::Busy => (
                StatusCode::SERVICE_UNAVAILABLE,
                Some((header::RETRY_AFTER, COOLDOWN.as_secs().into())),
            ),
        };
        *response.status_mut() = status;
        if let Some((name, value)) = header {
            response.headers_mut().insert(name, value);
        }
        response
    }
}

/// Returns the cell and the token of an `Authorization` header of the scheme Basic (RFC 7617).
fn credentials(header: Option<&HeaderValue>) -> Option<(String, String)> {
    let (scheme, encoded) = header?.to_str().ok()?.split_once(' ')?;
    if !scheme.eq_ignore_ascii_case("basic") {
        return None;
    }
    let decoded = String::from_utf8(BASE64_STANDARD.decode(encoded.trim()).ok()?).ok()?;
    let (cell, token) = decoded.split_once(':')?;
    Some((cell.to_owned(), token.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Verifies L25.
    #[tokio::test(start_paused = true)]
    async fn downloads_are_limited_and_count_for_five_seconds_after_their_end() {
        let limit = limit();
        let begin = |cell: &CellId| limit.acquire(cell.clone(), Instant::now());
        let cells: Vec<_> = (0..32).map(|_| CellId::mint().unwrap()).collect();
        let mut held: Vec<_> = cells.iter().chain(&cells).map(&begin).collect();
        assert!(held.len() == 64 && held.iter().all(Option::is_some));
        let other = CellId::mint().unwrap();
        assert!(begin(&other).is_none(), "64 downloads in total");
        held.truncate(32);
        tokio::time::advance(Duration::from_millis(4999)).await;
        assert!(begin(&other).is_none(), "ended downloads still count");
        tokio::time::advance(Duration::from_millis(1)).await;
        let _others = [(); 2].map(|()| begin(&other).unwrap());
        assert!(begin(&other).is_none(), "two downloads of a cell");
    }

    #[test]
    fn credentials_are_read_from_the_scheme_basic_only() {
        let read = |text: &str| credentials(Some(&HeaderValue::from_str(text).unwrap()));
        let expected = Some(("cell-a".to_owned(), "to:ken".to_owned()));
        assert_eq!(read("Basic Y2VsbC1hOnRvOmtlbg=="), expected);
        assert_eq!(read("basic  Y2VsbC1hOnRvOmtlbg== "), expected);
        for other in
            ["", "Basic", "Basic ", "Basic ?", "Basic Y2VsbC1h", "Bearer Y2VsbC1hOnRvOmtlbg=="]
        {
            assert_eq!(read(other), None, "{other}");
        }
        assert_eq!(credentials(None), None);
    }
}
