//! The backends that there are.

use std::{collections::BTreeSet, sync::Arc};

use super::{Backend, BackendName, CallPath, Declared, Decoded, Features, cri::Upstream};

/// The backends can't be used together.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RegistryError {
    /// Two have one name.
    #[error("two backends have the name {0}; allowed is one of each name")]
    DuplicateName(BackendName),
    /// The node backend is missing, or is none that calls can be forwarded to.
    #[error("the node backend is {0}; allowed is the name of a backend of type cri")]
    NodeBackend(BackendName),
    /// Two declare the same target runtime or runtime handler.
    #[error(
        "the backends {0} and {1} both declare {2:?}; allowed is one backend for each target runtime and runtime handler"
    )]
    DuplicateDeclaration(BackendName, BackendName, &'static str),
}

/// The backends that there are, of which one is the node's. It does not change while the daemon
/// runs.
#[derive(Debug)]
pub struct Registry {
    backends: Vec<Arc<dyn Backend>>,
    node: usize,
    decoded: Vec<usize>,
    raw: Vec<usize>,
}

impl Registry {
    /// Of backends, of which `node` also answers the calls that concern the node.
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

    /// The node backend's name.
    pub fn node_name(&self) -> &BackendName {
        self.backends[self.node].name()
    }

    /// The node backend.
    pub fn node(&self) -> &Upstream {
        match self.backends[self.node].path() {
            CallPath::Raw(upstream) => upstream,
            CallPath::Decoded(_) => unreachable!("the node backend was chosen among the raw ones"),
        }
    }

    /// A backend.
    pub fn get(&self, name: &str) -> Option<&Arc<dyn Backend>> {
        self.backends.iter().find(|backend| backend.name().as_str() == name)
    }

    /// What pods of a backend may ask for; of a container runtime, which says so itself, nothing.
    pub fn features(&self, name: &BackendName) -> Features {
        match self.get(name.as_str()).map(|backend| backend.path()) {
            Some(CallPath::Decoded(decoded)) => decoded.features(),
            Some(CallPath::Raw(_)) | None => Features::default(),
        }
    }

    /// The backends to which calls are forwarded, the node's first.
    pub fn raw(&self) -> impl Iterator<Item = (&BackendName, &Upstream)> {
        let others = self.raw.iter().filter(|index| **index != self.node);
        std::iter::once(&self.node).chain(others).filter_map(|index| {
            match self.backends[*index].path() {
                CallPath::Raw(upstream) => Some((self.backends[*index].name(), upstream)),
                CallPath::Decoded(_) => None,
            }
        })
    }

    /// Whether ids may be of several container runtimes.
    pub fn has_several_runtimes(&self) -> bool {
        self.raw.len() > 1
    }

    /// The place of a backend among [`Self::raw`].
    pub fn index_of(&self, name: &str) -> Option<usize> {
        self.raw().position(|(raw, _)| raw.as_str() == name)
    }

    /// The upstream at a place among [`Self::raw`]; the node's if there is none.
    pub fn upstream(&self, index: usize) -> &Upstream {
        self.raw().nth(index).map_or_else(|| self.node(), |(_, upstream)| upstream)
    }

    /// The backends that answer decoded calls.
    pub fn decoded(&self) -> impl Iterator<Item = &Arc<dyn Decoded>> {
        self.decoded.iter().filter_map(|index| match self.backends[*index].path() {
            CallPath::Decoded(decoded) => Some(decoded),
            CallPath::Raw(_) => None,
        })
    }

    /// Whether there is but one backend, to which all goes as it came.
    pub fn has_one_backend(&self) -> bool {
        self.backends.len() == 1
    }

    /// The decoded backend whose an id is, or a prefix of one; `None`: it is a container runtime's,
    /// or nobody's.
    pub fn by_id(&self, id: &str) -> Option<&Arc<dyn Decoded>> {
        if id.is_empty() { None } else { self.decoded().find(|decoded| decoded.owns(id)) }
    }

    /// What each backend calls its own.
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
    fn the_node_is_first_among_the_raw_ones() {
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
    fn names_must_fit() {
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
