//! XML of the EC2 query API: elements and text, and no attributes except the root's namespace.

use std::fmt::Write;

/// Most levels of nested elements; a deeper document is refused.
const MAX_DEPTH: usize = 64;

/// An element with either text or children.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Element {
    /// Name of the tag.
    pub name: String,
    /// Attributes, as in the document.
    attributes: String,
    /// Text; empty for an element with children.
    pub text: String,
    /// Children in order.
    pub children: Vec<Element>,
}

impl Element {
    /// Makes an element with a text.
    pub fn text(name: &str, text: impl Into<String>) -> Self {
        Self { name: name.to_owned(), text: text.into(), ..Self::default() }
    }

    /// Makes an element with children.
    pub fn parent(name: &str, children: Vec<Self>) -> Self {
        Self { name: name.to_owned(), children, ..Self::default() }
    }

    /// Makes the root of a response, with EC2's namespace.
    pub fn response(name: &str, children: Vec<Self>) -> Self {
        let attributes = " xmlns=\"http://ec2.amazonaws.com/doc/2016-11-15/\"".to_owned();
        Self { name: name.to_owned(), attributes, children, ..Self::default() }
    }

    /// Parses a document. Returns `None` if it is not well-formed.
    pub fn parse(document: &str) -> Option<Self> {
        let mut rest = document.trim_start();
        if rest.starts_with("<?") {
            rest = rest.split_once("?>")?.1;
        }
        let mut open: Vec<Self> = Vec::new();
        loop {
            let (text, tail) = rest.split_once('<')?;
            if let Some(parent) = open.last_mut() {
                parent.text.push_str(&unescape(text));
            }
            let (tag, tail) = tail.split_once('>')?;
            rest = tail;
            let closed = if let Some(name) = tag.strip_prefix('/') {
                let element = open.pop()?;
                (element.name == name.trim()).then_some(element)?
            } else {
                let (tag, empty) = tag.strip_suffix('/').map_or((tag, false), |tag| (tag, true));
                let end = tag.find(char::is_whitespace).unwrap_or(tag.len());
                let (name, attributes) = tag.split_at(end);
                let attributes = attributes.trim_end().to_owned();
                let element = Self { name: name.to_owned(), attributes, ..Self::default() };
                if !empty {
                    open.push(element);
                    (open.len() <= MAX_DEPTH).then_some(())?;
                    continue;
                }
                element
            };
            match open.last_mut() {
                Some(parent) => parent.children.push(closed),
                None => return Some(closed),
            }
        }
    }

    /// Returns the first child with this name.
    pub fn child(&self, name: &str) -> Option<&Self> {
        self.children.iter().find(|child| child.name == name)
    }

    /// Returns the first child with this name.
    pub fn child_mut(&mut self, name: &str) -> Option<&mut Self> {
        self.children.iter_mut().find(|child| child.name == name)
    }

    /// Returns the text at a path of children, such as `instanceState/name`, or an empty text if it
    /// is absent.
    pub fn at(&self, path: &str) -> &str {
        let mut element = self;
        for name in path.split('/') {
            let Some(child) = element.child(name) else { return "" };
            element = child;
        }
        &element.text
    }

    /// Returns the items of the child list with this name.
    pub fn items(&self, list: &str) -> &[Self] {
        self.child(list).map_or(&[], |list| &list.children)
    }

    /// Replaces the child with the same name, or adds it.
    pub fn set(&mut self, child: Self) {
        match self.child_mut(&child.name) {
            Some(present) => *present = child,
            None => self.children.push(child),
        }
    }

    /// Removes the children with this name.
    pub fn remove(&mut self, name: &str) {
        self.children.retain(|child| child.name != name);
    }

    /// Returns all elements with this name at any depth, in document order.
    pub fn all(&self, name: &str) -> Vec<&Self> {
        let mut found = Vec::new();
        self.collect(name, &mut found);
        found
    }

    fn collect<'a>(&'a self, name: &str, found: &mut Vec<&'a Self>) {
        for child in &self.children {
            if child.name == name {
                found.push(child);
            }
            child.collect(name, found);
        }
    }

    /// Formats the element as a document.
    pub fn document(&self) -> String {
        let mut out = "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n".to_owned();
        self.write(&mut out);
        out
    }

    fn write(&self, out: &mut String) {
        let _ = write!(out, "<{}{}>", self.name, self.attributes);
        if self.children.is_empty() {
            escape(&self.text, out);
        }
        for child in &self.children {
            child.write(out);
        }
        let _ = write!(out, "</{}>", self.name);
    }
}

fn escape(text: &str, out: &mut String) {
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            c => out.push(c),
        }
    }
}

fn unescape(text: &str) -> String {
    let text = text.replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", "\"");
    text.replace("&apos;", "'").replace("&#39;", "'").replace("&#34;", "\"").replace("&amp;", "&")
}

#[cfg(test)]
mod tests {
    use super::Element;

    #[test]
    fn document_is_parsed_changed_and_formatted() {
        let text = "<?xml version=\"1.0\"?>\n<R xmlns=\"n\"><s><i><a>1 &lt; 2</a></i><i/></s></R>";
        let mut root = Element::parse(text).unwrap();
        assert_eq!(root.items("s").len(), 2);
        assert_eq!(root.items("s")[0].at("a"), "1 < 2");
        root.set(Element::text("b", "&"));
        let document = root.document();
        assert!(document.contains("<R xmlns=\"n\">") && document.contains("<b>&amp;</b>"));
        assert_eq!(Element::parse(&document), Some(root));
    }

    #[test]
    fn malformed_document_is_refused() {
        let deep = "<a>".repeat(100);
        for text in ["", "<a>", "<a></b>", "text", &deep] {
            assert_eq!(Element::parse(text), None, "{text}");
        }
    }
}
