//! A call of the CRI socket.

use super::{caller::Caller, deadline::Deadline, incoming::Incoming, server_state::ServerState};

/// A call before its response has begun. Dropping it cancels the call.
#[derive(Debug)]
pub(super) struct Call<'a> {
    pub(super) server: &'a ServerState,
    pub(super) incoming: Incoming,
    pub(super) deadline: Deadline,
    pub(super) caller: Caller,
}
