//! Client of the instance metadata service of EC2, version 2 ("Use the Instance Metadata Service",
//! Amazon EC2 User Guide).

use std::{
    error::Error,
    io,
    net::{Ipv4Addr, SocketAddr, SocketAddrV4},
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderValue, Method, Request, StatusCode, header::HOST};
use http_body_util::{BodyExt, Empty, Limited};
use hyper_util::rt::TokioIo;
use tokio::{
    net::TcpStream,
    time::{Instant, sleep, timeout},
};

/// Address of the service in every instance.
pub(super) const ADDRESS: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(169, 254, 169, 254), 80);
/// Path of the request for a token.
const TOKEN_PATH: &str = "/latest/api/token";
/// Path of the user data.
const USER_DATA_PATH: &str = "/latest/user-data";
/// Header of a request for a token, with the token's life in seconds.
const TOKEN_TTL: (&str, &str) = ("x-aws-ec2-metadata-token-ttl-seconds", "60");
/// Header of a request with a token.
const TOKEN: &str = "x-aws-ec2-metadata-token";
/// Upper bound on a token, in bytes.
const MAX_TOKEN_BYTES: u64 = 1024;
/// Time limit of a request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// Time for the network of the machine to come up.
const LIMIT: Duration = Duration::from_secs(120);
/// Pause after a failed attempt.
const PAUSE: Duration = Duration::from_millis(500);

/// The metadata service did not answer as documented.
#[derive(Debug, thiserror::Error)]
pub enum MetadataError {
    /// The client could not be started.
    #[error("cannot start the client of the metadata service")]
    Start(#[source] io::Error),
    /// All attempts failed; the last by this error.
    #[error("metadata service at {0} did not answer")]
    Failed(SocketAddr, #[source] Box<dyn Error + Send + Sync>),
    /// The service refused the request.
    #[error("metadata service answers {path} with {status}")]
    Refused {
        /// Path of the request.
        path: &'static str,
        /// Status of the response.
        status: StatusCode,
    },
}

/// Returns the user data of this instance, at most `max_bytes` of it. Blocks.
pub(super) fn user_data(service: SocketAddr, max_bytes: u64) -> Result<Vec<u8>, MetadataError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(MetadataError::Start)?;
    runtime.block_on(async {
        let token = request(service, Method::PUT, TOKEN_PATH, TOKEN_TTL, MAX_TOKEN_BYTES).await?;
        let token = String::from_utf8_lossy(&token).into_owned();
        request(service, Method::GET, USER_DATA_PATH, (TOKEN, &token), max_bytes).await
    })
}

/// Repeats a request until the service answers or the time limit has passed.
async fn request(
    service: SocketAddr,
    method: Method,
    path: &'static str,
    header: (&str, &str),
    max_bytes: u64,
) -> Result<Vec<u8>, MetadataError> {
    let deadline = Instant::now() + LIMIT;
    loop {
        let attempt = attempt(service, &method, path, header, max_bytes);
        let failure: Box<dyn Error + Send + Sync> = match timeout(REQUEST_TIMEOUT, attempt).await {
            Ok(Ok((StatusCode::OK, body))) => return Ok(body),
            Ok(Ok((status, _))) if !status.is_server_error() => {
                return Err(MetadataError::Refused { path, status });
            }
            Ok(Ok((status, _))) => status.to_string().into(),
            Ok(Err(error)) => error,
            Err(elapsed) => elapsed.into(),
        };
        if Instant::now() >= deadline {
            return Err(MetadataError::Failed(service, failure));
        }
        sleep(PAUSE).await;
    }
}

async fn attempt(
    service: SocketAddr,
    method: &Method,
    path: &str,
    (name, value): (&str, &str),
    max_bytes: u64,
) -> Result<(StatusCode, Vec<u8>), Box<dyn Error + Send + Sync>> {
    let stream = TcpStream::connect(service).await?;
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    // The task ends with the runtime.
    tokio::spawn(connection);
    let mut value = HeaderValue::from_str(value)?;
    value.set_sensitive(true);
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header(HOST, service.ip().to_string())
        .header(name, value)
        .body(Empty::<Bytes>::new())?;
    let (head, body) = sender.send_request(request).await?.into_parts();
    let body = Limited::new(body, usize::try_from(max_bytes)?).collect().await?;
    Ok((head.status, body.to_bytes().to_vec()))
}

#[cfg(test)]
mod tests {
    use std::{
        io::{BufRead, BufReader, Read, Write},
        net::TcpListener,
        thread,
    };

    use super::*;

    /// Answers connections in order, and returns the heads of their requests.
    fn serve(responses: Vec<String>) -> (SocketAddr, thread::JoinHandle<Vec<String>>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let serving = thread::spawn(move || {
            let answer = |response: String| {
                let (mut stream, _) = listener.accept().unwrap();
                let mut reader = BufReader::new(stream.try_clone().unwrap()).take(1 << 16);
                let mut head = String::new();
                while !head.ends_with("\r\n\r\n") && reader.read_line(&mut head).unwrap() > 0 {}
                stream.write_all(response.as_bytes()).unwrap();
                head
            };
            responses.into_iter().map(answer).collect()
        });
        (address, serving)
    }

    fn response(status: &str, body: &str) -> String {
        format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\n\r\n{body}", body.len())
    }

    #[test]
    fn user_data_is_read_with_a_token() {
        let responses = [
            response("503 Service Unavailable", ""),
            response("200 OK", "open-sesame"),
            response("200 OK", "{}"),
        ];
        let (address, serving) = serve(responses.into());
        assert_eq!(user_data(address, 100).unwrap(), b"{}");
        let heads = serving.join().unwrap();
        assert!(heads[1].starts_with("PUT /latest/api/token HTTP/1.1\r\n"), "{heads:?}");
        assert!(heads[1].contains("x-aws-ec2-metadata-token-ttl-seconds: 60\r\n"), "{heads:?}");
        assert!(heads[2].starts_with("GET /latest/user-data HTTP/1.1\r\n"), "{heads:?}");
        assert!(heads[2].contains("x-aws-ec2-metadata-token: open-sesame\r\n"), "{heads:?}");
    }

    #[test]
    fn absent_user_data_is_not_retried() {
        let responses = [response("200 OK", "token"), response("404 Not Found", "")];
        let (address, serving) = serve(responses.into());
        let error = user_data(address, 100).unwrap_err().to_string();
        assert_eq!(error, "metadata service answers /latest/user-data with 404 Not Found");
        serving.join().unwrap();
    }
}
