//! Purpose of a manifest.

use crate::problems::{Field, Problem, Report, Table};

/// Rule of the problem with a field that [`Purpose::Run`] refuses.
const EXPLAINED_ALONE: &str = "is not supported to run a pod from a manifest; allowed: absent";

/// Purpose of a manifest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// Pods are run from it: a field that the requests lack is a problem, because a pod without it
    /// would be another.
    Run,
    /// Pods are explained: every field of Kubernetes is accepted.
    Explain,
}

impl Purpose {
    /// Takes fields that the requests lack. Running reports them.
    pub(super) fn take_all(self, table: &mut Table<'_>, keys: &[&'static str]) {
        for key in keys {
            self.take(table, key);
        }
    }

    /// Takes a field that the requests lack. Running reports it.
    pub(super) fn take<'r>(self, table: &mut Table<'r>, key: &'static str) -> Option<Field<'r>> {
        let field = table.take(key)?;
        match self {
            Self::Run => {
                self.lacks(table.report(), table.path_of(key));
                None
            }
            Self::Explain => Some(field),
        }
    }

    /// Reports that the requests lack what is at a path, if pods are run.
    pub(super) fn lacks(self, report: &Report, at: String) {
        if self == Self::Run {
            report.add(Problem::new(at, EXPLAINED_ALONE));
        }
    }
}
