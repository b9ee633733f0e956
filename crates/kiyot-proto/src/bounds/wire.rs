//! A reader of protobuf's wire format that visits the fields of a message without decoding them.

/// An iterator over the fields of a message.
pub(super) struct Reader<'a>(&'a [u8]);

/// The value of a field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Value<'a> {
    /// A varint or a number of fixed width.
    Number,
    /// A length-delimited value: a string, bytes, a message, or packed numbers.
    Bytes(&'a [u8]),
}

/// An error of the wire format.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum WireError {
    /// The message is truncated or malformed.
    Malformed,
    /// A field is a group or has an unknown wire type. proto3 has neither.
    WireType,
}
use WireError::Malformed;

impl<'a> Reader<'a> {
    pub(super) fn new(message: &'a [u8]) -> Self {
        Self(message)
    }

    /// Returns the next field's number and value, or `None` at the end.
    pub(super) fn next(&mut self) -> Result<Option<(u32, Value<'a>)>, WireError> {
        if self.0.is_empty() {
            return Ok(None);
        }
        let key = u32::try_from(self.varint()?).map_err(|_| Malformed)?;
        let value = match key & 7 {
            0 => self.varint().map(|_| Value::Number)?,
            1 => self.take(8).map(|_| Value::Number)?,
            2 => {
                let length = usize::try_from(self.varint()?).map_err(|_| Malformed)?;
                Value::Bytes(self.take(length)?)
            }
            5 => self.take(4).map(|_| Value::Number)?,
            _ => return Err(WireError::WireType),
        };
        match key >> 3 {
            0 => Err(Malformed),
            number => Ok(Some((number, value))),
        }
    }

    fn varint(&mut self) -> Result<u64, WireError> {
        let mut number = 0;
        for shift in (0..64).step_by(7) {
            let (byte, rest) = self.0.split_first().ok_or(Malformed)?;
            self.0 = rest;
            number |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Ok(number);
            }
        }
        Err(Malformed)
    }

    fn take(&mut self, length: usize) -> Result<&'a [u8], WireError> {
        let (taken, rest) = self.0.split_at_checked(length).ok_or(Malformed)?;
        self.0 = rest;
        Ok(taken)
    }
}
