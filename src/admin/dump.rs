//! The support bundle: named texts, without secrets.
//!
//! Pods have no commands and arguments, in which secrets are common, and only the keys of their
//! annotations. Cells have no consoles. Records are keys and lengths. No text has values of
//! environment variables.

use std::{io, sync::Arc};

use bytes::Bytes;
use futures::{FutureExt, Stream, StreamExt, future, stream, stream::BoxStream};
use kiyot_engine::id::CellId;
use kiyot_proto::admin::{self, DumpResponse};
use kiyot_values::error_chain::error_chain;
use tonic::Status;

use super::{
    access::Access,
    deadlines::{SHORT, within},
    lists,
    parts::Parts,
    renderer::{Piece, Renderer},
    versions,
};
use crate::backends::{
    Backend,
    milpa::{
        Milpa,
        inventory::{PodKey, Record},
    },
};

/// Bytes of a response.
const PART_BYTES: usize = 64 * 1024;

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

/// Returns the texts. Each begins with its name, and each piece is made when it is sent.
pub(super) fn responses(
    parts: Arc<Parts>,
) -> io::Result<impl Stream<Item = Result<DumpResponse, Status>> + Send + 'static> {
    let renderer = parts.dumps.renderers.start()?;
    Ok(stream::iter(FILES).flat_map(move |file| {
        let name = DumpResponse { file: file.to_owned(), content: Bytes::new() };
        let content = rendered(Arc::clone(&renderer), pieces(file, Arc::clone(&parts)));
        stream::iter([Ok(name)]).chain(content)
    }))
}

fn rendered(
    renderer: Arc<Renderer>,
    pieces: BoxStream<'static, Piece>,
) -> impl Stream<Item = Result<DumpResponse, Status>> + Send + 'static {
    let texts = stream::unfold((renderer, pieces), |(renderer, mut pieces)| async move {
        let text = renderer.next(pieces.as_mut()).await?;
        Some((stream::iter(split(text)), (renderer, pieces)))
    });
    texts.flatten()
}

/// Returns a text as responses without the file's name.
fn split(text: Result<String, Status>) -> Vec<Result<DumpResponse, Status>> {
    let text = match text {
        Ok(text) => Bytes::from(text),
        Err(status) => return vec![Err(status)],
    };
    let begins = (0..text.len()).step_by(PART_BYTES);
    let part = |begin: usize| DumpResponse {
        file: String::new(),
        content: text.slice(begin..text.len().min(begin + PART_BYTES)),
    };
    begins.map(|begin| Ok(part(begin))).collect()
}

/// Returns the pieces of a text. Each is read when the stream is polled.
fn pieces(file: &'static str, parts: Arc<Parts>) -> BoxStream<'static, Piece> {
    match file {
        "version.txt" => read(async move {
            let text = parts.dumps.of_calls(file, versions::text(&parts)).await;
            move || text.to_string()
        }),
        "config.txt" => read(async move {
            let config = Arc::clone(&parts.config.borrow());
            // No configuration key has a secret.
            move || format!("{config:#?}\n")
        }),
        "backends.txt" => read(async move {
            let backends = parts.backends();
            move || format!("{backends:#?}\n")
        }),
        "pods.txt" => listed(
            parts,
            |milpa| milpa.inventory().pod_keys(),
            |milpa, keys: &[PodKey]| {
                let pods = milpa.inventory().pods(keys);
                move || lines(pods.into_iter().map(pod))
            },
        ),
        "cells.txt" => listed(
            parts,
            |milpa| milpa.inventory().cell_ids(),
            |milpa, ids: &[CellId]| {
                let cells = milpa.inventory().cells(ids);
                move || lines(cells.into_iter().map(cell))
            },
        ),
        "pools.txt" => read(async move {
            let pools = parts.pools();
            move || format!("{pools:#?}\n")
        }),
        "costs.txt" => read(async move {
            let costs: Vec<_> = parts.milpas.iter().map(|it| it.inventory().costs()).collect();
            move || lines(costs.into_iter().map(|costs| format!("{costs:#?}")))
        }),
        "offerings.txt" => read(async move {
            let offerings = within(SHORT, "ListOfferings", parts.offerings()).await;
            move || match offerings {
                Ok(offerings) => lines(offerings.into_iter().map(|it| format!("{it:?}"))),
                Err(status) => format!("not read: {}\n", status.message()),
            }
        }),
        "events.txt" => read(async move {
            let events = parts.milpas.iter().flat_map(|milpa| milpa.inventory().events().0);
            let events: Vec<_> = events.collect();
            move || lines(events.into_iter().map(|event| format!("{event:?}")))
        }),
        "provider.txt" => read(async move {
            let text = parts.dumps.of_calls(file, instances(&parts)).await;
            move || text.to_string()
        }),
        "records.txt" => records(parts),
        "log.txt" => read(async move {
            let log = parts.recent_log.lines();
            move || log.text()
        }),
        _ => stream::empty().boxed(),
    }
}

/// Returns the only piece of a text.
fn read<R: FnOnce() -> String + Send + 'static>(
    reading: impl Future<Output = R> + Send + 'static,
) -> BoxStream<'static, Piece> {
    stream::once(reading.map(|render| Box::new(render) as Piece)).boxed()
}

