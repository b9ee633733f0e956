//! Errors of providers.

use std::{error::Error, io, sync::Arc, time::Duration};

use kiyot_values::error_chain::error_chain;

use crate::placement::{LaunchRefusal, Offering};

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
    /// The provider does not know the instance.
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
    /// The refusal of a launch, if it concerns certain offerings.
    pub refusal: Option<LaunchRefusal>,
    /// True if the error depends on the pod's request: launches for other pods may succeed.
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

    /// Returns an error without a cause.
    pub fn without_cause(class: ErrorClass, doing: impl Into<String>) -> Self {
        Self { class, doing: doing.into(), refusal: None, is_of_request: false, source: None }
    }

    /// Returns the error of a launch whose offerings have no capacity.
    pub fn no_capacity(doing: impl Into<String>, offerings: Vec<Offering>) -> Self {
        let refusal = Some(LaunchRefusal::Offerings(offerings));
        Self { refusal, ..Self::without_cause(ErrorClass::Capacity, doing) }
    }

    /// Returns the error of a call that exceeded its time limit. Its outcome is unknown.
    pub fn too_slow(doing: &str, limit: Duration) -> Self {
        let doing = format!("{doing}: not done within {} s", limit.as_secs());
        Self::without_cause(ErrorClass::Unanswered, doing)
    }

    /// Returns an error after which a retry may succeed.
    pub fn transient(
        doing: impl Into<String>,
        source: impl Into<Box<dyn Error + Send + Sync>>,
    ) -> Self {
        Self::new(ErrorClass::Transient, doing, source)
    }

    /// Returns whether the provider would refuse the launch again, with the same parameters or for
    /// any pod.
    pub fn stops_launches(&self) -> bool {
        self.class == ErrorClass::Auth || matches!(self.refusal, Some(LaunchRefusal::All(_)))
    }

    /// Returns whether the provider will always refuse this configuration or request.
    pub fn is_invalid(&self) -> bool {
        self.class == ErrorClass::Invalid
    }

    /// Returns the error with its causes as text.
    pub fn text(&self) -> String {
        error_chain(self)
    }

    /// Returns whether a full disk is the cause.
    pub fn is_no_space(&self) -> bool {
        let source = self.source.as_deref().and_then(|source| source.downcast_ref::<io::Error>());
        source.is_some_and(|error| {
            matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
        })
    }
}
