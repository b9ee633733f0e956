//! Instance types, exact and by pattern.

use std::fmt;

use kiyot_values::glob;

/// Choice of an instance type.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InstanceType {
    /// This type, regardless of the pod's resources.
    Exact(String),
    /// The cheapest fitting type whose name matches (`*`, `?`).
    Glob(String),
}

impl fmt::Display for InstanceType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::Exact(text) | Self::Glob(text)) = self;
        f.write_str(text)
    }
}

impl InstanceType {
    /// Returns whether a type of this name may be chosen.
    pub fn matches(&self, name: &str) -> bool {
        match self {
            Self::Exact(exact) => exact == name,
            Self::Glob(pattern) => glob::matches(pattern, name),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Verifies A5.
    #[test]
    fn glob_matches_names_of_instance_types() {
        for (glob, name, matches) in [
            ("c5*", "c5.large", true),
            ("c5*", "c5", true),
            ("c5*", "c6.large", false),
            ("*.large", "c5.large", true),
            ("*.large", "c5.xlarge", false),
            ("c5.?large", "c5.xlarge", true),
            ("c5.?large", "c5.large", false),
            ("t?.*", "t3.nano", true),
            ("t?.*", "t3a.nano", false),
            ("*", "", true),
            ("?", "", false),
            ("c5.large", "c5.large", true),
            ("C5*", "c5.large", false),
        ] {
            assert_eq!(InstanceType::Glob(glob.into()).matches(name), matches, "{glob} {name}");
        }
        let exact = InstanceType::Exact("c5.large".into());
        assert!(exact.matches("c5.large") && !exact.matches("c5.large2"));
    }

    /// Verifies A5.
    #[test]
    fn glob_with_many_stars_does_not_backtrack_exponentially() {
        let (glob, name) = ("*a".repeat(127), "a".repeat(255));
        assert!(InstanceType::Glob(glob.clone()).matches(&name));
        assert!(!InstanceType::Glob(format!("{glob}b")).matches(&name));
    }
}
