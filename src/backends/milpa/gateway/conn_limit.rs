//! The limit for unauthenticated connections.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use super::peer::Peer;

/// A limit for connections that are not admitted yet: in all, and per peer. Cheap to clone.
#[derive(Debug, Clone)]
pub(super) struct ConnLimit(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    max_total: usize,
    max_per_peer: usize,
    counts: Mutex<Counts>,
}

#[derive(Debug, Default)]
struct Counts {
    total: usize,
    by_peer: HashMap<Peer, usize>,
}

impl ConnLimit {
    pub(super) fn new(max_total: usize, max_per_peer: usize) -> Self {
        Self(Arc::new(Inner { max_total, max_per_peer, counts: Mutex::default() }))
    }

    /// Returns a permit for a connection of a peer, or `None` if a limit is reached.
    pub(super) fn acquire(&self, peer: Peer) -> Option<ConnPermit> {
        let mut counts = self.0.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let of_peer = counts.by_peer.get(&peer).copied().unwrap_or_default();
        if counts.total >= self.0.max_total || of_peer >= self.0.max_per_peer {
            return None;
        }
        counts.by_peer.insert(peer.clone(), of_peer + 1);
        counts.total += 1;
        Some(ConnPermit { limit: self.clone(), peer })
    }
}

/// A permit for an unauthenticated connection, returned to the limit when it is dropped.
#[derive(Debug)]
pub(super) struct ConnPermit {
    limit: ConnLimit,
    peer: Peer,
}

impl Drop for ConnPermit {
    fn drop(&mut self) {
        let mut counts = self.limit.0.counts.lock().unwrap_or_else(PoisonError::into_inner);
        counts.total -= 1;
        if let Some(of_peer) = counts.by_peer.get_mut(&self.peer) {
            *of_peer -= 1;
            if *of_peer == 0 {
                counts.by_peer.remove(&self.peer);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Verifies L14.
    #[test]
    fn connections_above_either_limit_get_no_permit_until_others_end() {
        let limit = ConnLimit::new(3, 2);
        let (first, second) =
            (Peer::Address("192.0.2.1".parse().unwrap()), Peer::Network("net:[2]".into()));
        let permit = limit.acquire(first.clone()).unwrap();
        let _second = limit.acquire(first.clone()).unwrap();
        assert!(limit.acquire(first.clone()).is_none(), "the limit of the peer");
        let _third = limit.acquire(second.clone()).unwrap();
        assert!(limit.acquire(second).is_none(), "the limit in all");
        assert!(limit.acquire(Peer::Unknown).is_none());
        drop(permit);
        let _fourth = limit.acquire(first).unwrap();
        assert!(limit.acquire(Peer::Unknown).is_none());
        assert_eq!(limit.0.counts.lock().unwrap().by_peer.len(), 2, "a refused peer has no entry");
    }
}
