//! Errors of providers.

use std::{error::Error, io, sync::Arc, time::Duration};

use kiyot_values::error_chain::error_chain;

use crate::placement::{Market, Offering, RefusedQuota};

/// The class of a provider's error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ErrorClass {
    /// The offerings have no capacity; others may have.
    Capacity,
    /// Too many calls; the call had no effect and may be repeated later.
    Throttled,
    /// A quota of the account is reached.
    Quota,
    /// The credentials do not permit the call.
    Auth,
    /// The request is invalid and will always fail.
    Invalid,
    /// The instance does not exist, as far as the provider knows.
    NotFound,
    /// The instance of the launch has ended already: another launch may succeed.
    Ended,
    /// The call failed. A retry may succeed.
    Transient,
    /// The outcome is unknown: the call may have had its effect, now or later.
    Unanswered,
}

impl ErrorClass {
    /// Returns the name in metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Capacity => "capacity",
            Self::Throttled => "throttled",
            Self::Quota => "quota",
            Self::Auth => "auth",
            Self::Invalid => "invalid",
            Self::NotFound => "not_found",
            Self::Ended => "ended",
            Self::Transient => "transient",
            Self::Unanswered => "unanswered",
        }
    }
}

/// An error of a provider. Cheap to clone.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{doing}")]
pub struct ProviderError {
    /// The class of the error.
    pub class: ErrorClass,
    /// The failed operation with the names of its objects.
    pub doing: String,
    /// The offerings that a launch was refused for.
    pub refused: Vec<Offering>,
    /// The zone that has no room for any instance type.
    pub refused_zone: Option<Arc<str>>,
    /// The market that is refused for every instance type.
    pub refused_market: Option<Market>,
    /// The quota that has no room for a launch.
    pub refused_quota: Option<Arc<RefusedQuota>>,
    /// The code with which account or image refuse the instance type, or EC2 a wrong request.
    pub type_refusal: Option<Arc<str>>,
    /// True if the account can launch nothing for a while, whatever a pod asks for.
    pub refuses_all: bool,
    /// True if it depends on what the pod asked for: the launches of others may succeed.
    pub is_of_request: bool,
    /// The cause.
    #[source]
    pub source: Option<Arc<dyn Error + Send + Sync>>,
}

impl ProviderError {
    /// Returns an error with a cause.
    pub fn new(
        class: ErrorClass,
        doing: impl Into<String>,
        source: impl Into<Box<dyn Error + Send + Sync>>,
    ) -> Self {
        Self { source: Some(source.into().into()), ..Self::without_cause(class, doing) }
    }

    /// Returns an error whose text says everything.
    pub fn without_cause(class: ErrorClass, doing: impl Into<String>) -> Self {
        Self {
            class,
            doing: doing.into(),
            refused: Vec::new(),
            refused_zone: None,
            refused_market: None,
            refused_quota: None,
            type_refusal: None,
            refuses_all: false,
            is_of_request: false,
            source: None,
        }
    }

    /// Returns the error of a call that exceeded its time limit. Its outcome is unknown.
    pub fn too_slow(doing: &str, limit: Duration) -> Self {
        let doing = format!("{doing}: not done within {} s", limit.as_secs());
        Self::without_cause(ErrorClass::Unanswered, doing)
    }

    /// Returns an error that a retry may avoid.
    pub fn transient(
        doing: impl Into<String>,
        source: impl Into<Box<dyn Error + Send + Sync>>,
    ) -> Self {
        Self::new(ErrorClass::Transient, doing, source)
    }

    /// Returns true for a launch whose repetition, with the same parameters or by any pod, would be
    /// refused likewise.
    pub fn stops_launches(&self) -> bool {
        self.class == ErrorClass::Auth || self.refuses_all
    }

    /// Returns true for a configuration or a request that the provider refuses, however often it is
    /// repeated.
    pub fn is_invalid(&self) -> bool {
        self.class == ErrorClass::Invalid
    }

    /// Returns the error with its causes as text.
    pub fn text(&self) -> String {
        error_chain(self)
    }

    /// Returns true if a full disk is the cause.
    pub fn is_no_space(&self) -> bool {
        let source = self.source.as_deref().and_then(|source| source.downcast_ref::<io::Error>());
        source.is_some_and(|error| {
            matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
        })
    }
}
