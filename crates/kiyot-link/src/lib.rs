//! What daemon and agent share of the link between them: bootstrap data, TLS, and calls over a connection that the other side dialled.

pub mod bootstrap;
pub mod channel;
pub mod private;
