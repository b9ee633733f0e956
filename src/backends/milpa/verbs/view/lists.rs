//! Lists, encoded.

use bytes::{BufMut, Bytes, BytesMut};
use kiyot_proto::cri;
use prost::Message;

use super::{
    super::{filter, restored},
    Container, Known, Sandbox, View,
    entry::decoded,
};

impl View {
    /// A `ListPodSandboxResponse`. Without a filter it is a clone of what was encoded after the last change.
    pub(in super::super) fn list_sandboxes(&self, filter: &filter::Sandboxes) -> Bytes {
        let known = self.read();
        if filter.is_empty() {
            return known.sandbox_list.get_or_init(|| joined(known.sandboxes.values().map(|sandbox| &sandbox.item))).clone();
        }
        joined(known.sandboxes_by(filter).map(|sandbox| &sandbox.item))
    }

    /// A `ListContainersResponse`. Without a filter it is a clone of what was encoded after the last change.
    pub(in super::super) fn list_containers(&self, filter: &filter::Containers) -> Bytes {
        let known = self.read();
        if filter.is_empty() {
            return known.container_list.get_or_init(|| joined(known.containers.values().map(|container| &container.item))).clone();
        }
        joined(known.containers_by(filter).map(|container| &container.item))
    }

    /// A `ListContainerStatsResponse` of the containers that run and had a heartbeat.
    pub(in super::super) fn list_container_stats(&self, filter: &filter::Containers) -> Bytes {
        let known = self.read();
        if filter.is_empty() {
            return known.stats_list.get_or_init(|| joined(known.containers.values().filter_map(|container| container.stats.as_ref()))).clone();
        }
        joined(known.containers_by(filter).filter_map(|container| container.stats.as_ref()))
    }

    /// A `ListPodSandboxStatsResponse` of the sandboxes that run.
    pub(in super::super) fn list_sandbox_stats(&self, filter: &filter::Sandboxes) -> Bytes {
        let known = self.read();
        let stats = known.sandboxes_by(filter).map(|sandbox| known.stats_of(sandbox)).collect();
        cri::ListPodSandboxStatsResponse { stats }.encode_to_vec().into()
    }

    /// The usage of one sandbox and its containers.
    pub(in super::super) fn sandbox_stats(&self, sandbox: &Sandbox) -> cri::PodSandboxStats {
        self.read().stats_of(sandbox)
    }
}

impl Known {
    fn sandboxes_by<'a>(&'a self, filter: &'a filter::Sandboxes) -> impl Iterator<Item = &'a Sandbox> {
        let id = self.full_sandbox_id(&filter.id);
        let one = (!id.is_empty()).then(|| self.sandboxes.get(id).into_iter());
        let all = one.is_none().then(|| self.sandboxes.values());
        one.into_iter().flatten().chain(all.into_iter().flatten()).filter(|sandbox| {
            filter.ready.is_none_or(|ready| ready == sandbox.ready)
                && filter::may_select(&filter.labels, &sandbox.item)
                && (filter.labels.is_empty() || filter::selects(&filter.labels, &sandbox.item().labels))
        })
    }

    fn containers_by<'a>(&'a self, filter: &'a filter::Containers) -> impl Iterator<Item = &'a Container> {
        let (id, sandbox) = (self.full_container_id(&filter.id), self.full_sandbox_id(&filter.sandbox));
        let one = (!id.is_empty()).then(|| self.containers.get(id).into_iter());
        let all = one.is_none().then(|| self.containers.values());
        one.into_iter().flatten().chain(all.into_iter().flatten()).filter(move |container| {
            (sandbox.is_empty() || container.sandbox.as_str() == sandbox)
                && filter.state.is_none_or(|state| state == container.state())
                && filter::may_select(&filter.labels, &container.item)
                && (filter.labels.is_empty() || filter::selects(&filter.labels, &container.item().labels))
        })
    }

    fn stats_of(&self, sandbox: &Sandbox) -> cri::PodSandboxStats {
        let containers = sandbox.containers.iter().filter_map(|id| self.containers.get(id)?.stats()).collect();
        restored::sandbox_stats(sandbox.item(), sandbox.stats.as_ref().map(decoded), containers)
    }
}

/// Messages whose only field is repeated are joined by putting one after the other.
fn joined<'a>(items: impl Iterator<Item = &'a Bytes>) -> Bytes {
    let items: Vec<_> = items.collect();
    let mut all = BytesMut::with_capacity(items.iter().map(|item| item.len()).sum());
    items.into_iter().for_each(|item| all.put_slice(item));
    all.freeze()
}
