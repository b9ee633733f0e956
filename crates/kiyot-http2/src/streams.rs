//! The streams of a connection, by handle and by id.

use std::collections::HashMap;

use slab::Slab;

use super::stream::Stream;

/// What a handle has of its stream.
pub(super) type Key = usize;

/// All streams that are open, or that someone still has a handle of.
#[derive(Debug, Default)]
pub(super) struct Streams {
    all: Slab<Stream>,
    /// Those that the peer may still say something of.
    ids: HashMap<u32, Key>,
    /// The one that was looked for last: the frames of an answer come one after another.
    last: Option<(u32, Key)>,
}

impl Streams {
    pub(super) fn insert(&mut self, stream: Stream) -> Key {
        self.all.insert(stream)
    }

    /// `None` if it is no more: a queue may still have its key.
    pub(super) fn get(&mut self, key: Key) -> Option<&mut Stream> {
        self.all.get_mut(key)
    }

    /// Gives a stream its id.
    pub(super) fn set_id(&mut self, key: Key, id: u32) {
        self.ids.insert(id, key);
    }

    /// The stream of an id, if it is open.
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

    /// The peer says nothing of it any more.
    pub(super) fn remove_id(&mut self, id: u32) {
        self.ids.remove(&id);
        self.last = self.last.filter(|(last, _)| *last != id);
    }

    pub(super) fn remove(&mut self, key: Key) -> Stream {
        self.all.remove(key)
    }

    /// How many the peer knows that are open.
    pub(super) fn open_streams(&self) -> usize {
        self.ids.len()
    }

    /// Whether nobody has a handle of any.
    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    pub(super) fn iter(&mut self) -> impl Iterator<Item = (Key, &mut Stream)> {
        self.all.iter_mut()
    }
}
