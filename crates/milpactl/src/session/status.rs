//! The status that a server sends on the error stream: `Status` of Kubernetes as JSON. Pure.

use serde_json::Value;

/// The end of a process.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Status {
    /// The process has exited with this code.
    Exited(i64),
    /// The process did not run, or its end is unknown.
    Failed(String),
}

impl Status {
    /// Parses a status; `None` if the stream ended without it.
    pub(super) fn parse(bytes: &[u8]) -> Option<Self> {
        if bytes.is_empty() {
            return None;
        }
        let Ok(status) = serde_json::from_slice::<Value>(bytes) else {
            return Some(Self::Failed(String::from_utf8_lossy(bytes).into_owned()));
        };
        if status["status"] == "Success" {
            return Some(Self::Exited(0));
        }
        let causes = status["details"]["causes"].as_array().into_iter().flatten();
        let mut codes = causes.filter(|cause| cause["reason"] == "ExitCode");
        let code = codes.find_map(|cause| cause["message"].as_str()?.parse().ok());
        Some(match (code, status["message"].as_str()) {
            (Some(code), _) if status["reason"] == "NonZeroExitCode" => Self::Exited(code),
            (_, Some(message)) => Self::Failed(message.to_owned()),
            _ => Self::Failed(status.to_string()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_has_an_exit_code_or_a_message() {
        let exited = r#"{"metadata":{},"status":"Failure","message":"command terminated with
            non-zero exit code","reason":"NonZeroExitCode",
            "details":{"causes":[{"reason":"ExitCode","message":"5"}]}}"#;
        let exited = exited.replace('\n', " ");
        let failed = r#"{"status":"Failure","message":"no such program","reason":"InternalError"}"#;
        for (text, expected) in [
            ("", None),
            (r#"{"metadata":{},"status":"Success"}"#, Some(Status::Exited(0))),
            (&*exited, Some(Status::Exited(5))),
            (failed, Some(Status::Failed("no such program".to_owned()))),
            ("plain text", Some(Status::Failed("plain text".to_owned()))),
            ("{}", Some(Status::Failed("{}".to_owned()))),
        ] {
            assert_eq!(Status::parse(text.as_bytes()), expected, "{text}");
        }
    }
}
