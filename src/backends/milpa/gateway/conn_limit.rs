//! Limits for connections, in total and per peer.

use std::{
    collections::{HashMap, VecDeque},
    hash::Hash,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

use super::peer::Peer;

/// A limit for connections, in total and per peer. Cheap to clone.
///
/// A permit stays taken for a while after its connection has ended, so that the rate of handshakes
/// is limited as well.
#[derive(Debug)]
pub(super) struct ConnLimit<K: Eq + Hash + Clone = Peer>(Arc<Inner<K>>);

impl<K: Eq + Hash + Clone> Clone for ConnLimit<K> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

#[derive(Debug)]
struct Inner<K> {
    max_total: usize,
    max_per_peer: usize,
    cooldown: Duration,
    counts: Mutex<Counts<K>>,
}

#[derive(Debug)]
struct Counts<K> {
    total: usize,
    by_peer: HashMap<K, usize>,
    /// Returned permits, each with the time at which it becomes free; counted as taken until then.
    cooling: VecDeque<(Instant, K)>,
}

impl<K: Eq + Hash> Counts<K> {
    fn free(&mut self, peer: &K) {
        self.total -= 1;
        if let Some(of_peer) = self.by_peer.get_mut(peer) {
            *of_peer -= 1;
            if *of_peer == 0 {
                self.by_peer.remove(peer);
            }
        }
    }
}

impl<K: Eq + Hash + Clone> ConnLimit<K> {
    pub(super) fn new(max_total: usize, max_per_peer: usize, cooldown: Duration) -> Self {
        let counts = Counts { total: 0, by_peer: HashMap::new(), cooling: VecDeque::new() };
        Self(Arc::new(Inner { max_total, max_per_peer, cooldown, counts: Mutex::new(counts) }))
    }

    /// Returns a permit for a connection of a peer, or `None` if a limit is reached.
    pub(super) fn acquire(&self, peer: K, now: Instant) -> Option<ConnPermit<K>> {
        let mut counts = self.0.counts.lock().unwrap_or_else(PoisonError::into_inner);
        // `cooling` is in the order of these times.
        while let Some((_, cooled)) = counts.cooling.pop_front_if(|(free_at, _)| *free_at <= now) {
            counts.free(&cooled);
        }
        let of_peer = counts.by_peer.get(&peer).copied().unwrap_or_default();
        if counts.total >= self.0.max_total || of_peer >= self.0.max_per_peer {
            return None;
        }
        counts.by_peer.insert(peer.clone(), of_peer + 1);
        counts.total += 1;
        Some(ConnPermit { limit: self.clone(), peer })
    }
}

/// A permit for a connection, returned to the limit when it is dropped.
#[derive(Debug)]
pub(super) struct ConnPermit<K: Eq + Hash + Clone = Peer> {
    limit: ConnLimit<K>,
    peer: K,
}

impl<K: Eq + Hash + Clone> Drop for ConnPermit<K> {
    fn drop(&mut self) {
        let Inner { cooldown, counts, .. } = &*self.limit.0;
        let mut counts = counts.lock().unwrap_or_else(PoisonError::into_inner);
        if cooldown.is_zero() {
            counts.free(&self.peer);
        } else {
            // With the lock held, so that the queue is in the order of the times.
            counts.cooling.push_back((Instant::now() + *cooldown, self.peer.clone()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Verifies L14.
    #[test]
    fn connections_above_either_limit_get_no_permit_until_others_end() {
        let limit = ConnLimit::new(3, 2, Duration::ZERO);
        let now = Instant::now();
        let (first, second) =
            (Peer::Address("192.0.2.1".parse().unwrap()), Peer::Network("net:[2]".into()));
        let permit = limit.acquire(first.clone(), now).unwrap();
        let _second = limit.acquire(first.clone(), now).unwrap();
        assert!(limit.acquire(first.clone(), now).is_none(), "the limit of the peer");
        let _third = limit.acquire(second.clone(), now).unwrap();
        assert!(limit.acquire(second, now).is_none(), "the limit in total");
        assert!(limit.acquire(Peer::Unknown, now).is_none());
        drop(permit);
        let _fourth = limit.acquire(first, now).unwrap();
        assert!(limit.acquire(Peer::Unknown, now).is_none());
        assert_eq!(limit.0.counts.lock().unwrap().by_peer.len(), 2, "a refused peer has no entry");
    }

    /// Verifies L21.
    #[tokio::test(start_paused = true)]
    async fn returned_permit_stays_taken_for_its_cooldown() {
        let cooldown = Duration::from_millis(100);
        let limit = ConnLimit::new(2, 1, cooldown);
        let peer = Peer::Address("192.0.2.1".parse().unwrap());
        let returned = Instant::now();
        drop(limit.acquire(peer.clone(), returned).unwrap());
        for (after, is_free) in [(0, false), (99, false), (100, true)] {
            let now = returned + Duration::from_millis(after);
            assert_eq!(limit.acquire(peer.clone(), now).is_some(), is_free, "after {after} ms");
        }
        // Permits of other peers are free meanwhile.
        assert!(limit.acquire(Peer::Unknown, returned + cooldown).is_some());
        let later = returned + 10 * cooldown;
        tokio::time::advance(10 * cooldown).await;
        let _permit = limit.acquire(peer, later).unwrap();
        let counts = limit.0.counts.lock().unwrap();
        assert_eq!((counts.total, counts.by_peer.len(), counts.cooling.len()), (1, 1, 0));
    }
}
