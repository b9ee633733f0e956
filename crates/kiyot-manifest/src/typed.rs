//! Values of a manifest as types of the Kubernetes API.
//!
//! Null is the empty value of its type, as in the API server. Unknown keys are noted.

use std::{cell::Cell, fmt, iter::once_with, marker::PhantomData};

use kiyot_values::problems::{Field, Problem, Report, likely};
use serde::{
    Deserializer,
    de::{self, DeserializeOwned, DeserializeSeed, IntoDeserializer, Visitor},
    forward_to_deserialize_any,
};
use serde_json::{Map, Value, map};

use super::place::Place;

/// Most items of a list.
const MAX_ITEMS: usize = 1024;
/// Most items of all lists of an object: even an empty item can take about 500 bytes as its type.
const MAX_ALL_ITEMS: usize = 40_000;
/// Most entries of a table with arbitrary keys.
const MAX_ENTRIES: usize = 10_000;
/// Type of an environment variable. Problems don't show its field [`SECRET`].
const VARIABLE: &str = "EnvVar";
const SECRET: &str = "value";
/// Type of a quantity, which is a text or a number.
const QUANTITY: &str = "Quantity";
const NO_FIELD: &str = "is not a field of Kubernetes 1.36";

/// Reads an object. Reports the first field with a wrong type, and notes unknown fields.
pub(super) fn read<T: DeserializeOwned>(
    at: &Place<'_>,
    fields: Map<String, Value>,
    notes: &Report,
) -> Option<T> {
    let limits = Limits { report: at.collector(), notes, items: Cell::new(MAX_ALL_ITEMS) };
    let value = Value::Object(fields);
    read_at(&Path::Root(at.at()), value, false, &limits, PhantomData).ok()
}

/// Collectors of problems and notes of an object, and its remaining limits.
struct Limits<'r> {
    report: &'r Report,
    notes: &'r Report,
    /// Items of lists.
    items: Cell<usize>,
}

/// Place of a value.
enum Path<'p> {
    /// An object.
    Root(&'p str),
    /// Field of a table.
    Key(&'p Path<'p>, &'p str),
    /// Item of a list.
    Item(&'p Path<'p>, usize),
}

impl fmt::Display for Path<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Root(at) => f.write_str(at),
            Self::Key(table, key) => write!(f, "{table}.{key}"),
            Self::Item(list, index) => write!(f, "{list}[{index}]"),
        }
    }
}

/// Value with a wrong type.
#[derive(Debug, thiserror::Error)]
enum Invalid {
    /// Reported with its place.
    #[error("reported")]
    Reported,
    /// Refused by its type, without a place.
    #[error("refused")]
    Refused,
}

impl de::Error for Invalid {
    fn custom<T: fmt::Display>(_: T) -> Self {
        Self::Refused
    }
}

/// Value at a place.
struct Node<'p> {
    path: &'p Path<'p>,
    value: Value,
    is_secret: bool,
    limits: &'p Limits<'p>,
}

/// Reads a value, and reports it if its type refuses it.
fn read_at<'de, S: DeserializeSeed<'de>>(
    path: &Path<'_>,
    value: Value,
    is_secret: bool,
    limits: &Limits<'_>,
    seed: S,
) -> Result<S::Value, Invalid> {
    seed.deserialize(Node { path, value, is_secret, limits }).map_err(|error| {
        if matches!(error, Invalid::Refused) {
            let rule = "is invalid; allowed: a value of its type in Kubernetes";
            limits.report.add(Problem::new(path.to_string(), rule));
        }
        Invalid::Reported
    })
}

impl Node<'_> {
    /// Reports a value of another type.
    fn invalid<T>(self, allowed: &str) -> Result<T, Invalid> {
        let field = Field::new(self.path.to_string(), self.value, self.limits.report);
        let field = if self.is_secret { field.secret() } else { field };
        field.refuse(format!("is invalid; allowed: {allowed}"));
        Err(Invalid::Reported)
    }

    fn too_many<T>(&self, rule: String) -> Result<T, Invalid> {
        self.limits.report.add(Problem::new(self.path.to_string(), rule));
        Err(Invalid::Reported)
    }

    /// Reads a table with arbitrary keys, or with the fields of a type.
    fn table<'de, V: Visitor<'de>>(
        mut self,
        of: Option<(&str, &'static [&'static str])>,
        visitor: V,
    ) -> Result<V::Value, Invalid> {
        let fields = match self.value.take() {
            Value::Null => Map::new(),
            Value::Object(fields) => fields,
            value => return Node { value, ..self }.invalid("a table"),
        };
        if of.is_none() && fields.len() > MAX_ENTRIES {
            return self.too_many(format!("has {} keys; allowed: {MAX_ENTRIES}", fields.len()));
        }
        let secret = of.is_some_and(|(name, _)| name == VARIABLE).then_some(SECRET);
        let known = of.map(|(_, known)| known);
        let entries = fields.into_iter();
        visitor.visit_map(Entries { node: self, entries, known, secret, next: None })
    }

    fn list<'de, V: Visitor<'de>>(mut self, visitor: V) -> Result<V::Value, Invalid> {
        let items = match self.value.take() {
            Value::Null => Vec::new(),
            Value::Array(items) => items,
            value => return Node { value, ..self }.invalid("a list"),
        };
        if items.len() > MAX_ITEMS {
            return self.too_many(format!("has {} items; allowed: {MAX_ITEMS}", items.len()));
        }
        let Some(left) = self.limits.items.get().checked_sub(items.len()) else {
            let rule =
                format!("is too long beside other lists; allowed: {MAX_ALL_ITEMS} items in all");
            return self.too_many(rule);
        };
        self.limits.items.set(left);
        visitor.visit_seq(Items { node: self, items: items.into_iter().enumerate() })
    }

    /// Reads an integer from `least` to `most`.
    fn integer(self, least: i64, most: i64) -> Result<i64, Invalid> {
        match self.value.as_i64() {
            Some(number) if (least..=most).contains(&number) => Ok(number),
            _ if self.value.is_null() => Ok(0),
            _ => self.invalid(&format!("a whole number from {least} to {most}")),
        }
    }
}