/// Returns pieces of the items of all backends. `keys` lists the keys of a backend's items, `items`
/// reads the items of some keys.
fn listed<K: Send + 'static, R: FnOnce() -> String + Send + 'static>(
    parts: Arc<Parts>,
    keys: impl Fn(&Milpa) -> Vec<K> + Send + 'static,
    items: impl Fn(&Milpa, &[K]) -> R + Send + 'static,
) -> BoxStream<'static, Piece> {
    let of_backends = async move {
        let keys = |milpa: &Arc<Milpa>| (Arc::clone(milpa), keys(milpa));
        let keys: Vec<_> = parts.milpas.iter().map(keys).collect();
        lists::parts(keys, move |milpa: &Milpa, keys: &[K]| Box::new(items(milpa, keys)) as Piece)
    };
    let pieces = stream::once(of_backends).flatten();
    // Reading a part from memory can't fail.
    pieces.filter_map(|piece| future::ready(piece.ok())).boxed()
}

fn pod(pod: admin::Pod) -> String {
    let mut pod = Access::without_rights().shown_pod(pod);
    let read = std::mem::take(&mut pod.annotations).into_keys();
    pod.other_annotations.splice(0..0, read);
    format!("{pod:#?}")
}

/// Returns the text of a cell without its console, a log that only root reads.
fn cell(cell: admin::Cell) -> String {
    format!("{:#?}", Access::without_rights().shown_cell(cell))
}

/// Returns the keys and lengths of all records without their values, which have secrets.
fn records(parts: Arc<Parts>) -> BoxStream<'static, Piece> {
    let of_backends = stream::iter(parts.milpas.clone()).flat_map(|milpa| {
        stream::unfold(Some((milpa, None)), |from| async move {
            let (milpa, last): (Arc<Milpa>, Option<Record>) = from?;
            let reading = async {
                let records = milpa.inventory().records(last).await;
                records.map_err(|error| Status::unavailable(error_chain(&error)))
            };
            let records = match within(SHORT, "Dump", reading).await {
                Ok(records) => records,
                Err(status) => {
                    let error = format!("not read: {}\n", status.message());
                    return Some((Box::new(move || error) as Piece, None));
                }
            };
            let last = records.last()?.clone();
            let name = milpa.name().clone();
            let line = move |record: Record| {
                let Record { table, key, bytes } = record;
                format!("{name} {table} {key} {bytes} bytes")
            };
            let piece: Piece = Box::new(move || lines(records.into_iter().map(line)));
            Some((piece, Some((milpa, Some(last)))))
        })
    });
    of_backends.boxed()
}

async fn instances(parts: &Parts) -> String {
    let mut text = String::new();
    for milpa in &parts.milpas {
        match milpa.inventory().instances().await {
            Ok(instances) => text.push_str(&lines(instances.into_iter())),
            Err(error) => text.push_str(&format!("not listed: {}\n", error.text())),
        }
    }
    text
}

fn lines(lines: impl Iterator<Item = String>) -> String {
    lines.map(|line| line + "\n").collect()
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
    fn long_text_is_split_and_empty_text_has_no_part() {
        let sizes = |text: String| -> Vec<usize> {
            split(Ok(text)).into_iter().map(|part| part.unwrap().content.len()).collect()
        };
        assert_eq!(sizes("x".repeat(PART_BYTES + 1)), [PART_BYTES, 1]);
        assert!(sizes(String::new()).is_empty());
    }
}
