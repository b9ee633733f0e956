//! Ids of cells, and of the sandboxes and containers in them.

use std::{fmt, sync::Arc};

use kiyot_values::names::has_label_letters;
use ring::rand::{SecureRandom, SystemRandom};

/// The name of a provider in offers and records.
pub type ProviderKey = &'static str;

/// The prefix of sandbox and container ids. Not hexadecimal, so that no id of containerd starts
/// with it.
pub const PREFIX: &str = "milpa";

/// The length of a sandbox or container id: log collectors expect the length of containerd's ids.
const ID_LENGTH: usize = 64;
/// The length of a cell's id. Short, because it is part of socket paths and host names.
const CELL_ID_LENGTH: usize = 17;
/// The most characters of an invalid id in an error message.
const MAX_SHOWN_CHARS: usize = 80;

/// An error of parsing an id.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{value:?} is not {what}; allowed: {allowed}")]
pub struct InvalidId {
    value: String,
    what: &'static str,
    allowed: &'static str,
}

/// An error of generating an id: the kernel returned no random bytes.
#[derive(Debug, Clone, Copy, thiserror::Error)]
#[error("no random bytes from the kernel")]
pub struct NoRandomness;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident, $what:literal, $allowed:literal, $prefix:expr, $length:expr) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(Arc<str>);

        impl $name {
            /// The length of an id's random part.
            pub const RANDOM_BYTES: usize = $length - $prefix.len();

            /// Generates an id of random bytes from the kernel.
            pub fn mint() -> Result<Self, NoRandomness> {
                let mut random = [0_u8; Self::RANDOM_BYTES];
                SystemRandom::new().fill(&mut random).map_err(|_| NoRandomness)?;
                Ok(Self::from_random(&random))
            }

            /// Returns the id of random bytes.
            pub fn from_random(random: &[u8; Self::RANDOM_BYTES]) -> Self {
                const ALPHABET: &[u8; 32] = b"abcdefghijklmnopqrstuvwxyz234567";
                let letter = |byte: &u8| char::from(ALPHABET[usize::from(byte % 32)]);
                let id: String = $prefix.chars().chain(random.iter().map(letter)).collect();
                Self(id.into())
            }

            /// Parses an id and checks its form.
            pub fn parse(text: &str) -> Result<Self, InvalidId> {
                if has_form(text, $prefix, $length) {
                    Ok(Self(text.into()))
                } else {
                    Err(InvalidId {
                        value: text.chars().take(MAX_SHOWN_CHARS).collect(),
                        what: $what,
                        allowed: $allowed,
                    })
                }
            }

            /// Returns the id as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl std::borrow::Borrow<str> for $name {
            fn borrow(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

id!(
    /// The id of a pod sandbox in a cell.
    SandboxId, "the id of a sandbox in a cell", "milpa and 59 of [a-z0-9]", PREFIX, ID_LENGTH
);
id!(
    /// The id of a container in a cell.
    ContainerId, "the id of a container in a cell", "milpa and 59 of [a-z0-9]", PREFIX, ID_LENGTH
);
id!(
    /// The id of a cell.
    CellId, "the id of a cell", "cell- and 12 of [a-z0-9]", "cell-", CELL_ID_LENGTH
);

fn has_form(text: &str, prefix: &str, length: usize) -> bool {
    text.len() == length && text.starts_with(prefix) && has_label_letters(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generated_ids_parse_and_differ() {
        let (first, second) = (SandboxId::mint().unwrap(), SandboxId::mint().unwrap());
        assert_ne!(first, second);
        assert_eq!(SandboxId::parse(first.as_str()), Ok(first.clone()));
        assert_eq!(first.as_str().len(), ID_LENGTH);
        assert_eq!(CellId::mint().unwrap().as_str().len(), CELL_ID_LENGTH);
    }

    #[test]
    fn id_of_random_bytes_has_a_letter_for_each() {
        let mut random = [0_u8; CellId::RANDOM_BYTES];
        (random[1], random[2], random[3]) = (25, 31, 32);
        let id = CellId::from_random(&random);
        assert_eq!(id.as_str(), "cell-az7aaaaaaaaa");
        assert_eq!(CellId::parse(id.as_str()), Ok(id));
    }

    #[test]
    fn text_of_another_form_is_not_an_id() {
        for text in [
            "",
            "milpa",
            &"a".repeat(64),
            &format!("milpa{}", "A".repeat(59)),
            "../../../../etc/passwd",
        ] {
            assert!(SandboxId::parse(text).is_err(), "{text}");
            assert!(CellId::parse(text).is_err(), "{text}");
        }
    }
}
