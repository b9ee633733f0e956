//! The configured backends.

use std::{collections::BTreeSet, sync::Arc};

use super::{Backend, BackendName, CallPath, Declared, DecodedBackend, Features, cri::Upstream};

/// Error of backends that contradict each other.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RegistryError {
    /// Two backends have the same name.
    #[error("backend {0}: the name is used twice; allowed: unique names")]
    DuplicateName(BackendName),
    /// The node backend does not exist, or is not a container runtime.
    #[error("node backend {0}: not found; allowed: the name of a backend of type cri")]
    NodeBackend(BackendName),
    /// Two backends declare the same target runtime or runtime handler.
    #[error(
        "backends {0} and {1}: both declare {2:?}; allowed: one backend for each target runtime \
         and runtime handler"
    )]
    DuplicateDeclaration(BackendName, BackendName, &'static str),
}

/// All backends, including the node backend. Constant while the daemon runs.
#[derive(Debug)]
pub struct Registry {
    backends: Vec<Arc<dyn Backend>>,
    node: usize,
    decoded: Vec<usize>,
    raw: Vec<usize>,
}

impl Registry {
    /// Creates a registry. The backend `node` also answers calls about the node.
    pub fn new(
        mut backends: Vec<Arc<dyn Backend>>,
        node: &BackendName,
    ) -> Result<Self, RegistryError> {
        backends.sort_by(|a, b| a.name().cmp(b.name()));
        let mut names = BTreeSet::new();
        for backend in &backends {
            if !names.insert(backend.name()) {
                return Err(RegistryError::DuplicateName(backend.name().clone()));
            }
        }
        for (index, a) in backends.iter().enumerate() {
            for b in &backends[index + 1..] {
                let both = [
                    common(a.declares().target_runtimes, b.declares().target_runtimes),
                    common(a.declares().runtime_handlers, b.declares().runtime_handlers),
                ];
                if let Some(value) = both.into_iter().flatten().next() {
                    return Err(RegistryError::DuplicateDeclaration(
                        a.name().clone(),
                        b.name().clone(),
                        value,
                    ));
                }
            }
        }
        let is_raw = |index: &usize| matches!(backends[*index].path(), CallPath::Raw(_));
        let (raw, decoded): (Vec<_>, Vec<_>) = (0..backends.len()).partition(is_raw);
        let node = raw
            .iter()
            .copied()
            .find(|index| backends[*index].name() == node)
            .ok_or_else(|| RegistryError::NodeBackend(node.clone()))?;
        Ok(Self { backends, node, decoded, raw })
    }

    /// Returns the name of the node backend.
    pub fn node_name(&self) -> &BackendName {
        self.backends[self.node].name()
    }

    /// Returns the upstream of the node backend.
    pub fn node(&self) -> &Upstream {
        match self.backends[self.node].path() {
            CallPath::Raw(upstream) => upstream,
            CallPath::Decoded(_) => unreachable!("the node backend is a container runtime"),
        }
    }

    /// Returns the backend with a name.
    pub fn get(&self, name: &str) -> Option<&Arc<dyn Backend>> {
        self.backends.iter().find(|backend| backend.name().as_str() == name)
    }

    /// Returns the features that pods of a backend may request. Empty for a container runtime: its
    /// own Status has them.
    pub fn features(&self, name: &BackendName) -> Features {
        match self.get(name.as_str()).map(|backend| backend.path()) {
            Some(CallPath::Decoded(decoded)) => decoded.features(),
            Some(CallPath::Raw(_)) | None => Features::default(),
        }
    }

    /// Returns the container runtimes, the node backend first. A runtime's index is its position
    /// here.
    pub fn raw(&self) -> impl Iterator<Item = (&BackendName, &Upstream)> {
        let others = self.raw.iter().filter(|index| **index != self.node);
        std::iter::once(&self.node).chain(others).filter_map(|index| {
            match self.backends[*index].path() {
                CallPath::Raw(upstream) => Some((self.backends[*index].name(), upstream)),
                CallPath::Decoded(_) => None,
            }
        })
    }

