//! The filters of lists, as containerd understands them: all given parts must hold, an empty part
//! is none, an id may be a prefix. Pure.

use std::collections::HashMap;

use kiyot_proto::cri;

/// Whether labels have all that a selector asks for, each with the same value.
pub(crate) fn selects(
    selector: &HashMap<String, String>,
    labels: &HashMap<String, String>,
) -> bool {
    selector.iter().all(|(key, value)| labels.get(key) == Some(value))
}

/// Whether an encoded message could have a label that a selector asks for: cheaper than decoding
/// it. `true` may be wrong, `false` is not.
pub(crate) fn may_select(selector: &HashMap<String, String>, encoded: &[u8]) -> bool {
    selector.values().all(|value| {
        value.is_empty() || encoded.windows(value.len()).any(|window| window == value.as_bytes())
    })
}

/// A filter of sandboxes, in one form for all calls.
#[derive(Debug, Default, Clone, PartialEq)]
pub(crate) struct Sandboxes {
    /// An id or a prefix of one; "" for all.
    pub(crate) id: String,
    /// Ready or not; `None` for both.
    pub(crate) ready: Option<bool>,
    /// Labels that must be there.
    pub(crate) labels: HashMap<String, String>,
}

impl Sandboxes {
    /// The filter of `ListPodSandbox`.
    pub(crate) fn of_list(filter: Option<cri::PodSandboxFilter>) -> Self {
        let filter = filter.unwrap_or_default();
        Self {
            id: filter.id,
            ready: filter.state.map(|state| state.state() == cri::PodSandboxState::SandboxReady),
            labels: filter.label_selector,
        }
    }

    /// The filter of `ListPodSandboxStats`: what has no usage is not in that list.
    pub(crate) fn of_stats(filter: Option<cri::PodSandboxStatsFilter>) -> Self {
        let filter = filter.unwrap_or_default();
        Self { id: filter.id, ready: None, labels: filter.label_selector }
    }

    /// Whether it lets everything through.
    pub(crate) fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// A filter of containers, in one form for all calls.
#[derive(Debug, Default, Clone, PartialEq)]
pub(crate) struct Containers {
    /// An id or a prefix of one; "" for all.
    pub(crate) id: String,
    /// The same of its sandbox.
    pub(crate) sandbox: String,
    /// Its state; `None` for any.
    pub(crate) state: Option<cri::ContainerState>,
    /// Labels that must be there.
    pub(crate) labels: HashMap<String, String>,
}

impl Containers {
    /// The filter of `ListContainers`.
    pub(crate) fn of_list(filter: Option<cri::ContainerFilter>) -> Self {
        let filter = filter.unwrap_or_default();
        let state = filter.state.map(|state| state.state());
        Self { id: filter.id, sandbox: filter.pod_sandbox_id, state, labels: filter.label_selector }
    }

    /// The filter of `ListContainerStats`.
    pub(crate) fn of_stats(filter: Option<cri::ContainerStatsFilter>) -> Self {
        let filter = filter.unwrap_or_default();
        Self {
            id: filter.id,
            sandbox: filter.pod_sandbox_id,
            state: None,
            labels: filter.label_selector,
        }
    }

    /// Whether it lets everything through.
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
        fn what_is_selected_is_never_passed_over(selector in labels(), labels in labels()) {
            let item = cri::PodSandbox { labels: labels.clone(), ..Default::default() };
            if selects(&selector, &labels) {
                prop_assert!(may_select(&selector, &item.encode_to_vec()));
            }
        }
    }

    #[test]
    fn an_empty_filter_is_none() {
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
