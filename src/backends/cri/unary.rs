//! Unary calls, whose responses are collected.

use bytes::Bytes;
use http::{HeaderMap, request, response};
use kiyot_http2::{Error, Reason};

use super::{
    MAX_MESSAGE_BYTES,
    upstream::{Unavailable, Upstream},
};

/// Largest collected body in bytes: the largest message, its frame header of 5 bytes, and one byte
/// to detect a larger message.
const MAX_BODY_BYTES: usize = MAX_MESSAGE_BYTES + 6;

/// A collected response.
#[derive(Debug)]
pub struct UnaryResponse {
    /// Status and headers.
    pub head: response::Parts,
    /// The gRPC frames of the body, in parts as received.
    pub body: Vec<Bytes>,
    /// Trailers; `None` if the stream ended without them.
    pub trailers: Option<HeaderMap>,
}

/// A failed unary call.
#[derive(Debug)]
pub enum UnaryError {
    /// The runtime can't be reached, or its connection was lost.
    Unavailable(Unavailable),
    /// The runtime reset the stream.
    Reset(Reason),
    /// The response is larger than [`MAX_MESSAGE_BYTES`].
    TooLarge,
}

impl Upstream {
    /// Sends a whole request and collects its response. Retries once if the runtime has not
    /// processed the call (REFUSED_STREAM, GOAWAY).
    pub async fn unary(
        &self,
        head: &request::Parts,
        body: &Bytes,
    ) -> Result<UnaryResponse, UnaryError> {
        match self.try_unary(head, body).await {
            Err(AttemptError::Http2(error)) if error.is_retryable() => {
                self.try_unary(head, body).await
            }
            result => result,
        }
        .map_err(|broken| match broken {
            AttemptError::Unary(failure) => failure,
            AttemptError::Http2(error) => match error.reset_reason() {
                Some(reason) => UnaryError::Reset(reason),
                None => UnaryError::Unavailable(self.connection_lost(error)),
            },
        })
    }

    async fn try_unary(
        &self,
        head: &request::Parts,
        body: &Bytes,
    ) -> Result<UnaryResponse, AttemptError> {
        let sent = self
            .send(head, body, true)
            .await
            .map_err(|error| AttemptError::Unary(UnaryError::Unavailable(error)))?;
        let (head, mut stream) = sent.response.await.map_err(AttemptError::Http2)?.into_parts();
        let (mut body, mut length) = (Vec::new(), 0);
        while let Some(part) = stream.data().await {
            let part = part.map_err(AttemptError::Http2)?;
            length += part.len();
            if length > MAX_BODY_BYTES {
                return Err(AttemptError::Unary(UnaryError::TooLarge));
            }
            body.push(part);
        }
        let trailers = stream.trailers().await.map_err(AttemptError::Http2)?;
        Ok(UnaryResponse { head, body, trailers })
    }
}

enum AttemptError {
    Http2(Error),
    Unary(UnaryError),
}