    /// Returns whether ids may belong to several container runtimes.
    pub fn has_several_runtimes(&self) -> bool {
        self.raw.len() > 1
    }

    /// Returns the index of a container runtime.
    pub fn index_of(&self, name: &str) -> Option<usize> {
        self.raw().position(|(raw, _)| raw.as_str() == name)
    }

    /// Returns the index of a runtime's upstream.
    pub fn index_of_upstream(&self, upstream: &Upstream) -> usize {
        self.raw().position(|(_, raw)| std::ptr::eq(raw, upstream)).unwrap_or_default()
    }

    /// Returns the index of a decoded backend: its position after all container runtimes.
    pub fn index_of_decoded(&self, backend: &Arc<dyn DecodedBackend>) -> usize {
        let position = self.decoded().position(|decoded| Arc::ptr_eq(decoded, backend));
        self.raw.len() + position.unwrap_or_default()
    }

    /// Returns the names of all backends, by index: the container runtimes, then the others.
    pub fn names(&self) -> impl Iterator<Item = &BackendName> {
        let raw = self.raw().map(|(name, _)| name);
        raw.chain(self.decoded.iter().map(|index| self.backends[*index].name()))
    }

    /// Returns the upstream at an index, or the node's upstream if the index is unknown.
    pub fn upstream(&self, index: usize) -> &Upstream {
        self.raw().nth(index).map_or_else(|| self.node(), |(_, upstream)| upstream)
    }

    /// Returns the backends that answer decoded calls.
    pub fn decoded(&self) -> impl Iterator<Item = &Arc<dyn DecodedBackend>> {
        self.decoded.iter().filter_map(|index| match self.backends[*index].path() {
            CallPath::Decoded(decoded) => Some(decoded),
            CallPath::Raw(_) => None,
        })
    }

    /// Returns whether the node backend is the only backend. All calls are then forwarded to it.
    pub fn has_one_backend(&self) -> bool {
        self.backends.len() == 1
    }

    /// Returns the decoded backend to which an id or a prefix belongs; `None` if only a container
    /// runtime may have the id.
    pub fn by_id(&self, id: &str) -> Option<&Arc<dyn DecodedBackend>> {
        if id.is_empty() { None } else { self.decoded().find(|decoded| decoded.owns(id)) }
    }

    /// Returns the target runtimes and handlers of each backend.
    pub fn declared(&self) -> Vec<(&BackendName, Declared)> {
        self.backends.iter().map(|backend| (backend.name(), backend.declares())).collect()
    }
}

fn common(a: &[&'static str], b: &[&'static str]) -> Option<&'static str> {
    a.iter().copied().find(|value| b.contains(value))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::backends::cri::CriBackend;

    fn cri(name: &str) -> Arc<dyn Backend> {
        Arc::new(CriBackend::new(
            BackendName::new(name),
            format!("/nowhere/{name}.sock").into(),
            Duration::from_secs(1),
        ))
    }

    #[test]
    fn node_backend_is_the_first_runtime() {
        let registry =
            Registry::new(vec![cri("a"), cri("b"), cri("c")], &BackendName::new("b")).unwrap();
        assert_eq!(
            registry.raw().map(|(name, _)| name.as_str()).collect::<Vec<_>>(),
            ["b", "a", "c"]
        );
        assert_eq!(registry.node_name().as_str(), "b");
        assert_eq!(
            (registry.index_of("b"), registry.index_of("c"), registry.index_of("d")),
            (Some(0), Some(2), None)
        );
        assert!(
            std::ptr::eq(registry.upstream(0), registry.node()) && registry.has_several_runtimes()
        );
        assert!(registry.by_id("0123").is_none());
        assert!(!registry.has_one_backend());
    }

    #[test]
    fn duplicate_name_and_unknown_node_backend_are_refused() {
        assert_eq!(
            Registry::new(vec![cri("a"), cri("a")], &BackendName::new("a")).unwrap_err(),
            RegistryError::DuplicateName(BackendName::new("a"))
        );
        assert_eq!(
            Registry::new(vec![cri("a")], &BackendName::new("b")).unwrap_err(),
            RegistryError::NodeBackend(BackendName::new("b"))
        );
    }
}
