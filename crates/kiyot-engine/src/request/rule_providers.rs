//! Providers that a routing rule allows.

use std::fmt;

use kiyot_config::{ProviderKind, Rule};

/// Providers that a routing rule allows for the cells of its pods.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuleProviders {
    rule: String,
    allowed: Vec<ProviderKind>,
}

impl RuleProviders {
    /// Returns the providers of a rule; `None` if it allows all.
    pub fn of(rule: &Rule) -> Option<Self> {
        let Rule { name, providers, .. } = rule;
        (!providers.is_empty()).then(|| Self { rule: name.clone(), allowed: providers.clone() })
    }

    /// Returns the allowed providers, sorted.
    pub fn sorted(&self) -> Vec<ProviderKind> {
        let mut sorted = self.allowed.clone();
        sorted.sort();
        sorted
    }

    /// Returns the names, for a message.
    pub fn names(&self) -> String {
        let names: Vec<_> = self.allowed.iter().map(|it| format!("{:?}", it.name())).collect();
        names.join(" or ")
    }

    pub(crate) fn allows(&self, provider: &str) -> bool {
        self.allowed.iter().any(|allowed| allowed.name() == provider)
    }
}

impl fmt::Display for RuleProviders {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "routing rule {:?} allows {}", self.rule, self.names())
    }
}
