//! Lists as streams of parts: the first items are sent before the last are read, and no lock is
//! held for longer than a part needs.

use std::{sync::Arc, vec};

use futures::{Stream, stream};
use tonic::Status;

use crate::backends::milpa::Milpa;

/// The items of a part.
const PART_ITEMS: usize = 128;

/// The keys of a backend's items that were not sent yet.
struct Rest<K> {
    milpa: Arc<Milpa>,
    keys: vec::IntoIter<K>,
}

/// Returns a stream of parts: `read` returns the items of keys, of which some may have ended.
pub(super) fn parts<K, M>(
    of_backends: Vec<(Arc<Milpa>, Vec<K>)>,
    read: impl Fn(&Milpa, &[K]) -> M + Send + 'static,
) -> impl Stream<Item = Result<M, Status>> + Send + 'static
where
    K: Send + 'static,
    M: Send + 'static,
{
    let rest: Vec<_> = of_backends
        .into_iter()
        .map(|(milpa, keys)| Rest { milpa, keys: keys.into_iter() })
        .rev()
        .collect();
    stream::unfold((rest, read), |(mut rest, read)| async move {
        // Others run between two parts.
        tokio::task::yield_now().await;
        loop {
            let backend = rest.last_mut()?;
            let keys: Vec<K> = backend.keys.by_ref().take(PART_ITEMS).collect();
            if keys.is_empty() {
                rest.pop();
                continue;
            }
            let part = read(&backend.milpa, &keys);
            return Some((Ok(part), (rest, read)));
        }
    })
}
