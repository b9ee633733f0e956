//! Failures of the parts as gRPC statuses: one table.

use std::{error::Error, fmt::Write};

use tonic::{Code, Status};

use crate::backends::milpa::{
    cells::CellError,
    id::{InvalidId, NoRandomness},
    providers::{ErrorClass, ProviderError},
    store::StoreError,
};

/// An error with all of its sources, for a pod's events.
pub(super) fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        // Writing to a string does not fail.
        let _ = write!(text, ": {error}");
        source = error.source();
    }
    text
}

/// Of the store: what could not be kept was not done.
pub(super) fn of_store(error: &StoreError) -> Status {
    Status::internal(chain(error))
}

/// Of ids.
pub(super) fn of_randomness(error: NoRandomness) -> Status {
    Status::internal(error.to_string())
}

/// Of ids in records of our own.
pub(super) fn of_id(error: &InvalidId) -> Status {
    Status::internal(error.to_string())
}

/// Of cells.
pub(super) fn of_cell(error: &CellError) -> Status {
    let code = match error {
        CellError::Provider(ProviderError { class, .. }) => match class {
            ErrorClass::Capacity { .. } | ErrorClass::Quota => Code::ResourceExhausted,
            ErrorClass::Throttled | ErrorClass::Transient => Code::Unavailable,
            ErrorClass::Auth => Code::PermissionDenied,
            ErrorClass::Invalid => Code::InvalidArgument,
            ErrorClass::NotFound => Code::Internal,
        },
        CellError::Full(_) => Code::ResourceExhausted,
        CellError::Silent { .. } | CellError::Ended(..) => Code::Unavailable,
        CellError::Store(..) | CellError::Randomness(_) => Code::Internal,
    };
    Status::new(code, chain(error))
}
