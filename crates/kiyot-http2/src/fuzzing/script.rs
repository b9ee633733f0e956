//! Bytes that say what is done.

use super::model::{Model, receive};
use crate::{core::Core, frame};

/// What is left of them.
pub(super) struct Script<'a>(&'a [u8]);

impl<'a> Script<'a> {
    /// With a peer that begins as it must, mostly; and whether the connection has ended by that.
    pub(super) fn begin(bytes: &'a [u8], core: &mut Core, model: &mut Model) -> (Self, bool) {
        let ended =
            !bytes.len().is_multiple_of(8) && receive(core, model, frame::SETTINGS, 0, 0, &[]);
        (Self(bytes), ended)
    }

    /// The next so many, or as many as there are.
    pub(super) fn take(&mut self, most: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(most.min(self.0.len()));
        self.0 = rest;
        taken
    }
}
