//! Filters of lists, with the semantics of containerd: all given parts must match, an empty part
//! matches all, an id may be a prefix. Pure.

use std::collections::HashMap;

use kiyot_proto::cri;

/// Returns whether labels contain all labels of a selector.
pub(crate) fn selects(
    selector: &HashMap<String, String>,
    labels: &HashMap<String, String>,
) -> bool {
    selector.iter().all(|(key, value)| labels.get(key) == Some(value))
}

/// Returns whether an encoded message may contain the labels of a selector, without decoding it.
/// `false` is certain.
pub(crate) fn may_select(selector: &HashMap<String, String>, encoded: &[u8]) -> bool {
    selector.values().all(|value| {
        value.is_empty() || encoded.windows(value.len()).any(|window| window == value.as_bytes())
    })
}

/// A filter of sandboxes for all calls.
#[derive(Debug, Default, Clone, PartialEq)]
pub(crate) struct Sandboxes {
    /// An id or its prefix; "" for all.
    pub(crate) id: String,
    /// `None` for ready and stopped sandboxes.
    pub(crate) ready: Option<bool>,
    /// Required labels.
    pub(crate) labels: HashMap<String, String>,
}

impl Sandboxes {
    pub(crate) fn of_list(filter: Option<cri::PodSandboxFilter>) -> Self {
        let filter = filter.unwrap_or_default();
        Self {
            id: filter.id,
            ready: filter.state.map(|state| state.state() == cri::PodSandboxState::SandboxReady),
            labels: filter.label_selector,
        }
    }

    pub(crate) fn of_stats(filter: Option<cri::PodSandboxStatsFilter>) -> Self {
        let filter = filter.unwrap_or_default();
        Self { id: filter.id, ready: None, labels: filter.label_selector }
    }

    /// Returns whether it matches all.
    pub(crate) fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// A filter of containers for all calls.
#[derive(Debug, Default, Clone, PartialEq)]
pub(crate) struct Containers {
    /// An id or its prefix; "" for all.
    pub(crate) id: String,
    /// The id of its sandbox, or a prefix; "" for all.
    pub(crate) sandbox: String,
    /// `None` for all.
    pub(crate) state: Option<cri::ContainerState>,
    /// Required labels.
    pub(crate) labels: HashMap<String, String>,
}

impl Containers {
    pub(crate) fn of_list(filter: Option<cri::ContainerFilter>) -> Self {
        let filter = filter.unwrap_or_default();
        let state = filter.state.map(|state| state.state());
        Self { id: filter.id, sandbox: filter.pod_sandbox_id, state, labels: filter.label_selector }
    }

    pub(crate) fn of_stats(filter: Option<cri::ContainerStatsFilter>) -> Self {
        let filter = filter.unwrap_or_default();
        Self {
            id: filter.id,
            sandbox: filter.pod_sandbox_id,
            state: None,
            labels: filter.label_selector,
        }
    }

    /// Returns whether it matches all.
    pub(crate) fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use prost::Message;

    use super::*;

    fn labels() -> impl Strategy<Value = HashMap<String, String>> {
        prop::collection::hash_map("[ab]{1,2}", "[abc]{0,3}", 0..4)
    }

    proptest! {
        #[test]
        fn prefilter_passes_all_selected_messages(selector in labels(), labels in labels()) {
            let item = cri::PodSandbox { labels: labels.clone(), ..Default::default() };
            if selects(&selector, &labels) {
                prop_assert!(may_select(&selector, &item.encode_to_vec()));
            }
        }
    }

    #[test]
    fn empty_filter_matches_all() {
        assert!(
            Sandboxes::of_list(None).is_empty()
                && Sandboxes::of_list(Some(cri::PodSandboxFilter::default())).is_empty()
        );
        assert!(Containers::of_list(Some(cri::ContainerFilter::default())).is_empty());
        assert!(
            !Sandboxes::of_list(Some(cri::PodSandboxFilter {
                state: Some(cri::PodSandboxStateValue { state: 0 }),
                ..Default::default()
            }))
            .is_empty()
        );
    }
}
