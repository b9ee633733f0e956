//! What can be the current one of several connections, each in its time.

/// A connection, as [`Slot`](crate::channel::Slot) holds it.
pub trait Held: Clone + Send + Sync + 'static {
    /// Ends it at once.
    fn cut(&self);
    /// Whether it has ended.
    fn has_ended(&self) -> bool;
    /// Whether both are the same one.
    fn is(&self, other: &Self) -> bool;
}
