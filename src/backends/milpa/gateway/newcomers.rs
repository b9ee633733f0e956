//! How many connections there may be that have not shown yet whose they are.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use super::peer::Peer;

/// Counts connections that are not admitted yet: in all, and of each peer. Cheap to clone.
#[derive(Debug, Clone)]
pub(super) struct Newcomers(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    most: usize,
    most_of_a_peer: usize,
    now: Mutex<Now>,
}

#[derive(Debug, Default)]
struct Now {
    all: usize,
    by_peer: HashMap<Peer, usize>,
}

impl Newcomers {
    pub(super) fn new(most: usize, most_of_a_peer: usize) -> Self {
        Self(Arc::new(Inner { most, most_of_a_peer, now: Mutex::default() }))
    }

    /// A place for one more, unless there are as many as may be.
    pub(super) fn place(&self, peer: Peer) -> Option<Place> {
        let mut now = self.0.now.lock().unwrap_or_else(PoisonError::into_inner);
        let of_peer = now.by_peer.get(&peer).copied().unwrap_or_default();
        if now.all >= self.0.most || of_peer >= self.0.most_of_a_peer {
            return None;
        }
        now.by_peer.insert(peer.clone(), of_peer + 1);
        now.all += 1;
        Some(Place { of: self.clone(), peer })
    }
}

/// The place of one connection, until it is dropped.
#[derive(Debug)]
pub(super) struct Place {
    of: Newcomers,
    peer: Peer,
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut now = self.of.0.now.lock().unwrap_or_else(PoisonError::into_inner);
        now.all -= 1;
        if let Some(of_peer) = now.by_peer.get_mut(&self.peer) {
            *of_peer -= 1;
            if *of_peer == 0 {
                now.by_peer.remove(&self.peer);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Verifies L14.
    #[test]
    fn both_limits_hold_and_places_come_back() {
        let newcomers = Newcomers::new(3, 2);
        let (one, other) =
            (Peer::Address("192.0.2.1".parse().unwrap()), Peer::Network("net:[2]".into()));
        let first = newcomers.place(one.clone()).unwrap();
        let _second = newcomers.place(one.clone()).unwrap();
        assert!(newcomers.place(one.clone()).is_none());
        let _third = newcomers.place(other.clone()).unwrap();
        assert!(newcomers.place(other).is_none(), "as many as may be in all");
        assert!(newcomers.place(Peer::Unseen).is_none());
        drop(first);
        let _fourth = newcomers.place(one).unwrap();
        assert!(newcomers.place(Peer::Unseen).is_none());
        assert_eq!(
            newcomers.0.now.lock().unwrap().by_peer.len(),
            2,
            "who is refused is not remembered"
        );
    }
}
