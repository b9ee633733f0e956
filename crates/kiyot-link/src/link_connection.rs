//! The trait of connections that a [`Slot`](crate::channel::Slot) can hold.

/// A connection of the link, which a newer connection of its kind may replace.
pub trait LinkConnection: Clone + Send + Sync + 'static {
    /// Closes the connection at once, without a drain.
    fn abort(&self);
    /// Returns whether the connection has ended.
    fn has_ended(&self) -> bool;
    /// Returns whether both handles refer to the same connection.
    fn is_same(&self, other: &Self) -> bool;
}
