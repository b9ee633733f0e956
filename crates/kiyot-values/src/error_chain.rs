//! Errors with their causes, as text.

use std::{error::Error, fmt::Write};

/// Returns an error and all of its sources, joined by colons.
pub fn error_chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        // Writing to a string does not fail.
        let _ = write!(text, ": {error}");
        source = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("{text}")]
    struct Failure {
        text: &'static str,
        source: Option<Box<Failure>>,
    }

    #[test]
    fn causes_follow_their_error() {
        let caused = |text, source| Failure { text, source: Some(Box::new(source)) };
        let root = Failure { text: "root", source: None };
        assert_eq!(error_chain(&root), "root");
        assert_eq!(error_chain(&caused("top", caused("middle", root))), "top: middle: root");
    }
}
