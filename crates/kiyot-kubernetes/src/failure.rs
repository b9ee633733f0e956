//! Failures of calls, by class.

use std::time::Duration;

use http::StatusCode;

/// Bounds the shown part of a response, in characters.
const MAX_MESSAGE_CHARS: usize = 300;
/// Bounds the pause that the API server may request.
const MAX_RETRY_AFTER: Duration = Duration::from_secs(300);

/// A failed call, by class.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// No connection, or a broken connection.
    #[error("API server is unreachable: {0}")]
    Unreachable(String),
    /// No response in time.
    #[error("API server did not answer within {0:?}")]
    TimedOut(Duration),
    /// Credentials without the right, or an object that a policy or a webhook denies.
    #[error("API server denied the call: {0}")]
    Denied(String),
    /// Unknown credentials, for which every call is denied.
    #[error("API server denied the call: {0}")]
    Unauthenticated(String),
    /// The object, its kind or its namespace is absent.
    #[error("absent: {0}")]
    NotFound(String),
    /// Another writer was faster, or owns a field.
    #[error("conflict: {0}")]
    Conflict(String),
    /// The position of a list or a watch has expired.
    #[error("position expired: {0}")]
    Expired(String),
    /// The API server has too many calls.
    #[error("API server has too many calls: {message}")]
    Throttled {
        /// The pause that the API server requests.
        retry_after: Option<Duration>,
        /// The API server's message.
        message: String,
    },
    /// The object breaks a rule of its schema or of an admission policy.
    #[error("refused as invalid: {0}")]
    Invalid(String),
    /// An error of the API server.
    #[error("API server failed with {status}: {message}")]
    Server {
        /// The status of the response.
        status: u16,
        /// The API server's message.
        message: String,
    },
}

impl Failure {
    /// Returns the failure of a response; `None` for a success.
    pub fn of_response(status: StatusCode, retry_after: Option<&str>, body: &[u8]) -> Option<Self> {
        if status.is_success() {
            return None;
        }
        let parsed: Option<serde_json::Value> = serde_json::from_slice(body).ok();
        let text = parsed.as_ref().and_then(|status| status["message"].as_str());
        let text = text.map_or_else(|| String::from_utf8_lossy(body).into_owned(), str::to_owned);
        let message = shown(&text);
        let seconds = retry_after.and_then(|text| text.trim().parse::<u64>().ok());
        let in_body =
            || parsed.as_ref().and_then(|body| body["details"]["retryAfterSeconds"].as_u64());
        let retry_after = seconds.or_else(in_body).map(Duration::from_secs);
        let retry_after = retry_after.map(|pause| pause.min(MAX_RETRY_AFTER));
        let reason = parsed.as_ref().and_then(|body| body["reason"].as_str());
        Some(match status.as_u16() {
            401 => Self::Unauthenticated(message),
            403 => Self::Denied(message),
            404 => Self::NotFound(message),
            409 => Self::Conflict(message),
            410 => Self::Expired(message),
            429 => Self::Throttled { retry_after, message },
            // A server that starts or stops requests a pause.
            503 if retry_after.is_some() => Self::Throttled { retry_after, message },
            // An expired position of a list may arrive as an error of the server.
            status if status >= 500 && reason == Some("Expired") => Self::Expired(message),
            400..=499 => Self::Invalid(message),
            status => Self::Server { status, message },
        })
    }

    /// Returns the name of the class. A failure is logged once for each class, and counted by it.
    pub fn class(&self) -> &'static str {
        match self {
            Self::Unreachable(_) => "unreachable",
            Self::TimedOut(_) => "timed_out",
            Self::Denied(_) | Self::Unauthenticated(_) => "denied",
            Self::NotFound(_) => "not_found",
            Self::Conflict(_) => "conflict",
            Self::Expired(_) => "expired",
            Self::Throttled { .. } => "throttled",
            Self::Invalid(_) => "invalid",
            Self::Server { .. } => "server_error",
        }
    }
}

/// Returns a text of the API server for logs, bounded and without control characters.
pub fn shown(text: &str) -> String {
    let plain = text.chars().map(|c| if c.is_control() { ' ' } else { c });
    plain.take(MAX_MESSAGE_CHARS).collect::<String>().trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Verifies K6.
    #[test]
    fn responses_are_classed_and_their_pause_is_bounded() {
        let class = |status: u16, retry_after: Option<&str>, body: &str| {
            let status = StatusCode::from_u16(status).unwrap();
            Failure::of_response(status, retry_after, body.as_bytes())
        };
        assert_eq!(class(201, None, ""), None);
        for (status, expected) in [
            (401, "denied"),
            (403, "denied"),
            (404, "not_found"),
            (409, "conflict"),
            (410, "expired"),
            (413, "invalid"),
            (422, "invalid"),
            (429, "throttled"),
            (500, "server_error"),
            (503, "server_error"),
        ] {
            assert_eq!(class(status, None, "x").unwrap().class(), expected, "{status}");
        }
        assert_eq!(class(503, Some("2"), "").unwrap().class(), "throttled");
        let expired = r#"{"reason":"Expired","message":"etcd compacted"}"#;
        assert_eq!(class(500, None, expired).unwrap().class(), "expired");
        for (header, body, expected) in [
            (Some("7"), "", Some(7)),
            (Some("99999"), "", Some(300)),
            (Some("Wed, 21 Oct"), "", None),
            (None, r#"{"details":{"retryAfterSeconds":3}}"#, Some(3)),
        ] {
            let Some(Failure::Throttled { retry_after, .. }) = class(429, header, body) else {
                panic!("{header:?} is another class")
            };
            assert_eq!(retry_after, expected.map(Duration::from_secs), "{header:?} {body}");
        }
    }

    #[test]
    fn message_of_a_response_is_short_and_plain() {
        let body = format!("{{\"message\":\"a\\nb {}\"}}", "x".repeat(5000));
        let failure = Failure::of_response(StatusCode::FORBIDDEN, None, body.as_bytes()).unwrap();
        let Failure::Denied(message) = failure else { panic!("{failure:?}") };
        assert!(message.starts_with("a b xxx") && message.len() == MAX_MESSAGE_CHARS);
    }
}
