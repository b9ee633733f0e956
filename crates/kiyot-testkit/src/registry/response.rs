//! Requests to the fake registry, and their responses.

use std::{
    io::{BufRead, BufReader, ErrorKind, Read, Write},
    net::TcpStream,
    sync::atomic::Ordering,
    thread,
    time::Duration,
};

use super::{Access, MANIFEST, Pace, Shared};

/// Idle timeout of a connection.
const IDLE_TIMEOUT: Duration = Duration::from_secs(60);
/// Period in which a stalled transfer checks for its release and the registry's end.
const STALL_POLL_PERIOD: Duration = Duration::from_millis(100);
/// Most bytes of a request body.
const MAX_BODY_BYTES: usize = 64 * 1024;
/// The message of a refused pull.
pub const REFUSAL: &str = "only the violet team may pull this";
/// The valid token of the token service, and the token for wrong credentials.
const TOKENS: [&str; 2] = ["valid-token", "invalid-token"];

struct Request {
    method: String,
    path: String,
    authorization: String,
    body: String,
}

struct Response {
    status: &'static str,
    headers: Vec<(&'static str, String)>,
    body: Vec<u8>,
}

/// Serves a request and closes the connection.
pub(super) fn serve(connection: TcpStream, shared: &Shared) {
    let _ = connection
        .set_read_timeout(Some(IDLE_TIMEOUT))
        .and_then(|()| connection.set_write_timeout(Some(IDLE_TIMEOUT)));
    let Some(request) = read(&connection) else { return };
    shared.content().requests.push(format!("{} {}", request.method, request.path));
    let Response { status, headers, body } = respond(&request, shared);
    let mut head =
        format!("HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {}\r\n", body.len());
    for (name, value) in headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    let body = if request.method == "HEAD" { &[][..] } else { &body };
    // The client may have hung up.
    let _ = (&connection)
        .write_all(format!("{head}\r\n").as_bytes())
        .and_then(|()| send_body(&connection, &request, body, shared));
}

/// Sends a body at the pace of its blob.
fn send_body(
    mut connection: &TcpStream,
    request: &Request,
    body: &[u8],
    shared: &Shared,
) -> std::io::Result<()> {
    let digest = request.path.rsplit_once("/blobs/").map_or("", |(_, digest)| digest);
    let pace = shared.content().paces.get(digest).cloned();
    match pace {
        None => connection.write_all(body),
        Some(Pace::Stalls(bytes)) => {
            let (first, rest) = body.split_at(bytes.min(body.len()));
            connection.write_all(first)?;
            connection.set_read_timeout(Some(STALL_POLL_PERIOD))?;
            while !shared.stopping.load(Ordering::Relaxed)
                && shared.content().paces.contains_key(digest)
            {
                match connection.read(&mut [0; 64]) {
                    Ok(0) => return Ok(()),
                    Err(error)
                        if !matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) =>
                    {
                        return Err(error);
                    }
                    // The client is still connected.
                    _ => {}
                }
            }
            connection.write_all(rest)
        }
        Some(Pace::Trickles(part, pause)) => {
            for part in body.chunks(part) {
                connection.write_all(part)?;
                thread::sleep(pause);
            }
            Ok(())
        }
    }
}

fn read(connection: &TcpStream) -> Option<Request> {
    let mut reader = BufReader::new(connection);
    let mut line = String::new();
    reader.read_line(&mut line).ok()?;
    let mut words = line.split_whitespace().map(str::to_owned);
    let (method, target) = (words.next()?, words.next()?);
    let (mut authorization, mut length) = (String::new(), 0);
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        let Some((name, value)) = line.trim_end().split_once(':') else { break };
        match name.to_ascii_lowercase().as_str() {
            "authorization" => value.trim().clone_into(&mut authorization),
            "content-length" => length = value.trim().parse().ok()?,
            _ => {}
        }
    }
    let mut body = vec![0; usize::min(length, MAX_BODY_BYTES)];
    reader.read_exact(&mut body).ok()?;
    // The query `?ns=` names the mirrored host.
    let path = target.split('?').next()?.to_owned();
    Some(Request { method, path, authorization, body: String::from_utf8(body).ok()? })
}

