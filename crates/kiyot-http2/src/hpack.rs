//! Header blocks (RFC 7541).

mod decoder;
mod encoder;
mod field;
mod huffman;
mod integer;
mod table;

pub(super) use decoder::Decoder;
pub(super) use encoder::Encoder;
pub(super) use field::{Field, Name, PseudoValue};

/// Room of a dynamic table, in bytes as HPACK counts them: what both sides begin with. We keep no
/// more, whatever a peer allows.
pub(super) const MAX_TABLE_BYTES: usize = 4096;

#[cfg(test)]
mod tests;
