//! A call whose whole answer is needed before it can be passed on.

use bytes::Bytes;
use http::{HeaderMap, request, response};
use kiyot_http2::{Error, Reason};

use super::{
    MAX_MESSAGE_BYTES,
    upstream::{Unavailable, Upstream},
};

/// The head of a gRPC frame, and room to see that a message is too large.
const MAX_BODY_BYTES: usize = MAX_MESSAGE_BYTES + 6;

/// An answer as it came.
#[derive(Debug)]
pub struct UnaryResponse {
    /// Its metadata.
    pub head: response::Parts,
    /// Its body, gRPC frames, in as many parts as it came.
    pub body: Vec<Bytes>,
    /// Its trailers; `None` if it ended without.
    pub trailers: Option<HeaderMap>,
}

/// There is no answer.
#[derive(Debug)]
pub enum UnaryError {
    /// The runtime can't be called.
    Unavailable(Unavailable),
    /// The runtime reset the stream.
    Reset(Reason),
    /// The answer is larger than a message may be.
    TooLarge,
}

impl Upstream {
    /// Sends a whole request and collects its answer. A call that the runtime refused to begin with
    /// is sent once more.
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