fn respond(request: &Request, shared: &Shared) -> Response {
    if request.path == "/token" {
        return token(request, &shared.access);
    }
    if let Some(challenge) = challenge(request, shared) {
        let body =
            format!(r#"{{"errors":[{{"code":"DENIED","message":"{REFUSAL}"}}]}}"#).into_bytes();
        return Response {
            status: "401 Unauthorized",
            headers: vec![("WWW-Authenticate", challenge)],
            body,
        };
    }
    found(&request.path, shared).unwrap_or_else(|| {
        let body = br#"{"errors":[{"code":"MANIFEST_UNKNOWN","message":"not found"}]}"#.to_vec();
        Response { status: "404 Not Found", headers: Vec::new(), body }
    })
}

fn found(path: &str, shared: &Shared) -> Option<Response> {
    let content = shared.content();
    let path = path.strip_prefix("/v2/")?;
    let (digest, kind) = if let Some((repository, reference)) = path.rsplit_once("/manifests/") {
        let tagged = content.tags.get(&format!("{repository}:{reference}"));
        (tagged.cloned().unwrap_or_else(|| reference.to_owned()), MANIFEST)
    } else {
        (path.rsplit_once("/blobs/")?.1.to_owned(), "application/octet-stream")
    };
    let body = content.blobs.get(&digest)?.clone();
    Some(Response {
        status: "200 OK",
        headers: vec![("Content-Type", kind.to_owned()), ("Docker-Content-Digest", digest)],
        body,
    })
}

/// Returns the header `WWW-Authenticate` for a request without valid credentials.
fn challenge(request: &Request, shared: &Shared) -> Option<String> {
    let bearer = |scope: &str, error: &str| {
        let realm = format!("http://{}/token", shared.at);
        format!(
            "Bearer realm=\"{realm}\",service=\"fake\",scope=\"repository:{scope}:pull\"{error}"
        )
    };
    let refusal = format!(",error=\"{REFUSAL}\"");
    match &shared.access {
        Access::Open => None,
        Access::Basic(user, password) => (request.authorization != basic(user, password))
            .then(|| format!("Basic realm=\"{REFUSAL}\"")),
        Access::Bearer(token) => {
            (request.authorization != format!("Bearer {token}")).then(|| bearer("any", &refusal))
        }
        Access::Token { .. } if request.authorization == format!("Bearer {}", TOKENS[0]) => None,
        Access::Token { .. } => {
            let path = request.path.strip_prefix("/v2/");
            let repository = path.and_then(|path| path.rsplit_once('/')?.0.rsplit_once('/'));
            let error = if request.authorization.is_empty() { "" } else { refusal.as_str() };
            Some(bearer(repository.map_or("", |(name, _)| name), error))
        }
    }
}

/// Serves the token service. `GET` has credentials in the header, `POST` in a form.
fn token(request: &Request, access: &Access) -> Response {
    let Access::Token { user, password, identity } = access else {
        return Response { status: "404 Not Found", headers: Vec::new(), body: Vec::new() };
    };
    let field = |name: &str| {
        request.body.split('&').find_map(|field| field.strip_prefix(name)?.strip_prefix('='))
    };
    let known = request.authorization == basic(user, password)
        || field("refresh_token") == Some(identity)
        || (field("username") == Some(user) && field("password") == Some(password));
    let token = TOKENS[usize::from(!known)];
    let body =
        format!(r#"{{"token":"{token}","access_token":"{token}","expires_in":3600}}"#).into_bytes();
    Response {
        status: "200 OK",
        headers: vec![("Content-Type", "application/json".to_owned())],
        body,
    }
}

fn basic(user: &str, password: &str) -> String {
    format!("Basic {}", base64(&format!("{user}:{password}")))
}

/// Encodes a text in base64 (RFC 4648).
fn base64(text: &str) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut encoded = String::new();
    for part in text.as_bytes().chunks(3) {
        let bits = part.iter().fold(0_usize, |bits, byte| bits << 8 | usize::from(*byte))
            << (8 * (3 - part.len()));
        for place in 0..4 {
            encoded.push(if place > part.len() {
                '='
            } else {
                char::from(LETTERS[bits >> (18 - 6 * place) & 63])
            });
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_encodes_the_rfc_vectors() {
        for (text, encoded) in
            [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foobar", "Zm9vYmFy")]
        {
            assert_eq!(base64(text), encoded);
        }
    }
}
