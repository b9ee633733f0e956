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
            let code = answered.err().code().unwrap_or_default().to_owned();
            let message = answered.err().message().unwrap_or_default().to_owned();
            if answered.raw().status().as_u16() >= SERVER_ERROR {
                Failure::Failed { code, message }
            } else {
                Failure::Refused { code, message }
            }
        }
        SdkError::ConstructionFailure(_) => Failure::NotSent(text(&error)),
        // A connection that was not made has sent nothing. The SDK tells no other case apart.
        SdkError::DispatchFailure(dispatch) if !dispatch.is_timeout() && is_refused(&error) => {
            Failure::NotSent(text(&error))
        }
        _ => Failure::Unanswered(text(&error)),
    };
    CallError { operation, failure }
}

/// Returns the error of an answer without a field.
pub(super) fn incomplete(operation: &'static str, field: &'static str) -> CallError {
    CallError { operation, failure: Failure::Incomplete(field) }
}

/// Returns true if a refused connection or absent credentials are the cause: nothing was sent.
fn is_refused(error: &(dyn Error + 'static)) -> bool {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if let Some(io) = error.downcast_ref::<std::io::Error>()
            && io.kind() == std::io::ErrorKind::ConnectionRefused
        {
            return true;
        }
        if error.is::<CredentialsError>() {
            return true;
        }
        cause = error.source();
    }
    false
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
