//! Decodes header blocks.

use super::{
    MAX_TABLE_BYTES,
    field::{Field, Name},
    huffman, integer,
    table::Table,
};
use crate::{Reason, error::Violation};

/// Decoder of a connection's header blocks, in order.
#[derive(Debug)]
pub(crate) struct Decoder {
    table: Table,
    /// Buffer for a Huffman-coded string; bounded by the length of a header block.
    text: Vec<u8>,
}

impl Decoder {
    pub(crate) fn new() -> Self {
        Self { table: Table::new(), text: Vec::new() }
    }

    /// Decodes a block field by field. After an error the dynamic table is unknown, so that no
    /// later block can be decoded.
    pub(crate) fn decode(
        &mut self,
        mut block: &[u8],
        mut each: impl FnMut(&Field),
    ) -> Result<(), Violation> {
        let mut begun = false;
        while let Some(&first) = block.first() {
            if first & 0x80 != 0 {
                let index = integer::decode(&mut block, 7)?;
                each(self.field(index)?);
            } else if first & 0xc0 == 0x40 {
                let field = self.literal(&mut block, 6)?;
                each(&field);
                self.table.add(field);
            } else if first & 0xe0 == 0x20 {
                let max_size = integer::decode(&mut block, 5)?;
                if begun || max_size > MAX_TABLE_BYTES {
                    return Err(Violation(
                        Reason::COMPRESSION_ERROR,
                        "HPACK table size update is misplaced or too large",
                    ));
                }
                self.table.set_max_size(max_size);
                continue;
            } else {
                let mut field = self.literal(&mut block, 4)?;
                // The mark "never indexed" is kept when the field is forwarded.
                field.value.set_sensitive(first & 0x10 != 0);
                each(&field);
            }
            begun = true;
        }
        Ok(())
    }

    fn field(&self, index: usize) -> Result<&Field, Violation> {
        self.table
            .get(index)
            .ok_or(Violation(Reason::COMPRESSION_ERROR, "HPACK index is in no table"))
    }

    fn literal(&mut self, block: &mut &[u8], bits: u32) -> Result<Field, Violation> {
        let (name, name_length) = match integer::decode(block, bits)? {
            0 => {
                let name = string(&mut self.text, block)?;
                (Name::parse(name), name.len())
            }
            index => self.field(index).map(|field| (field.name.clone(), field.name_length))?,
        };
        Ok(Field::new(name, name_length, string(&mut self.text, block)?))
    }
}

/// Removes a string from the front of a block.
fn string<'a, 'b: 'a>(text: &'a mut Vec<u8>, block: &mut &'b [u8]) -> Result<&'a [u8], Violation> {
    let is_huffman = block.first().is_some_and(|first| first & 0x80 != 0);
    let length = integer::decode(block, 7)?;
    let (string, rest) = block
        .split_at_checked(length)
        .ok_or(Violation(Reason::COMPRESSION_ERROR, "HPACK string is truncated"))?;
    *block = rest;
    if !is_huffman {
        return Ok(string);
    }
    text.clear();
    huffman::decode(string, text)?;
    Ok(text)
}
