//! The support bundle: named texts, without secrets.
//!
//! Its pods have no commands and arguments, in which secrets are common, and of annotations the
//! keys alone, its cells no consoles, and its records are keys and lengths; as everywhere, no
//! values of environment variables.

use std::sync::Arc;

use bytes::Bytes;
use futures::{Stream, StreamExt, stream};
use kiyot_proto::admin::{self, DumpResponse};
use tonic::Status;

use super::{
    access::Access,
    deadlines::{SHORT, within},
    parts::Parts,
    service, versions,
};
use crate::{backends::milpa::Milpa, error_chain::error_chain};

/// Bytes of a response.
const PART_BYTES: usize = 64 * 1024;
/// The pods or cells that are read under one lock.
const PART_ITEMS: usize = 128;

/// The texts of the bundle, in order.
const FILES: [&str; 12] = [
    "version.txt",
    "config.txt",
    "backends.txt",
    "pods.txt",
    "cells.txt",
    "pools.txt",
    "costs.txt",
    "offerings.txt",
    "events.txt",
    "provider.txt",
    "records.txt",
    "log.txt",
];

/// Returns the texts, each made when it is sent.
pub(super) fn responses(
    parts: Arc<Parts>,
) -> impl Stream<Item = Result<DumpResponse, Status>> + Send + 'static {
    let texts = stream::iter(FILES).then(move |file| {
        let parts = Arc::clone(&parts);
        async move { stream::iter(split(file, text(file, &parts).await)) }
    });
    texts.flatten()
}

/// Returns a text as responses, of which the first has its name.
fn split(file: &str, text: String) -> Vec<Result<DumpResponse, Status>> {
    let text = Bytes::from(text);
    let begins = (0..text.len().max(1)).step_by(PART_BYTES);
    let part = |begin: usize| DumpResponse {
        file: if begin == 0 { file.to_owned() } else { String::new() },
        content: text.slice(begin..text.len().min(begin + PART_BYTES)),
    };
    begins.map(|begin| Ok(part(begin))).collect()
}

async fn text(file: &str, parts: &Parts) -> String {
    match file {
        "version.txt" => versions::text(parts).await,
        // No key of it has a secret.
        "config.txt" => format!("{:#?}\n", *parts.config.borrow()),
        "backends.txt" => format!("{:#?}\n", service::backends(parts)),
        "pods.txt" => lines(parts, |milpa| {
            let keys = milpa.inventory().pod_keys();
            keys.chunks(PART_ITEMS).flat_map(|keys| milpa.inventory().pods(keys)).map(pod).collect()
        }),
        "cells.txt" => lines(parts, |milpa| {
            let ids = milpa.inventory().cell_ids();
            let cells = ids.chunks(PART_ITEMS).flat_map(|ids| milpa.inventory().cells(ids));
            cells.map(cell).collect()
        }),
        "pools.txt" => format!("{:#?}\n", service::pools(parts)),
        "costs.txt" => lines(parts, |milpa| vec![format!("{:#?}", milpa.inventory().costs())]),
        "offerings.txt" => match within(SHORT, "ListOfferings", service::offerings(parts)).await {
            Ok(offerings) => offerings.iter().map(|offer| format!("{offer:?}\n")).collect(),
            Err(status) => format!("not read: {}\n", status.message()),
        },
        "events.txt" => lines(parts, |milpa| {
            let (events, _) = milpa.inventory().events();
            events.iter().map(|event| format!("{event:?}")).collect()
        }),
        "provider.txt" => instances(parts).await,
        "records.txt" => records(parts).await,
        "log.txt" => parts.recent_log.text(),
        _ => String::new(),
    }
}

fn pod(pod: admin::Pod) -> String {
    let mut pod = Access::without_rights().shown_pod(pod);
    let read = std::mem::take(&mut pod.annotations).into_keys();
    pod.other_annotations.splice(0..0, read);
    format!("{pod:#?}")
}

/// Returns the text of a cell, without its console: a log, which only root reads.
fn cell(cell: admin::Cell) -> String {
    format!("{:#?}", Access::without_rights().shown_cell(cell))
}

/// Returns the keys of all records with their lengths: records have secrets.
async fn records(parts: &Parts) -> String {
    let mut text = String::new();
    for milpa in &parts.milpas {
        let records = async {
            let records = milpa.inventory().records().await;
            records.map_err(|error| Status::unavailable(error_chain(&error)))
        };
        match within(SHORT, "Dump", records).await {
            Ok(records) => text.extend(records.into_iter().map(|line| line + "\n")),
            Err(status) => text.push_str(&format!("not read: {}\n", status.message())),
        }
    }
    text
}

async fn instances(parts: &Parts) -> String {
    let mut text = String::new();
    for milpa in &parts.milpas {
        match milpa.inventory().instances().await {
            Ok(instances) => text.extend(instances.into_iter().map(|line| line + "\n")),
            Err(error) => text.push_str(&format!("not listed: {}\n", error.text())),
        }
    }
    text
}

fn lines(parts: &Parts, of_backend: impl Fn(&Milpa) -> Vec<String>) -> String {
    let texts = parts.milpas.iter().flat_map(|milpa| of_backend(milpa));
    texts.map(|text| text + "\n").collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cell_has_no_console() {
        let shown = cell(admin::Cell {
            id: "cell-a".to_owned(),
            console: "sesame".to_owned(),
            ..Default::default()
        });
        assert!(shown.contains("cell-a") && !shown.contains("sesame"), "{shown}");
    }

    #[test]
    fn long_text_is_split_and_only_the_first_part_is_named() {
        let text = "x".repeat(PART_BYTES + 1);
        let parts: Vec<_> = split("pods.txt", text).into_iter().map(Result::unwrap).collect();
        let sizes: Vec<_> =
            parts.iter().map(|part| (part.file.as_str(), part.content.len())).collect();
        assert_eq!(sizes, [("pods.txt", PART_BYTES), ("", 1)]);
        let empty: Vec<_> =
            split("log.txt", String::new()).into_iter().map(Result::unwrap).collect();
        assert_eq!((empty.len(), empty[0].file.as_str()), (1, "log.txt"));
    }
}
