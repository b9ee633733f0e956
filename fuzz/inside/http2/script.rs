//! Scripts: bytes that select actions.

use super::model::{Model, receive};
use crate::{core::Core, frame};

/// Rest of a script.
pub(super) struct Script<'a>(&'a [u8]);

impl<'a> Script<'a> {
    /// Begins with the peer's SETTINGS for most inputs. Returns whether the connection has ended.
    pub(super) fn begin(bytes: &'a [u8], core: &mut Core, model: &mut Model) -> (Self, bool) {
        let ended =
            !bytes.len().is_multiple_of(8) && receive(core, model, frame::SETTINGS, 0, 0, &[]);
        (Self(bytes), ended)
    }

    /// Takes the next bytes, at most `most`.
    pub(super) fn take(&mut self, most: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(most.min(self.0.len()));
        self.0 = rest;
        taken
    }
}
