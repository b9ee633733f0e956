//! How many connections there may be that have not shown yet whose they are.

use std::{
    collections::HashMap,
    net::IpAddr,
    sync::{Arc, Mutex, PoisonError},
};

/// Counts connections that are not admitted yet: in all, and from each address. Cheap to clone.
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
    by_peer: HashMap<IpAddr, usize>,
}

impl Newcomers {
    pub(super) fn new(most: usize, most_of_a_peer: usize) -> Self {
        Self(Arc::new(Inner { most, most_of_a_peer, now: Mutex::default() }))
    }

    /// A place for one more, unless there are as many as may be. Over a unix socket there is no peer address, and only the total counts.
    pub(super) fn place(&self, peer: Option<IpAddr>) -> Option<Place> {
        let mut now = self.0.now.lock().unwrap_or_else(PoisonError::into_inner);
        if now.all >= self.0.most {
            return None;
        }
        if let Some(peer) = peer {
            let of_peer = now.by_peer.entry(peer).or_default();
            if *of_peer >= self.0.most_of_a_peer {
                return None;
            }
            *of_peer += 1;
        }
        now.all += 1;
        Some(Place { of: self.clone(), peer })
    }
}

/// The place of one connection, until it is dropped.
#[derive(Debug)]
pub(super) struct Place {
    of: Newcomers,
    peer: Option<IpAddr>,
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut now = self.of.0.now.lock().unwrap_or_else(PoisonError::into_inner);
        now.all -= 1;
        if let Some(peer) = self.peer
            && let Some(of_peer) = now.by_peer.get_mut(&peer)
        {
            *of_peer -= 1;
            if *of_peer == 0 {
                now.by_peer.remove(&peer);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_limits_hold_and_places_come_back() {
        let newcomers = Newcomers::new(3, 2);
        let (one, other) = (Some("192.0.2.1".parse().unwrap()), Some("192.0.2.2".parse().unwrap()));
        let first = newcomers.place(one).unwrap();
        let _second = newcomers.place(one).unwrap();
        assert!(newcomers.place(one).is_none());
        let _third = newcomers.place(other).unwrap();
        assert!(newcomers.place(other).is_none());
        assert!(newcomers.place(None).is_none());
        drop(first);
        let _fourth = newcomers.place(one).unwrap();
        assert!(newcomers.place(None).is_none());
        assert_eq!(newcomers.0.now.lock().unwrap().by_peer.len(), 2);
    }
}
