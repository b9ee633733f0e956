//! Requests, as parsed by the API server and RBAC.

use http::Method;

/// A verb of RBAC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verb {
    /// Reads an object.
    Get,
    /// Reads all objects.
    List,
    /// Streams changes.
    Watch,
    /// Creates an object.
    Create,
    /// Replaces an object.
    Update,
    /// Changes or applies an object.
    Patch,
    /// Deletes an object.
    Delete,
}

impl Verb {
    /// Returns the verb's name in RBAC.
    pub fn word(self) -> &'static str {
        match self {
            Self::Get => "get",
            Self::List => "list",
            Self::Watch => "watch",
            Self::Create => "create",
            Self::Update => "update",
            Self::Patch => "patch",
            Self::Delete => "delete",
        }
    }
}

/// A request, in RBAC's terms.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiRequest {
    /// Verb.
    pub verb: Verb,
    /// API group; "": core.
    pub group: String,
    /// Resource, such as "cells".
    pub resource: String,
    /// Subresource, such as "status"; empty: none.
    pub subresource: String,
    /// Namespace; empty: none.
    pub namespace: String,
    /// Name; "": all objects.
    pub name: String,
    /// Parameters of the query, decoded.
    parameters: Vec<(String, String)>,
}

impl ApiRequest {
    /// Parses a request. Returns `None` for a path outside the API.
    pub(super) fn parse(head: &http::request::Parts) -> Option<Self> {
        let parameters: Vec<_> = head
            .uri
            .query()
            .unwrap_or_default()
            .split('&')
            .filter_map(|pair| pair.split_once('='))
            .map(|(key, value)| (decoded(key), decoded(value)))
            .collect();
        let parts: Vec<String> = head.uri.path().split('/').skip(1).map(decoded).collect();
        let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
        let (group, rest) = match &parts[..] {
            ["api", "v1", rest @ ..] => ("", rest),
            ["apis", group, _version, rest @ ..] => (*group, rest),
            _ => return None,
        };
        let (namespace, rest) = match rest {
            ["namespaces", namespace, rest @ ..] if !rest.is_empty() => (*namespace, rest),
            rest => ("", rest),
        };
        let (resource, name, subresource) = match rest {
            [resource] => (*resource, "", ""),
            [resource, name] => (*resource, *name, ""),
            [resource, name, subresource] => (*resource, *name, *subresource),
            _ => return None,
        };
        let is_watch = parameters.iter().any(|(key, value)| key == "watch" && value == "true");
        let verb = match (&head.method, name.is_empty()) {
            (&Method::GET, true) if is_watch => Verb::Watch,
            (&Method::GET, true) => Verb::List,
            (&Method::GET, false) => Verb::Get,
            (&Method::POST, true) => Verb::Create,
            (&Method::PUT, false) => Verb::Update,
            (&Method::PATCH, false) => Verb::Patch,
            (&Method::DELETE, false) => Verb::Delete,
            _ => return None,
        };
        Some(Self {
            verb,
            group: group.to_owned(),
            resource: resource.to_owned(),
            subresource: subresource.to_owned(),
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            parameters,
        })
    }

    /// Returns a parameter of the query; "" if it is absent.
    pub fn query(&self, name: &str) -> &str {
        let found = self.parameters.iter().find(|(key, _)| key == name);
        found.map(|(_, value)| value.as_str()).unwrap_or_default()
    }

    /// Returns the key of the object.
    pub(super) fn key(&self) -> String {
        if self.namespace.is_empty() {
            self.name.clone()
        } else {
            format!("{}/{}", self.namespace, self.name)
        }
    }
}

fn decoded(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let digits: Vec<u8> = rest.by_ref().take(2).collect();
        let digits = String::from_utf8_lossy(&digits).into_owned();
        bytes.push(u8::from_str_radix(&digits, 16).unwrap_or(b'?'));
    }
    String::from_utf8_lossy(&bytes).into_owned()
}
