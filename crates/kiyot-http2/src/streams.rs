//! Streams of a connection, by key and by id.

use std::collections::HashMap;

use slab::Slab;

use super::stream::Stream;

/// Index of a stream in the slab.
pub(super) type Key = usize;

/// Streams that are open or have references.
#[derive(Debug, Default)]
pub(super) struct Streams {
    all: Slab<Stream>,
    /// Open streams.
    ids: HashMap<u32, Key>,
    /// Result of the last lookup: the frames of a message follow one another.
    last: Option<(u32, Key)>,
}

impl Streams {
    pub(super) fn insert(&mut self, stream: Stream) -> Key {
        self.all.insert(stream)
    }

    /// Returns a stream, or `None` if it was removed: queues may still have its key.
    pub(super) fn get(&mut self, key: Key) -> Option<&mut Stream> {
        self.all.get_mut(key)
    }

    /// Sets the id of an opened stream.
    pub(super) fn set_id(&mut self, key: Key, id: u32) {
        self.ids.insert(id, key);
    }

    /// Returns the open stream of an id.
    pub(super) fn key_of(&mut self, id: u32) -> Option<Key> {
        match self.last {
            Some((last, key)) if last == id => Some(key),
            _ => {
                let key = *self.ids.get(&id)?;
                self.last = Some((id, key));
                Some(key)
            }
        }
    }

    /// Removes the id of a closed stream.
    pub(super) fn remove_id(&mut self, id: u32) {
        self.ids.remove(&id);
        self.last = self.last.filter(|(last, _)| *last != id);
    }

    pub(super) fn remove(&mut self, key: Key) -> Stream {
        self.all.remove(key)
    }

    /// Counts open streams.
    pub(super) fn open_streams(&self) -> usize {
        self.ids.len()
    }

    /// Returns whether there are no streams.
    #[cfg(debug_assertions)]
    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    pub(super) fn iter(&mut self) -> impl Iterator<Item = (Key, &mut Stream)> {
        self.all.iter_mut()
    }
}
