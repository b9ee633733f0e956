//! A call whose whole answer is needed before it can be passed on.

use bytes::Bytes;
use http::{HeaderMap, request, response};

use super::{
    MAX_MESSAGE,
    upstream::{Unavailable, Upstream},
};
use crate::http2::{Error, Reason};

/// The head of a gRPC frame, and room to see that a message is too large.
const MAX_BODY: usize = MAX_MESSAGE + 6;

/// An answer as it came.
#[derive(Debug)]
pub struct Answer {
    /// Its metadata.
    pub head: response::Parts,
    /// Its body, gRPC frames, in as many parts as it came.
    pub body: Vec<Bytes>,
    /// Its trailers; `None` if it ended without.
    pub trailers: Option<HeaderMap>,
}

/// There is no answer.
#[derive(Debug)]
pub enum Failure {
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
    pub async fn exchange(&self, head: &request::Parts, body: &Bytes) -> Result<Answer, Failure> {
        match self.try_exchange(head, body).await {
            Err(Broken::Error(error)) if error.was_refused() => self.try_exchange(head, body).await,
            result => result,
        }
        .map_err(|broken| match broken {
            Broken::Failed(failure) => failure,
            Broken::Error(error) => match error.reset() {
                Some(reason) => Failure::Reset(reason),
                None => Failure::Unavailable(self.lost(error)),
            },
        })
    }

    async fn try_exchange(&self, head: &request::Parts, body: &Bytes) -> Result<Answer, Broken> {
        let sent = self
            .send(head, body, true)
            .await
            .map_err(|error| Broken::Failed(Failure::Unavailable(error)))?;
        let (head, mut stream) = sent.response.await.map_err(Broken::Error)?.into_parts();
        let (mut body, mut length) = (Vec::new(), 0);
        while let Some(part) = stream.data().await {
            let part = part.map_err(Broken::Error)?;
            length += part.len();
            if length > MAX_BODY {
                return Err(Broken::Failed(Failure::TooLarge));
            }
            body.push(part);
        }
        let trailers = stream.trailers().await.map_err(Broken::Error)?;
        Ok(Answer { head, body, trailers })
    }
}

enum Broken {
    Error(Error),
    Failed(Failure),
}
