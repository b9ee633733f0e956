//! A pod's usage in memory, apart from that of its containers, which is kept with them: nothing is kept twice, and what a container used goes with it.

use std::time::Instant;

use bytes::{BufMut as _, Bytes, BytesMut};
use kiyot_proto::cri;
use prost::{
    Message as _,
    encoding::{WireType, encode_key, encode_varint, encoded_len_varint, key_len},
};

use super::entry::{FRESH, Usage};

/// The numbers of fields: `ListPodSandboxStatsResponse.stats`, `PodSandboxStats.linux`, `LinuxPodSandboxStats.containers`.
const STATS: u32 = 1;
const LINUX: u32 = 2;
const CONTAINERS: u32 = 5;

/// What a pod used.
#[derive(Debug, Clone)]
pub(super) struct PodUsage {
    /// `PodSandboxStats` with nothing but the attributes.
    attributes: Bytes,
    /// `LinuxPodSandboxStats` without containers.
    linux: Bytes,
    until: Instant,
}

impl PodUsage {
    /// What came now. Of containers nothing is taken.
    pub(super) fn of(stats: cri::PodSandboxStats, now: Instant) -> Self {
        let linux = cri::LinuxPodSandboxStats { containers: Vec::new(), ..stats.linux.unwrap_or_default() };
        let attributes = cri::PodSandboxStats { attributes: stats.attributes, ..Default::default() };
        Self { attributes: attributes.encode_to_vec().into(), linux: linux.encode_to_vec().into(), until: now + FRESH }
    }

    /// Whether it is not too old.
    pub(super) fn is_fresh(&self, now: Instant) -> bool {
        now < self.until
    }

    /// Appends it to a `ListPodSandboxStatsResponse`, with what its containers used.
    pub(super) fn put(&self, containers: &[&Usage], list: &mut BytesMut) {
        // An entry of a list of containers has the same length here: both fields' keys are one byte.
        let linux = self.linux.len() + containers.iter().map(|usage| usage.entry.len()).sum::<usize>();
        let stats = self.attributes.len() + key_len(LINUX) + encoded_len_varint(linux as u64) + linux;
        list.reserve(key_len(STATS) + encoded_len_varint(stats as u64) + stats);
        encode_key(STATS, WireType::LengthDelimited, list);
        encode_varint(stats as u64, list);
        list.put_slice(&self.attributes);
        encode_key(LINUX, WireType::LengthDelimited, list);
        encode_varint(linux as u64, list);
        list.put_slice(&self.linux);
        for usage in containers {
            encode_key(CONTAINERS, WireType::LengthDelimited, list);
            list.put_slice(usage.entry.get(1..).unwrap_or_default());
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn container(id: &str, annotation: &str) -> cri::ContainerStats {
        let annotations = [("a".to_owned(), annotation.to_owned())].into();
        let attributes = cri::ContainerAttributes { id: id.to_owned(), annotations, ..Default::default() };
        cri::ContainerStats { attributes: Some(attributes), ..Default::default() }
    }

    proptest! {
        #[test]
        fn it_reads_as_one_message_with_its_containers(
            id in ".{0,200}", count in proptest::option::of(any::<u64>()), containers in proptest::collection::vec((".{0,40}", ".{0,300}"), 0..4)
        ) {
            let now = Instant::now();
            let containers: Vec<_> = containers.iter().map(|(id, annotation)| container(id, annotation)).collect();
            let process = Some(cri::ProcessUsage { timestamp: 7, process_count: count.map(|value| cri::UInt64Value { value }) });
            let stats = |containers: &[cri::ContainerStats]| cri::PodSandboxStats {
                attributes: Some(cri::PodSandboxAttributes { id: id.clone(), ..Default::default() }),
                linux: Some(cri::LinuxPodSandboxStats { process, containers: containers.to_vec(), ..Default::default() }),
                windows: None,
            };
            let usages: Vec<_> =
                containers.iter().map(|stats| Usage::of(&cri::ListContainerStatsResponse { stats: vec![stats.clone()] }, now)).collect();
            let usage = PodUsage::of(stats(&[container("not taken", "")]), now);
            let mut list = BytesMut::new();
            usage.put(&usages.iter().collect::<Vec<_>>(), &mut list);
            usage.put(&[], &mut list);
            let read = cri::ListPodSandboxStatsResponse::decode(list.freeze()).unwrap().stats;
            prop_assert_eq!(read, vec![stats(&containers), stats(&[])]);
        }
    }
}
