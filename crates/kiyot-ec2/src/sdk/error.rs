//! Errors of the SDK.

use std::error::Error;

use aws_credential_types::provider::error::CredentialsError;
use aws_sdk_ec2::{
    config::http::HttpResponse,
    error::{ProvideErrorMetadata, SdkError},
};

use crate::{CallError, Failure};

/// The first HTTP status of failures of the server.
const SERVER_ERROR: u16 = 500;

/// Returns the error of a call.
pub(super) fn call_error<E>(operation: &'static str, error: SdkError<E, HttpResponse>) -> CallError
where
    E: ProvideErrorMetadata + Error + Send + Sync + 'static,
{
    let failure = match &error {
        SdkError::ServiceError(answered) => {
            let code = answered.err().code().filter(|code| !code.is_empty());
            let code = code.map(str::to_owned);
            let message = answered.err().message().unwrap_or_default().to_owned();
            if answered.raw().status().as_u16() >= SERVER_ERROR {
                Failure::Failed { code, message }
            } else {
                Failure::Refused { code, message }
            }
        }
        SdkError::ConstructionFailure(_) => Failure::NotSent(text(&error)),
        SdkError::DispatchFailure(_) if is_unsent(&error) => Failure::NotSent(text(&error)),
        _ => Failure::Unanswered(text(&error)),
    };
    CallError { operation, failure }
}

/// Returns the error of a response that lacks a field.
pub(super) fn incomplete(operation: &'static str, field: &'static str) -> CallError {
    CallError { operation, failure: Failure::Incomplete(field) }
}

/// Returns whether nothing was sent because credentials or a connection were missing. Causes of a
/// missing connection: a name without an address, no route, a refused or closed connection, a
/// failed TLS handshake, or the time limit of connections.
fn is_unsent(error: &(dyn Error + 'static)) -> bool {
    let mut causes = std::iter::successors(Some(error), |&error| error.source());
    causes.any(|cause| {
        let connecting = cause.downcast_ref::<hyper_util::client::legacy::Error>();
        cause.is::<CredentialsError>() || connecting.is_some_and(|error| error.is_connect())
    })
}

/// Returns an error with its causes.
fn text(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::AsyncReadExt,
        net::{TcpListener, TcpSocket, TcpStream},
    };

    use super::*;
    use crate::{
        Ec2Api,
        sdk::{Client, ClientConfig},
    };

    /// Returns the failure of a call of an endpoint.
    async fn failure_at(endpoint: String) -> Failure {
        let region = "us-east-1".to_owned();
        let config =
            ClientConfig { region, endpoint_url: Some(endpoint), pricing_endpoint_url: None };
        let client = Client::with_credentials(&config, "id", "secret").await;
        client.subnets(&["subnet-1".to_owned()]).await.unwrap_err().failure
    }

    /// Returns the failure of a call of a listener that closes each connection after its first
    /// bytes.
    async fn failure_at_closing(scheme: &str) -> Failure {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let endpoint = format!("{scheme}://{}", listener.local_addr().unwrap());
        let closing = async {
            loop {
                let (mut connection, _) = listener.accept().await.unwrap();
                let _ = connection.read(&mut [0; 1024]).await;
            }
        };
        tokio::select! {
            failure = failure_at(endpoint) => failure,
            () = closing => unreachable!("the listener closes connections until it is dropped"),
        }
    }

    /// Returns the failure of a call of a listener with a full backlog.
    async fn failure_at_full() -> Failure {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind(([127, 0, 0, 1], 0).into()).unwrap();
        let listener = socket.listen(1).unwrap();
        let address = listener.local_addr().unwrap();
        // Linux accepts one connection more than the backlog.
        let mut waiting = Vec::new();
        for _ in 0..2 {
            waiting.push(TcpStream::connect(address).await.unwrap());
        }
        failure_at(format!("http://{address}")).await
    }

    /// Verifies V32.
    #[tokio::test]
    async fn call_is_not_sent_without_a_connection() {
        // A bound port that does not listen refuses connections, and no other process can use it.
        let silent = TcpSocket::new_v4().unwrap();
        silent.bind(([127, 0, 0, 1], 0).into()).unwrap();
        let silent_address = silent.local_addr().unwrap();
        let (unknown, refused, closed, full) = tokio::join!(
            failure_at("http://kiyot.invalid/".to_owned()),
            failure_at(format!("http://{silent_address}")),
            failure_at_closing("https"),
            failure_at_full(),
        );
        for failure in [unknown, refused, closed, full] {
            assert!(matches!(failure, Failure::NotSent(_)), "{failure:?}");
        }
        let sent = failure_at_closing("http").await;
        assert!(matches!(sent, Failure::Unanswered(_)), "{sent:?}");
    }
}
