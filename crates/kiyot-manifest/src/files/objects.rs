//! Objects of a manifest: its documents, and the items of its lists.

use std::fmt;

use serde_json::{Map, Value};

use crate::files::documents::{MAX_DOCUMENTS, documents};

/// Kind of a list of all kinds; the kind of a list of one kind ends with it.
const LIST: &str = "List";
/// Version of lists.
const CORE: &str = "v1";
/// Limit on the shown characters of a wrong value.
const SHOWN_CHARS: usize = 120;

/// Object of a manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Object {
    /// Place, such as `document 2.items[0]`.
    pub at: String,
    /// Kind, such as `Pod`.
    pub kind: String,
    /// `apiVersion`
    pub version: String,
    /// Fields without kind and version.
    pub fields: Map<String, Value>,
}

/// Problem of a manifest because of which an object is omitted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Malformed {
    /// Place.
    pub at: String,
    /// Present value, shortened; `None` if absent.
    pub value: Option<String>,
    /// Error and allowed values.
    pub rule: String,
}

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { at, value, rule } = self;
        match value {
            Some(value) => write!(f, "{at} = {value}: {rule}"),
            None => write!(f, "{at}: {rule}"),
        }
    }
}

/// Reader of the objects of files that belong together.
#[derive(Debug, Default)]
pub struct Objects {
    /// Number of documents and items of lists so far.
    count: usize,
}

/// Receiver of objects and problems.
type Each<'e> = &'e mut dyn FnMut(Result<Object, Malformed>);

impl Objects {
    /// Calls `each` with the objects and problems of a file, in order. After [`MAX_DOCUMENTS`]
    /// documents of all files, it reports the next document and stops.
    pub fn read(&mut self, text: &str, each: Each<'_>) {
        if self.count > MAX_DOCUMENTS {
            return;
        }
        for (index, document) in documents(text).take(MAX_DOCUMENTS + 1).enumerate() {
            let at = format!("document {}", index + 1);
            match document {
                Ok(Value::Null) => {
                    self.count(&at, each);
                }
                Ok(value) => self.read_value(at, value, None, each),
                Err(rule) => each(Err(Malformed { at, value: None, rule })),
            }
        }
    }

    /// Counts a document, and returns whether it must be read.
    fn count(&mut self, at: &str, each: Each<'_>) -> bool {
        self.count += 1;
        if self.count == MAX_DOCUMENTS + 1 {
            let rule = format!("is one document too many; allowed: {MAX_DOCUMENTS}");
            each(Err(Malformed { at: at.to_owned(), value: None, rule }));
        }
        self.count <= MAX_DOCUMENTS
    }

    /// Reads a document, or an item of a list of a kind.
    fn read_value(&mut self, at: String, value: Value, list: Option<&Object>, each: Each<'_>) {
        if !self.count(&at, each) {
            return;
        }
        match object(at, value, list) {
            Ok(object) if is_list(&object) => self.read_list(object, each),
            read => each(read),
        }
    }

    fn read_list(&mut self, mut list: Object, each: Each<'_>) {
        let items = list.fields.remove("items");
        match items {
            // The API server sends an empty list as null.
            Some(Value::Null) => {}
            Some(Value::Array(items)) if items.len() <= MAX_DOCUMENTS => {
                for (index, item) in items.into_iter().enumerate() {
                    let at = format!("{}.items[{index}]", list.at);
                    self.read_value(at, item, Some(&list), each);
                }
            }
            Some(Value::Array(items)) => {
                let rule = format!("has {} items; allowed: {MAX_DOCUMENTS}", items.len());
                each(Err(Malformed { at: list.at + ".items", value: None, rule }));
            }
            other => each(Err(wrong(list.at + ".items", other.as_ref(), "a list of documents"))),
        }
    }
}

/// Returns whether an object is a list: of all kinds, or of one kind and with `items`.
fn is_list(Object { kind, fields, .. }: &Object) -> bool {
    kind == LIST || (kind.ends_with(LIST) && fields.contains_key("items"))
}

