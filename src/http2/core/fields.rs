//! What a header block has.

use http::{
    HeaderMap, Method, Request, StatusCode, Uri, Version,
    uri::{Authority, PathAndQuery, Scheme},
};

use crate::http2::{
    MAX_HEADER_LIST,
    hpack::{Field, Name, Said},
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
    wrong: Option<&'static str>,
}

/// Why a header block is none.
pub(super) const TOO_LONG: &str = "its metadata is too long";

impl Fields {
    pub(super) fn add(&mut self, field: &Field) {
        self.size += field.size();
        if self.size > MAX_HEADER_LIST as usize {
            self.wrong = Some(TOO_LONG);
        } else if self.wrong.is_some() {
        } else if !field.is_fine {
            self.wrong = Some("it has metadata that HTTP/2 does not allow");
        } else if let Name::Header(name) = &field.name {
            if self.map.try_append(name.clone(), field.value.clone()).is_err() {
                self.wrong = Some("it has too much metadata");
            }
        } else if !self.map.is_empty() || !self.say(field.said.as_ref()) {
            self.wrong = Some("it has fields twice, or where they may not be");
        }
    }

    /// Keeps what may be said once. Whether it was said the first time.
    fn say(&mut self, said: Option<&Said>) -> bool {
        fn once<T: Clone>(place: &mut Option<T>, value: &T) -> bool {
            place.replace(value.clone()).is_none()
        }
        match said {
            Some(Said::Authority(authority)) => once(&mut self.authority, authority),
            Some(Said::Method(method)) => once(&mut self.method, method),
            Some(Said::Path(path)) => once(&mut self.path, path),
            Some(Said::Scheme(scheme)) => once(&mut self.scheme, scheme),
            Some(Said::Status(status)) => once(&mut self.status, status),
            None => false,
        }
    }

    fn asks(&self) -> bool {
        self.authority.is_some()
            || self.method.is_some()
            || self.path.is_some()
            || self.scheme.is_some()
    }

    /// The status of an answer, which is not in its trailers.
    pub(super) fn answer(&self) -> Result<Option<StatusCode>, &'static str> {
        match self.wrong {
            Some(wrong) => Err(wrong),
            None if self.asks() => Err("it has fields that are no answer's"),
            None => Ok(self.status),
        }
    }

    /// What is in trailers.
    pub(super) fn trailers(self) -> Result<HeaderMap, &'static str> {
        match self.wrong {
            Some(wrong) => Err(wrong),
            None if self.status.is_some() || self.asks() => Err("it begins twice"),
            None => Ok(self.map),
        }
    }

    /// The head of a request.
    pub(super) fn request(self) -> Result<Request<()>, &'static str> {
        if let Some(wrong) = self.wrong {
            return Err(wrong);
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
