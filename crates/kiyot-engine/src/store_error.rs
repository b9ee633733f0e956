//! Errors of the store.

/// An error of the store.
#[derive(Debug, thiserror::Error)]
#[error("store: {context}")]
pub struct StoreError {
    context: String,
    #[source]
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

impl StoreError {
    /// Returns an error with a cause.
    pub fn new(
        context: impl Into<String>,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        Self { context: context.into(), source: Some(source.into()) }
    }

    /// Returns the error of a store whose thread has ended.
    pub fn closed() -> Self {
        Self { context: "closed".to_owned(), source: None }
    }
}