/// Reads kind and version. An item of a list of one kind may omit both.
fn object(at: String, value: Value, list: Option<&Object>) -> Result<Object, Malformed> {
    let mut fields = match value {
        Value::Object(fields) => fields,
        // The problem shows a list by its items.
        other => return Err(wrong(at, Some(&other), "a table")),
    };
    let [kind, version] = ["kind", "apiVersion"].map(|key| fields.remove(key).unwrap_or_default());
    if let (Value::Null, Some(list)) = (&kind, list)
        && let Some(kind) = list.kind.strip_suffix(LIST).filter(|kind| !kind.is_empty())
    {
        return Ok(Object { at, kind: kind.to_owned(), version: list.version.clone(), fields });
    }
    let kind = text(&at, "kind", kind, "a kind such as Pod, Deployment or List")?;
    let expected = if kind == LIST { CORE } else { "a version" };
    let version = text(&at, "apiVersion", version, expected)?;
    if kind == LIST && version != CORE {
        return Err(wrong(at + ".apiVersion", Some(&version.into()), "\"v1\""));
    }
    let object = Object { at, kind, version, fields };
    if list.is_some() && is_list(&object) {
        return Err(wrong(object.at + ".kind", Some(&object.kind.into()), "any kind but a list"));
    }
    Ok(object)
}

fn text(at: &str, key: &str, value: Value, allowed: &str) -> Result<String, Malformed> {
    match value {
        Value::String(text) if !text.is_empty() => Ok(text),
        Value::Null => Err(wrong(format!("{at}.{key}"), None, allowed)),
        other => Err(wrong(format!("{at}.{key}"), Some(&other), allowed)),
    }
}

/// Returns the problem of a value that is absent or not allowed.
fn wrong(at: String, value: Option<&Value>, allowed: &str) -> Malformed {
    let rule = if value.is_some() { "is invalid" } else { "is missing" };
    let shown = |value: &Value| {
        let text = if value.is_object() { "a table".to_owned() } else { value.to_string() };
        match text.char_indices().nth(SHOWN_CHARS) {
            Some((end, _)) => format!("{}…", &text[..end]),
            None => text,
        }
    };
    Malformed { at, value: value.map(shown), rule: format!("{rule}; allowed: {allowed}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Vec<String> {
        let mut found = Vec::new();
        Objects::default().read(text, &mut |read| {
            found.push(read.map_or_else(
                |problem| problem.to_string(),
                |object| format!("{}: {} of {}", object.at, object.kind, object.version),
            ));
        });
        found
    }

    /// Verifies M4, M8.
    #[test]
    fn items_of_a_list_have_its_place_and_kind() {
        let list = |kind: &str, items: &str| format!("apiVersion: v1\nkind: {kind}\n{items}\n");
        for (text, expected) in [
            (list("PodList", "items: [{}]"), "document 1.items[0]: Pod of v1"),
            (list("List", "items: [{apiVersion: a/b, kind: C}]"), "document 1.items[0]: C of a/b"),
            (
                list("List", "items: [{}]"),
                "document 1.items[0].kind: is missing; allowed: a kind such as Pod, Deployment or \
                 List",
            ),
            (
                list("List", "items: [{apiVersion: v1, kind: PodList, items: []}]"),
                "document 1.items[0].kind = \"PodList\": is invalid; allowed: any kind but a list",
            ),
            (
                list("List", "metadata: {}"),
                "document 1.items: is missing; allowed: a list of documents",
            ),
            (list("AllowList", "metadata: {}"), "document 1: AllowList of v1"),
        ] {
            assert_eq!(read(&text), [expected]);
        }
        assert!(read(&list("List", "items:")).is_empty());
    }

    /// Verifies M8.
    #[test]
    fn place_of_a_document_counts_the_documents_before_it() {
        let text = "# a\n---\n{apiVersion: v1, kind: A}\n---\n---\n{apiVersion: v1, kind: B}\n";
        assert_eq!(read(text), ["document 2: A of v1", "document 4: B of v1"]);
    }

    /// Verifies M12.
    #[test]
    fn long_value_is_shortened() {
        let found = read(&format!("kind: [{}]", "x".repeat(1 << 16)));
        assert!(found[0].len() < 1024 && found[0].contains('…'), "{found:?}");
    }
}
