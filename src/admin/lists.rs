//! Lists as streams of parts: the first items are sent before the last are read, and no lock is
//! held for longer than a part needs.

use std::{sync::Arc, vec};

use futures::{Stream, stream};
use tonic::Status;

/// The items of a part. So many pods of 1.5 MiB, the limit of the Kubernetes API on an object, are
/// shorter than the longest response that milpactl reads.
const PART_ITEMS: usize = 8;

/// The keys of a backend's items that were not sent yet.
struct Rest<B, K> {
    backend: Arc<B>,
    keys: vec::IntoIter<K>,
}

/// Returns a stream of parts: `read` returns the items of keys, without items that have ended.
pub(super) fn parts<B, K, M>(
    of_backends: Vec<(Arc<B>, Vec<K>)>,
    read: impl Fn(&B, &[K]) -> M + Send + 'static,
) -> impl Stream<Item = Result<M, Status>> + Send + 'static
where
    B: Send + Sync + 'static,
    K: Send + 'static,
    M: Send + 'static,
{
    let rest: Vec<_> = of_backends
        .into_iter()
        .map(|(backend, keys)| Rest { backend, keys: keys.into_iter() })
        .rev()
        .collect();
    stream::unfold((rest, read), |(mut rest, read)| async move {
        // Lets other tasks run between two parts.
        tokio::task::yield_now().await;
        loop {
            let next = rest.last_mut()?;
            let keys: Vec<K> = next.keys.by_ref().take(PART_ITEMS).collect();
            if keys.is_empty() {
                rest.pop();
                continue;
            }
            let part = read(&next.backend, &keys);
            return Some((Ok(part), (rest, read)));
        }
    })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use futures::StreamExt;

    use super::*;

    /// Verifies O20.
    #[tokio::test]
    async fn first_part_of_ten_thousand_items_is_sent_before_the_second_is_read() {
        let was_read = Arc::new(AtomicUsize::new(0));
        let backends =
            vec![(Arc::new("empty"), Vec::new()), (Arc::new("full"), (0..10_000).collect())];
        let count = Arc::clone(&was_read);
        let list = parts(backends, move |name: &&str, keys: &[usize]| {
            count.fetch_add(keys.len(), Ordering::Relaxed);
            (*name, keys.to_vec())
        });
        let mut list = std::pin::pin!(list);
        let mut sent = 0;
        while let Some(part) = list.next().await {
            let (name, keys) = part.unwrap();
            assert_eq!(name, "full");
            assert_eq!(keys, (sent..sent + keys.len()).collect::<Vec<_>>());
            sent += keys.len();
            assert!(keys.len() <= PART_ITEMS);
            assert_eq!(was_read.load(Ordering::Relaxed), sent, "the next part is not read yet");
        }
        assert_eq!(sent, 10_000);
    }
}
