//! Colours of a terminal.

use std::env;

/// Words of healthy states.
const GOOD: [&str; 6] = ["Running", "Succeeded", "Bound", "Warm", "Ready", "Idle"];
/// Words of states that need an operator.
const BAD: [&str; 5] = ["Failed", "Lost", "Silent", "Cordoned", "Refused"];

/// Use of colours for states.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Colour {
    /// States get a colour.
    On,
    /// Nothing gets a colour.
    Off,
}

impl Colour {
    /// Returns `On` for a terminal, unless NO_COLOR is set (no-color.org).
    pub(crate) fn of_environment(is_terminal: bool) -> Self {
        let is_unwanted = env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        if is_terminal && !is_unwanted { Self::On } else { Self::Off }
    }

    /// Returns a text in the colour of a state. The text may have spaces at its end.
    pub(crate) fn state(self, text: &str) -> String {
        let begins = |word: &&str| text.starts_with(*word);
        let code = if self == Self::Off {
            None
        } else if GOOD.iter().any(begins) {
            Some("32")
        } else if BAD.iter().any(begins) {
            Some("31")
        } else {
            Some("33")
        };
        match code {
            Some(code) => format!("\u{1b}[{code}m{text}\u{1b}[0m"),
            None => text.to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_terminal_gets_colours() {
        assert_eq!(Colour::of_environment(false), Colour::Off);
        assert_eq!(Colour::Off.state("Failed"), "Failed");
        assert_eq!(Colour::On.state("Failed "), "\u{1b}[31mFailed \u{1b}[0m");
        assert_eq!(Colour::On.state("Running"), "\u{1b}[32mRunning\u{1b}[0m");
    }
}
