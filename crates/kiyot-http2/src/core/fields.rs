//! Field sections: pseudo-header fields and a header map.

use http::{
    HeaderMap, Method, Request, StatusCode, Uri, Version,
    uri::{Authority, PathAndQuery, Scheme},
};

use crate::{
    MAX_HEADER_LIST_BYTES,
    hpack::{Field, Name, PseudoValue},
};

/// Fields of a header block.
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

pub(super) const HEADER_LIST_TOO_LONG: &str = "header list exceeds its limit";

impl Fields {
    pub(super) fn add(&mut self, field: &Field) {
        self.size += field.size();
        if self.size > MAX_HEADER_LIST_BYTES as usize {
            self.error = Some(HEADER_LIST_TOO_LONG);
        } else if self.error.is_some() {
        } else if !field.is_valid {
            self.error = Some("header field not allowed in HTTP/2");
        } else if let Name::Header(name) = &field.name {
            if self.map.try_append(name.clone(), field.value.clone()).is_err() {
                self.error = Some("too many header fields");
            }
        } else if !self.map.is_empty() || !self.set_pseudo(field.pseudo.as_ref()) {
            self.error = Some("pseudo-header field is unknown, duplicate or misplaced");
        }
    }

    /// Sets a pseudo-header field. Returns false for a duplicate.
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

    /// Returns the status of a response; trailers have none.
    pub(super) fn response_status(&self) -> Result<Option<StatusCode>, &'static str> {
        match self.error {
            Some(error) => Err(error),
            None if self.is_request() => Err("request pseudo-header field in a response"),
            None => Ok(self.status),
        }
    }

    /// Returns the fields of trailers.
    pub(super) fn into_trailers(self) -> Result<HeaderMap, &'static str> {
        match self.error {
            Some(error) => Err(error),
            None if self.status.is_some() || self.is_request() => {
                Err("pseudo-header field in trailers")
            }
            None => Ok(self.map),
        }
    }

    /// Returns the head of a request.
    pub(super) fn into_request(self) -> Result<Request<()>, &'static str> {
        if let Some(error) = self.error {
            return Err(error);
        }
        let (Some(method), Some(scheme), Some(path), None) =
            (self.method, self.scheme, self.path, self.status)
        else {
            return Err("request lacks a pseudo-header field");
        };
        if method == Method::CONNECT {
            return Err("method CONNECT is not supported");
        }
        let mut parts = http::uri::Parts::default();
        // A URI has a scheme only with an authority.
        parts.scheme = self.authority.is_some().then_some(scheme);
        parts.authority = self.authority;
        parts.path_and_query = Some(path);
        let mut request = Request::new(());
        *request.uri_mut() = Uri::from_parts(parts).map_err(|_| "request target is no URI")?;
        *request.method_mut() = method;
        *request.version_mut() = Version::HTTP_2;
        *request.headers_mut() = self.map;
        Ok(request)
    }
}
