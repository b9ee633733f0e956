//! Reading of single protobuf fields in place, without allocation or copy. Never panics.

use std::borrow::Cow;

use prost::encoding::{WireType, encode_key, encode_varint};

/// Bytes that are not a protobuf message, or have groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Malformed;

/// The value of one field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Value<'a> {
    /// Wire type 0.
    Varint(u64),
    /// Wire type 1 or 5, which is skipped.
    Fixed,
    /// Wire type 2: a string, bytes, a message, or a map's entry.
    Bytes(&'a [u8]),
}

/// The fields of a message, in their order on the wire.
#[derive(Debug, Clone)]
pub struct Fields<'a> {
    rest: &'a [u8],
}

impl<'a> Fields<'a> {
    /// Reads an encoded message.
    pub fn new(message: &'a [u8]) -> Self {
        Self { rest: message }
    }

    fn varint(&mut self) -> Result<u64, Malformed> {
        let mut value = 0;
        for (index, &byte) in self.rest.iter().enumerate().take(10) {
            // The tenth byte has room for one bit.
            if index == 9 && byte > 1 {
                return Err(Malformed);
            }
            value |= u64::from(byte & 0x7f) << (7 * index);
            if byte < 0x80 {
                self.rest = &self.rest[index + 1..];
                return Ok(value);
            }
        }
        Err(Malformed)
    }

    fn take(&mut self, length: u64) -> Result<&'a [u8], Malformed> {
        let length = usize::try_from(length).map_err(|_| Malformed)?;
        let (head, rest) = self.rest.split_at_checked(length).ok_or(Malformed)?;
        self.rest = rest;
        Ok(head)
    }

    fn field(&mut self) -> Result<(u32, Value<'a>), Malformed> {
        let key = u32::try_from(self.varint()?).map_err(|_| Malformed)?;
        let number = key >> 3;
        if number == 0 {
            return Err(Malformed);
        }
        let value = match key & 7 {
            0 => Value::Varint(self.varint()?),
            1 => self.take(8).map(|_| Value::Fixed)?,
            2 => {
                let length = self.varint()?;
                Value::Bytes(self.take(length)?)
            }
            5 => self.take(4).map(|_| Value::Fixed)?,
            _ => return Err(Malformed),
        };
        Ok((number, value))
    }
}

impl<'a> Iterator for Fields<'a> {
    type Item = Result<(u32, Value<'a>), Malformed>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        let field = self.field();
        if field.is_err() {
            self.rest = &[];
        }
        Some(field)
    }
}

/// Calls `visitor` with each value at a path of field numbers. Like a decoder, walks repeated
/// occurrences of a message as one message.
pub fn visit<'a>(
    message: &'a [u8],
    path: &[u32],
    visitor: &mut dyn FnMut(&'a [u8]),
) -> Result<(), Malformed> {
    let Some((&wanted, rest)) = path.split_first() else {
        visitor(message);
        return Ok(());
    };
    for field in Fields::new(message) {
        if let (number, Value::Bytes(value)) = field?
            && number == wanted
        {
            visit(value, rest, visitor)?;
        }
    }
    Ok(())
}

/// Returns the bytes at a path of field numbers: the last occurrence, like a decoder.
pub fn bytes<'a>(message: &'a [u8], path: &[u32]) -> Result<Option<&'a [u8]>, Malformed> {
    let mut found = None;
    visit(message, path, &mut |value| found = Some(value))?;
    Ok(found)
}

/// Returns the string at a path of field numbers; empty if absent.
pub fn string<'a>(message: &'a [u8], path: &[u32]) -> Result<&'a str, Malformed> {
    match bytes(message, path)? {
        Some(value) => str::from_utf8(value).map_err(|_| Malformed),
        None => Ok(""),
    }
}

/// Returns the value of a key in the `map<string, string>` at a path of field numbers.
pub fn map_value<'a>(
    message: &'a [u8],
    path: &[u32],
    key: &str,
) -> Result<Option<&'a str>, Malformed> {
    let mut found = Ok(None);
    visit(message, path, &mut |entry| match (bytes(entry, &[1]), string(entry, &[2])) {
        (Ok(name), Ok(value)) if name.unwrap_or_default() == key.as_bytes() && found.is_ok() => {
            found = Ok(Some(value))
        }
        (Ok(_), Ok(_)) => {}
        _ => found = Err(Malformed),
    })?;
    found
}

