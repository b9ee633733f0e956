//! Bytes that a part has moved.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

/// A counter of bytes. Clones share the sum.
#[derive(Debug, Clone, Default)]
pub struct ByteCounter(Arc<AtomicU64>);

impl ByteCounter {
    /// Adds bytes.
    pub fn add(&self, bytes: usize) {
        self.0.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Returns the sum.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}
