//! The local terminal: raw mode and size.

use std::io::{self, IsTerminal};

use rustix::{
    stdio::{stdin, stdout},
    termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr},
};

/// Raw mode of the terminal of standard input. Dropping it restores the terminal, also in a panic.
#[derive(Debug)]
pub(crate) struct RawMode {
    before: Termios,
}

impl RawMode {
    /// Passes each key on, without echo, line editing and signals.
    pub(crate) fn enter() -> io::Result<Self> {
        let before = tcgetattr(stdin())?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(stdin(), OptionalActions::Now, &raw)?;
        Ok(Self { before })
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        // A terminal that was closed needs no mode.
        let _ = tcsetattr(stdin(), OptionalActions::Now, &self.before);
    }
}

/// Returns whether standard input is a terminal.
pub(crate) fn is_input() -> bool {
    io::stdin().is_terminal()
}

/// Returns columns and rows of the terminal of standard output, or else of standard input.
pub(crate) fn size() -> Option<(u16, u16)> {
    let of_output = tcgetwinsize(stdout());
    let size = of_output.or_else(|_| tcgetwinsize(stdin())).ok()?;
    (size.ws_col > 0 && size.ws_row > 0).then_some((size.ws_col, size.ws_row))
}
