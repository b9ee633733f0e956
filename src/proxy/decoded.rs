//! Calls that a decoded backend answers: from memory at once, else as one whole message on the main
//! runtime.

use std::{sync::Arc, time::Instant};

use bytes::Bytes;
use tokio::{runtime::Handle, time::timeout_at};
use tokio_util::task::AbortOnDropHandle;
use tonic::Status;

use crate::backends::{Decoded, Method, cri::MAX_MESSAGE_BYTES};

/// Answers a call. Dropping the future drops the backend's.
pub(super) async fn answer(
    main: &Handle,
    decoded: &Arc<dyn Decoded>,
    method: Method,
    message: Bytes,
    deadline: Option<Instant>,
) -> Result<Bytes, Status> {
    let answer = match decoded.snapshot(method, &message) {
        Some(answer) => answer,
        None => call(main, decoded.clone(), method, message, deadline).await,
    }?;
    if answer.len() > MAX_MESSAGE_BYTES { Err(too_large(answer.len())) } else { Ok(answer) }
}

async fn call(
    main: &Handle,
    decoded: Arc<dyn Decoded>,
    method: Method,
    message: Bytes,
    deadline: Option<Instant>,
) -> Result<Bytes, Status> {
    // As many of them as there are calls, whose number is limited.
    let call = AbortOnDropHandle::new(
        main.spawn(async move { decoded.call(method, message, deadline).await }),
    );
    let joined = match deadline {
        Some(deadline) => match timeout_at(deadline.into(), call).await {
            Ok(joined) => joined,
            Err(_) => {
                return Err(Status::deadline_exceeded(format!(
                    "{method} was not answered before its deadline"
                )));
            }
        },
        None => call.await,
    };
    joined.unwrap_or_else(|error| {
        if error.is_panic() {
            tracing::error!(%method, "a call ended by a panic");
            Err(Status::internal(format!(
                "{method} ended by a panic, which the log of kiyot tells of"
            )))
        } else {
            Err(Status::unavailable("kiyot is stopping"))
        }
    })
}

/// The status of an answer that is larger than the caller takes.
pub(super) fn too_large(length: usize) -> Status {
    Status::resource_exhausted(format!(
        "the answer has {length} bytes; allowed are at most {MAX_MESSAGE_BYTES}"
    ))
}