impl<'de> Deserializer<'de> for Node<'_> {
    type Error = Invalid;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Invalid> {
        match self.value {
            Value::Array(_) => self.list(visitor),
            Value::Object(_) => self.table(None, visitor),
            Value::Null => visitor.visit_unit(),
            Value::Bool(flag) => visitor.visit_bool(flag),
            Value::Number(number) => {
                // An error of the type does not contain the value.
                number.deserialize_any(visitor).map_err(|_: serde_json::Error| Invalid::Refused)
            }
            Value::String(text) => visitor.visit_string(text),
        }
    }

    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Invalid> {
        match self.value {
            Value::Bool(flag) => visitor.visit_bool(flag),
            Value::Null => visitor.visit_bool(false),
            _ => self.invalid("true or false"),
        }
    }

    fn deserialize_i32<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Invalid> {
        visitor.visit_i64(self.integer(i32::MIN.into(), i32::MAX.into())?)
    }

    fn deserialize_i64<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Invalid> {
        visitor.visit_i64(self.integer(i64::MIN, i64::MAX)?)
    }

    fn deserialize_string<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Invalid> {
        match self.value {
            Value::String(text) => visitor.visit_string(text),
            Value::Null => visitor.visit_str(""),
            _ => self.invalid("a text in quotes"),
        }
    }

    fn deserialize_str<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Invalid> {
        self.deserialize_string(visitor)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Invalid> {
        if self.value.is_null() { visitor.visit_none() } else { visitor.visit_some(self) }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        mut self,
        name: &'static str,
        visitor: V,
    ) -> Result<V::Value, Invalid> {
        if name == QUANTITY && self.value.is_null() {
            self.value = 0.into();
        }
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Invalid> {
        self.list(visitor)
    }

    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Invalid> {
        self.table(None, visitor)
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Invalid> {
        self.table(Some((name, fields)), visitor)
    }

    forward_to_deserialize_any! {
        i8 i16 u8 u16 u32 u64 f32 f64 char bytes byte_buf unit unit_struct tuple tuple_struct enum
        identifier ignored_any
    }
}

/// Items of a list.
struct Items<'p> {
    node: Node<'p>,
    items: std::iter::Enumerate<std::vec::IntoIter<Value>>,
}

impl<'de> de::SeqAccess<'de> for Items<'_> {
    type Error = Invalid;

    fn next_element_seed<S: DeserializeSeed<'de>>(
        &mut self,
        seed: S,
    ) -> Result<Option<S::Value>, Invalid> {
        let Some((index, value)) = self.items.next() else { return Ok(None) };
        let Node { path, is_secret, limits, .. } = self.node;
        read_at(&Path::Item(path, index), value, is_secret, limits, seed).map(Some)
    }
}

/// Entries of a table.
struct Entries<'p> {
    node: Node<'p>,
    entries: map::IntoIter,
    /// Fields of the type; `None` for arbitrary keys.
    known: Option<&'static [&'static str]>,
    /// Field whose value is secret.
    secret: Option<&'static str>,
    /// Entry whose key was read.
    next: Option<(String, Value)>,
}

impl<'de> de::MapAccess<'de> for Entries<'_> {
    type Error = Invalid;

    fn next_key_seed<S: DeserializeSeed<'de>>(
        &mut self,
        seed: S,
    ) -> Result<Option<S::Value>, Invalid> {
        for (key, value) in self.entries.by_ref() {
            if let Some(known) = self.known.filter(|known| !known.contains(&key.as_str())) {
                let path = self.node.path;
                self.node.limits.notes.add_all(once_with(|| {
                    let rule = match likely(&key, known) {
                        likely if likely.is_empty() => NO_FIELD.to_owned(),
                        likely => format!("{NO_FIELD}; did you mean: {}", likely.join(", ")),
                    };
                    Problem::new(Path::Key(path, &key).to_string(), rule)
                }));
                continue;
            }
            let read = seed.deserialize(key.as_str().into_deserializer());
            self.next = Some((key, value));
            return read.map(Some);
        }
        Ok(None)
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, Invalid> {
        let (key, value) = self.next.take().unwrap_or_default();
        let Node { path, is_secret, limits, .. } = self.node;
        let is_secret = is_secret || self.secret == Some(key.as_str());
        read_at(&Path::Key(path, &key), value, is_secret, limits, seed)
    }
}

#[cfg(test)]
mod tests;
