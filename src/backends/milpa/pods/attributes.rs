//! Attributes of statistics (id, metadata, labels, annotations), copied field by field from the
//! encoded list entry of the container or sandbox, without decoding it.

use bytes::{Buf as _, Bytes, BytesMut};
use prost::encoding::{WireType, decode_key, decode_varint};

use super::lists::append_field;

/// Field numbers of id, metadata, labels and annotations in an entry and in the attributes.
type Fields = [(u32, u32); 4];

/// Fields of `Container` and `ContainerAttributes`.
const CONTAINER_FIELDS: Fields = [(1, ID), (3, METADATA), (8, LABELS), (9, ANNOTATIONS)];
/// Fields of `PodSandbox` and `PodSandboxAttributes`.
const SANDBOX_FIELDS: Fields = [(1, ID), (2, METADATA), (5, LABELS), (6, ANNOTATIONS)];
const ID: u32 = 1;
const METADATA: u32 = 2;
const LABELS: u32 = 3;
const ANNOTATIONS: u32 = 4;

/// Field number of `attributes` in `ContainerStats` and in `PodSandboxStats`.
const ATTRIBUTES: u32 = 1;

/// Returns the field `attributes` of a `ContainerStats`, from a `ListContainersResponse` with a
/// single entry.
pub(super) fn of_container(list: &Bytes) -> BytesMut {
    field(list, &CONTAINER_FIELDS)
}

/// Returns the field `attributes` of a `PodSandboxStats`, from a `ListPodSandboxResponse` with a
/// single entry.
pub(super) fn of_sandbox(list: &Bytes) -> BytesMut {
    field(list, &SANDBOX_FIELDS)
}

fn field(list: &[u8], fields: &Fields) -> BytesMut {
    let mut attributes = BytesMut::with_capacity(list.len());
    let mut has_metadata = false;
    if let Some((_, entry)) = next(&mut &*list) {
        let mut entry = entry.unwrap_or_default();
        while let Some((number, content)) = next(&mut entry) {
            let to = fields.iter().find(|(from, _)| *from == number).map(|(_, to)| *to);
            if let (Some(to), Some(content)) = (to, content) {
                has_metadata |= to == METADATA;
                append_field(to, &[content], &mut attributes);
            }
        }
    }
    if !has_metadata {
        // The kubelet dereferences the metadata without a check.
        append_field(METADATA, &[], &mut attributes);
    }
    let mut field = BytesMut::new();
    append_field(ATTRIBUTES, &[&attributes], &mut field);
    field
}

/// Returns the number of the next field, and its content if it is length-delimited. `None` at the
/// end, and for an invalid field, which does not occur: the daemon has encoded the message itself.
fn next<'a>(message: &mut &'a [u8]) -> Option<(u32, Option<&'a [u8]>)> {
    let (number, kind) = decode_key(message).ok()?;
    let content = match kind {
        WireType::LengthDelimited => {
            let length = usize::try_from(decode_varint(message).ok()?).ok()?;
            let (content, rest) = message.split_at_checked(length)?;
            *message = rest;
            return Some((number, Some(content)));
        }
        WireType::Varint => decode_varint(message).ok().map(|_| 0)?,
        WireType::SixtyFourBit => 8,
        WireType::ThirtyTwoBit => 4,
        WireType::StartGroup | WireType::EndGroup => return None,
    };
    message.advance(content.min(message.len()));
    Some((number, None))
}

#[cfg(test)]
mod tests {
    use kiyot_proto::cri;
    use proptest::{collection::hash_map, option, prelude::*};
    use prost::Message as _;

    use super::*;

    proptest! {
        #[test]
        fn attributes_equal_the_attributes_of_the_entry(
            id in ".{0,80}", name in option::of(".{0,300}"), created_at: i64, state in 0..4,
            labels in hash_map(".{0,9}", ".{0,200}", 0..4),
            annotations in hash_map(".{0,9}", ".{0,20}", 0..4), image in ".{0,20}",
        ) {
            let metadata = name.map(|name| cri::ContainerMetadata { name, attempt: 7 });
            let attributes = cri::ContainerAttributes {
                id: id.clone(),
                metadata: Some(metadata.clone().unwrap_or_default()),
                labels: labels.clone(),
                annotations: annotations.clone(),
            };
            let entry = cri::Container {
                id: id.clone(),
                pod_sandbox_id: image.clone(),
                metadata,
                image: Some(cri::ImageSpec { image: image.clone(), ..Default::default() }),
                image_ref: image.clone(),
                state,
                created_at,
                labels: labels.clone(),
                annotations: annotations.clone(),
                image_id: image,
            };
            let list = cri::ListContainersResponse { containers: vec![entry] };
            let stats = of_container(&list.encode_to_vec().into()).freeze();
            let expected =
                cri::ContainerStats { attributes: Some(attributes), ..Default::default() };
            prop_assert_eq!(cri::ContainerStats::decode(stats).unwrap(), expected);

            let metadata =
                cri::PodSandboxMetadata { name: id.clone(), attempt: 1, ..Default::default() };
            let entry = cri::PodSandbox {
                id: id.clone(),
                metadata: Some(metadata.clone()),
                state,
                created_at,
                labels: labels.clone(),
                annotations: annotations.clone(),
                runtime_handler: "kiyot".to_owned(),
            };
            let list = cri::ListPodSandboxResponse { items: vec![entry] };
            let stats = of_sandbox(&list.encode_to_vec().into()).freeze();
            let metadata = Some(metadata);
            let attributes = cri::PodSandboxAttributes { id, metadata, labels, annotations };
            let expected =
                cri::PodSandboxStats { attributes: Some(attributes), ..Default::default() };
            prop_assert_eq!(cri::PodSandboxStats::decode(stats).unwrap(), expected);
        }

        #[test]
        fn attributes_of_any_bytes_can_be_decoded(list: Vec<u8>) {
            let stats = cri::ContainerStats::decode(of_container(&list.into()).freeze());
            prop_assert!(stats.is_err() || stats.unwrap().attributes.unwrap().metadata.is_some());
        }
    }
}
