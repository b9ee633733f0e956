//! Static and dynamic table (RFC 7541, 2.3 and appendix A).

use std::{collections::VecDeque, sync::LazyLock};

use super::{
    MAX_TABLE_BYTES,
    field::{Field, Name},
};

/// Static table.
const STATIC_TABLE: [(&str, &str); 61] = [
    (":authority", ""),
    (":method", "GET"),
    (":method", "POST"),
    (":path", "/"),
    (":path", "/index.html"),
    (":scheme", "http"),
    (":scheme", "https"),
    (":status", "200"),
    (":status", "204"),
    (":status", "206"),
    (":status", "304"),
    (":status", "400"),
    (":status", "404"),
    (":status", "500"),
    ("accept-charset", ""),
    ("accept-encoding", "gzip, deflate"),
    ("accept-language", ""),
    ("accept-ranges", ""),
    ("accept", ""),
    ("access-control-allow-origin", ""),
    ("age", ""),
    ("allow", ""),
    ("authorization", ""),
    ("cache-control", ""),
    ("content-disposition", ""),
    ("content-encoding", ""),
    ("content-language", ""),
    ("content-length", ""),
    ("content-location", ""),
    ("content-range", ""),
    ("content-type", ""),
    ("cookie", ""),
    ("date", ""),
    ("etag", ""),
    ("expect", ""),
    ("expires", ""),
    ("from", ""),
    ("host", ""),
    ("if-match", ""),
    ("if-modified-since", ""),
    ("if-none-match", ""),
    ("if-range", ""),
    ("if-unmodified-since", ""),
    ("last-modified", ""),
    ("link", ""),
    ("location", ""),
    ("max-forwards", ""),
    ("proxy-authenticate", ""),
    ("proxy-authorization", ""),
    ("range", ""),
    ("referer", ""),
    ("refresh", ""),
    ("retry-after", ""),
    ("server", ""),
    ("set-cookie", ""),
    ("strict-transport-security", ""),
    ("transfer-encoding", ""),
    ("user-agent", ""),
    ("vary", ""),
    ("via", ""),
    ("www-authenticate", ""),
];

static STATIC_FIELDS: LazyLock<Vec<Field>> = LazyLock::new(|| {
    STATIC_TABLE
        .iter()
        .map(|(name, value)| Field::new(Name::parse(name.as_bytes()), name.len(), value.as_bytes()))
        .collect()
});

/// Entries of the static table. Indices of the dynamic table follow.
pub(super) const STATIC_LEN: usize = STATIC_TABLE.len();

/// Returns the static index of a name; 0 if absent.
pub(super) fn static_name(name: &[u8]) -> usize {
    STATIC_TABLE.iter().position(|(known, _)| known.as_bytes() == name).map_or(0, |at| at + 1)
}

/// Returns the static index of a field.
pub(super) fn static_field(name: &[u8], value: &[u8]) -> Option<usize> {
    STATIC_TABLE
        .iter()
        .position(|(known, with)| known.as_bytes() == name && with.as_bytes() == value)
        .map(|at| at + 1)
}

/// Dynamic table, newest entry first.
#[derive(Debug)]
pub(super) struct Table {
    fields: VecDeque<Field>,
    size: usize,
    max_size: usize,
}

impl Table {
    pub(super) fn new() -> Self {
        Self { fields: VecDeque::new(), size: 0, max_size: MAX_TABLE_BYTES }
    }

    /// Returns the field at an index, from 1.
    pub(super) fn get(&self, index: usize) -> Option<&Field> {
        match index.checked_sub(1)?.checked_sub(STATIC_LEN) {
            None => STATIC_FIELDS.get(index - 1),
            Some(at) => self.fields.get(at),
        }
    }

    pub(super) fn set_max_size(&mut self, max_size: usize) {
        self.max_size = max_size;
        self.shrink(0);
    }

    /// Inserts a field, unless it exceeds the table's size.
    pub(super) fn add(&mut self, field: Field) {
        let size = field.size();
        self.shrink(size);
        if size <= self.max_size {
            self.size += size;
            self.fields.push_front(field);
        }
    }

    fn shrink(&mut self, coming: usize) {
        while self.size + coming > self.max_size
            && let Some(oldest) = self.fields.pop_back()
        {
            self.size -= oldest.size();
        }
    }
}
