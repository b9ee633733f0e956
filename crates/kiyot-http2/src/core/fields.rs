//! What a header block has.

use http::{
    HeaderMap, Method, Request, StatusCode, Uri, Version,
    uri::{Authority, PathAndQuery, Scheme},
};

use crate::{
    MAX_HEADER_LIST_BYTES,
    hpack::{Field, Name, PseudoValue},
};

/// The fields of a block.
#[derive(Debug, Default)]
pub(super) struct Fields {
    authority: Option<Authority>,
    method: Option<Method>,
    path: Option<PathAndQuery>,
    scheme: Option<Scheme>,
    status: Option<StatusCode>,
    pub(super) map: HeaderMap,
    size: usize,
    error: Option<&'static str>,
}

/// Why a header block is none.
pub(super) const HEADER_LIST_TOO_LONG: &str = "its metadata is too long";

impl Fields {
    pub(super) fn add(&mut self, field: &Field) {
        self.size += field.size();
        if self.size > MAX_HEADER_LIST_BYTES as usize {
            self.error = Some(HEADER_LIST_TOO_LONG);
        } else if self.error.is_some() {
        } else if !field.is_valid {
            self.error = Some("it has metadata that HTTP/2 does not allow");
        } else if let Name::Header(name) = &field.name {
            if self.map.try_append(name.clone(), field.value.clone()).is_err() {
                self.error = Some("it has too much metadata");
            }
        } else if !self.map.is_empty() || !self.set_pseudo(field.pseudo.as_ref()) {
            self.error = Some("it has fields twice, or where they may not be");
        }
    }

    /// Keeps what may be said once. Whether it was said the first time.
    fn set_pseudo(&mut self, pseudo: Option<&PseudoValue>) -> bool {
        fn once<T: Clone>(place: &mut Option<T>, value: &T) -> bool {
            place.replace(value.clone()).is_none()
        }
        match pseudo {
            Some(PseudoValue::Authority(authority)) => once(&mut self.authority, authority),
            Some(PseudoValue::Method(method)) => once(&mut self.method, method),
            Some(PseudoValue::Path(path)) => once(&mut self.path, path),
            Some(PseudoValue::Scheme(scheme)) => once(&mut self.scheme, scheme),
            Some(PseudoValue::Status(status)) => once(&mut self.status, status),
            None => false,
        }
    }

    fn is_request(&self) -> bool {
        self.authority.is_some()
            || self.method.is_some()
            || self.path.is_some()
            || self.scheme.is_some()
    }

    /// The status of an answer, which is not in its trailers.
    pub(super) fn response_status(&self) -> Result<Option<StatusCode>, &'static str> {
        match self.error {
            Some(error) => Err(error),
            None if self.is_request() => Err("it has fields that are no answer's"),
            None => Ok(self.status),
        }
    }

    /// What is in trailers.
    pub(super) fn into_trailers(self) -> Result<HeaderMap, &'static str> {
        match self.error {
            Some(error) => Err(error),
            None if self.status.is_some() || self.is_request() => Err("it begins twice"),
            None => Ok(self.map),
        }
    }

    /// The head of a request.
    pub(super) fn into_request(self) -> Result<Request<()>, &'static str> {
        if let Some(error) = self.error {
            return Err(error);
        }
        let (Some(method), Some(scheme), Some(path), None) =
            (self.method, self.scheme, self.path, self.status)
        else {
            return Err("it has not the fields of a request");
        };
        if method == Method::CONNECT {
            return Err("it asks for a tunnel");
        }
        let mut parts = http::uri::Parts::default();
        // A scheme can be kept only with an authority.
        parts.scheme = self.authority.is_some().then_some(scheme);
        parts.authority = self.authority;
        parts.path_and_query = Some(path);
        let mut request = Request::new(());
        *request.uri_mut() = Uri::from_parts(parts).map_err(|_| "its target is none")?;
        *request.method_mut() = method;
        *request.version_mut() = Version::HTTP_2;
        *request.headers_mut() = self.map;
        Ok(request)
    }
}
