//! Ids of pods in cells, of their containers, and of cells.

use std::{fmt, sync::Arc};

use ring::rand::{SecureRandom, SystemRandom};

/// How the ids begin that the kubelet sees. Not hexadecimal: no id of containerd can begin so.
pub const PREFIX: &str = "milpa";

/// Length of a sandbox's or container's id, as log collectors expect it.
const LENGTH: usize = 64;

/// Not an id of this kind.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{value:?} is not {what}: allowed is {allowed}")]
pub struct NotAnId {
    value: String,
    what: &'static str,
    allowed: &'static str,
}

/// No randomness could be had from the kernel.
#[derive(Debug, Clone, Copy, thiserror::Error)]
#[error("no random bytes from the kernel")]
pub struct NoRandomness;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident, $what:literal, $allowed:literal, $prefix:expr, $length:expr) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(Arc<str>);

        impl $name {
            /// A new one, at random.
            pub fn mint() -> Result<Self, NoRandomness> {
                Ok(Self(minted($prefix, $length)?.into()))
            }

            /// Checks that a text has the form of one.
            pub fn parse(text: &str) -> Result<Self, NotAnId> {
                if text.len() == $length && text.starts_with($prefix) && text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-') {
                    Ok(Self(text.into()))
                } else {
                    Err(NotAnId { value: text.chars().take(80).collect(), what: $what, allowed: $allowed })
                }
            }

            /// The id.
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
    /// A pod sandbox in a cell.
    SandboxId, "the id of a sandbox in a cell", "milpa and 59 of [a-z0-9]", PREFIX, LENGTH
);
id!(
    /// A container in a cell.
    ContainerId, "the id of a container in a cell", "milpa and 59 of [a-z0-9]", PREFIX, LENGTH
);
id!(
    /// A cell. Short, because it is part of socket paths and host names.
    CellId, "the id of a cell", "cell- and 12 of [a-z0-9]", "cell-", 17
);

fn minted(prefix: &str, length: usize) -> Result<String, NoRandomness> {
    const ALPHABET: &[u8; 32] = b"abcdefghijklmnopqrstuvwxyz234567";
    let mut random = [0_u8; LENGTH];
    SystemRandom::new().fill(&mut random).map_err(|_| NoRandomness)?;
    let letters = random.iter().map(|byte| char::from(ALPHABET[usize::from(byte % 32)]));
    Ok(prefix.chars().chain(letters).take(length).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn minted_ids_parse_and_differ() {
        let (one, other) = (SandboxId::mint().unwrap(), SandboxId::mint().unwrap());
        assert_ne!(one, other);
        assert_eq!(SandboxId::parse(one.as_str()), Ok(one.clone()));
        assert_eq!(one.as_str().len(), 64);
        assert_eq!(CellId::mint().unwrap().as_str().len(), 17);
    }

    #[test]
    fn other_texts_do_not() {
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
