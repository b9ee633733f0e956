//! Encoded lists.

use bytes::{BufMut, Bytes, BytesMut};
use prost::encoding::{WireType, encode_key, encode_varint, encoded_len_varint, key_len};

use super::{Cache, Container, Pods, Sandbox, filter};

impl Pods {
    /// Returns a `ListPodSandboxResponse`. Without a filter it is encoded once after a change.
    pub(crate) fn list_sandboxes(&self, filter: &filter::Sandboxes) -> Bytes {
        if !filter.is_empty() {
            return concatenated(self.read().sandboxes_by(filter).map(|sandbox| &sandbox.item));
        }
        if let Some(list) = &self.read().sandbox_list {
            return list.clone();
        }
        let cache = &mut *self.write();
        cache
            .sandbox_list
            .get_or_insert_with(|| {
                shared_list(cache.sandboxes.values_mut().map(|sandbox| &mut sandbox.item))
            })
            .clone()
    }

    /// Returns a `ListContainersResponse`. Without a filter it is encoded once after a change.
    pub(crate) fn list_containers(&self, filter: &filter::Containers) -> Bytes {
        if !filter.is_empty() {
            return concatenated(
                self.read().containers_by(filter).map(|container| &container.item),
            );
        }
        if let Some(list) = &self.read().container_list {
            return list.clone();
        }
        let cache = &mut *self.write();
        cache
            .container_list
            .get_or_insert_with(|| {
                shared_list(cache.containers.values_mut().map(|container| &mut container.item))
            })
            .clone()
    }
}

impl Cache {
    /// Returns the sandboxes that match a filter.
    pub(super) fn sandboxes_by<'a>(
        &'a self,
        filter: &'a filter::Sandboxes,
    ) -> impl Iterator<Item = &'a Sandbox> {
        let id = self.full_sandbox_id(&filter.id);
        let one = (!id.is_empty()).then(|| self.sandboxes.get(id).into_iter());
        let all = one.is_none().then(|| self.sandboxes.values());
        one.into_iter().flatten().chain(all.into_iter().flatten()).filter(|sandbox| {
            filter.ready.is_none_or(|ready| ready == sandbox.ready)
                && filter::may_select(&filter.labels, &sandbox.item)
                && (filter.labels.is_empty()
                    || filter::selects(&filter.labels, &sandbox.item().labels))
        })
    }

    /// Returns the containers that match a filter.
    pub(super) fn containers_by<'a>(
        &'a self,
        filter: &'a filter::Containers,
    ) -> impl Iterator<Item = &'a Container> {
        let (id, sandbox) =
            (self.full_container_id(&filter.id), self.full_sandbox_id(&filter.sandbox));
        let one = (!id.is_empty()).then(|| self.containers.get(id).into_iter());
        let of_one = (one.is_none() && !sandbox.is_empty()).then(|| {
            let ids = self
                .sandboxes
                .get(sandbox)
                .map(|sandbox| sandbox.containers.as_slice())
                .unwrap_or_default();
            ids.iter().filter_map(|id| self.containers.get(id))
        });
        let all = (one.is_none() && of_one.is_none()).then(|| self.containers.values());
        one.into_iter()
            .flatten()
            .chain(of_one.into_iter().flatten())
            .chain(all.into_iter().flatten())
            .filter(move |container| {
                (sandbox.is_empty() || container.sandbox.as_str() == sandbox)
                    && filter.state.is_none_or(|state| state == container.state())
                    && filter::may_select(&filter.labels, &container.item)
                    && (filter.labels.is_empty()
                        || filter::selects(&filter.labels, &container.item().labels))
            })
    }
}

/// Concatenates items, and makes each item a slice of the list.
fn shared_list<'a>(items: impl Iterator<Item = &'a mut Bytes>) -> Bytes {
    let items: Vec<_> = items.collect();
    let list = concatenated(items.iter().map(|item| &**item));
    let mut at = 0;
    for item in items {
        let end = at + item.len();
        *item = list.slice(at..end);
        at = end;
    }
    list
}

/// Merges messages whose only field is repeated, by concatenating them.
pub(super) fn concatenated<'a>(items: impl Iterator<Item = &'a Bytes>) -> Bytes {
    let items: Vec<_> = items.collect();
    let mut all = BytesMut::with_capacity(items.iter().map(|item| item.len()).sum());
    items.into_iter().for_each(|item| all.put_slice(item));
    all.freeze()
}

/// Appends a length-delimited field of several parts.
pub(super) fn append_field(number: u32, parts: &[&[u8]], to: &mut BytesMut) {
    let length = parts.iter().map(|part| part.len()).sum::<usize>();
    to.reserve(key_len(number) + encoded_len_varint(length as u64) + length);
    encode_key(number, WireType::LengthDelimited, to);
    encode_varint(length as u64, to);
    parts.iter().for_each(|part| to.put_slice(part));
}
