//! Guard of the node backend against calls of unknown methods that name a pod in a cell.
//!
//! A later kubelet may call methods that this version of CRI lacks. All methods that name a pod or
//! container have the id in field 1.

use std::{
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::{Bytes, BytesMut};
use kiyot_http2::RecvStream;
use tonic::Status;

use super::{copy_body::CopyError, frame, peek::LeadingField, server_state::ServerState};

/// Holds back the beginning of a request until field 1 of its first message proves that the request
/// names no pod in a cell.
#[derive(Debug)]
pub(super) struct CellGuard {
    server: Arc<ServerState>,
    method: Box<str>,
    held: BytesMut,
}

impl CellGuard {
    /// Returns the guard of a call of an unknown method, by its `:path`; `None` if the method can't
    /// name a pod in a cell.
    pub(super) fn new(server: &Arc<ServerState>, path: &str) -> Option<Self> {
        let method = path.strip_prefix("/runtime.v1.RuntimeService/")?;
        server.registry.decoded().next()?;
        Some(Self { server: Arc::clone(server), method: method.into(), held: BytesMut::new() })
    }

    /// Returns whether a body with this beginning names no pod in a cell; false if more bytes
    /// decide. Fails if it names a pod in a cell.
    pub(super) fn allows(&self, body: &[u8]) -> Result<bool, Status> {
        match frame::leading_field(body) {
            LeadingField::Unknown => Ok(false),
            LeadingField::Text(id) if self.server.registry.by_id(id).is_some() => {
                let method = &self.method;
                Err(Status::unimplemented(format!(
                    "{method} is unsupported for pods in cells: {id:?}; allowed: an id of a \
                     container runtime"
                )))
            }
            LeadingField::Text(_) | LeadingField::Other => Ok(true),
        }
    }

    /// Holds back the beginning of a body.
    pub(super) fn holding(self, body: &[u8]) -> Self {
        Self { held: body.into(), ..self }
    }

    /// Reads the body until the held bytes may pass, or the body has ended.
    pub(super) fn poll(
        &mut self,
        from: &mut RecvStream,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Bytes, CopyError>> {
        loop {
            let Some(part) = ready!(from.poll_data(cx)) else {
                return Poll::Ready(Ok(self.held.split().freeze()));
            };
            let part = part.map_err(CopyError::Source)?;
            self.held.extend_from_slice(&part);
            if self.allows(&self.held).map_err(CopyError::Refused)? {
                return Poll::Ready(Ok(self.held.split().freeze()));
            }
        }
    }
}