/// Returns whether a message has a field of this number. Malformed bytes have no fields.
pub fn has_field(message: &[u8], wanted: u32) -> bool {
    Fields::new(message).any(|field| matches!(field, Ok((number, _)) if number == wanted))
}

/// Returns a message without its fields of this number. Other fields keep their bytes.
pub fn without_field(message: &[u8], number: u32) -> Result<Vec<u8>, Malformed> {
    let (mut fields, mut kept) = (Fields::new(message), Vec::with_capacity(message.len()));
    loop {
        let before = fields.rest;
        let Some(field) = fields.next() else { return Ok(kept) };
        if field?.0 != number {
            kept.extend_from_slice(&before[..before.len() - fields.rest.len()]);
        }
    }
}

/// Longest text of a [`LeadingField`], in bytes: one byte encodes its length. Ids have 64 bytes.
const MAX_LEADING_BYTES: u8 = 127;

/// The beginning of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LeadingField<'a> {
    /// More bytes of the message decide.
    Unknown,
    /// Field 1 with a short text.
    Text(&'a str),
    /// Anything else, or nothing.
    Other,
}

/// Reads the first field of a message, where encoders write field 1. `known` is the beginning of a
/// message of `length` bytes.
pub fn leading_field(known: &[u8], length: usize) -> LeadingField<'_> {
    /// The key of field 1 with wire type 2.
    const KEY: u8 = 1 << 3 | 2;
    let text = match &known[..known.len().min(length)] {
        [] | [KEY] => None,
        [KEY, bytes @ ..=MAX_LEADING_BYTES, text @ ..] => text.get(..usize::from(*bytes)),
        _ => return LeadingField::Other,
    };
    match text {
        Some(text) => str::from_utf8(text).map_or(LeadingField::Other, LeadingField::Text),
        None if known.len() < length => LeadingField::Unknown,
        None => LeadingField::Other,
    }
}

/// A request with a pod's sandbox config.
#[derive(Debug, Clone, Copy)]
pub struct Pod<'a> {
    request: &'a [u8],
    config: u32,
    handler: u32,
}

impl<'a> Pod<'a> {
    /// Reads an encoded `RunPodSandboxRequest`.
    pub fn run(request: &'a [u8]) -> Self {
        Self { request, config: 1, handler: 2 }
    }

    /// Reads an encoded `RestorePodRequest`.
    pub fn restore(request: &'a [u8]) -> Self {
        Self { request, config: 2, handler: 3 }
    }

    /// Returns an encoded `RunPodSandboxRequest` with the same config.
    pub fn to_run_request(&self) -> Cow<'a, [u8]> {
        if self.config == 1 {
            return Cow::Borrowed(self.request);
        }
        let mut request = Vec::new();
        // Routing has read the same part, up to a malformed field.
        let _ = visit(self.request, &[self.config], &mut |config| {
            encode_key(1, WireType::LengthDelimited, &mut request);
            encode_varint(config.len() as u64, &mut request);
            request.extend_from_slice(config);
        });
        Cow::Owned(request)
    }

    /// Returns the request without its `runtime_handler`.
    pub fn without_handler(&self) -> Result<Vec<u8>, Malformed> {
        without_field(self.request, self.handler)
    }

    /// Returns `runtime_handler`.
    pub fn runtime_handler(&self) -> Result<&'a str, Malformed> {
        string(self.request, &[self.handler])
    }

    /// Returns `config.metadata.name`.
    pub fn name(&self) -> Result<&'a str, Malformed> {
        string(self.request, &[self.config, 1, 1])
    }

    /// Returns `config.metadata.namespace`.
    pub fn namespace(&self) -> Result<&'a str, Malformed> {
        string(self.request, &[self.config, 1, 3])
    }

    /// Returns `config.labels[key]`.
    pub fn label(&self, key: &str) -> Result<Option<&'a str>, Malformed> {
        map_value(self.request, &[self.config, 6], key)
    }

    /// Returns `config.annotations[key]`.
    pub fn annotation(&self, key: &str) -> Result<Option<&'a str>, Malformed> {
        map_value(self.request, &[self.config, 7], key)
    }
}

#[cfg(test)]
mod tests;
