//! gRPC statuses for the errors of all parts, in one table.

use kiyot_engine::{
    StoreError,
    engine::{BudgetRefusal, CellError},
    id::{InvalidId, NoRandomness},
    provider::ErrorClass,
};
use kiyot_values::error_chain::error_chain;
use tonic::{Code, Status};

use crate::backends::milpa::{
    failure::Failure,
    pods::{EventLost, LookupError},
    policy::Refusal,
    sync::{AttemptError, ReopenError, TeardownError},
};

impl From<Failure> for Status {
    fn from(failure: Failure) -> Self {
        tracing::debug!(side = ?failure.side(), code = ?failure.code(), "call failed");
        Self::new(failure.code(), failure.message())
    }
}

/// Returns the status of a change that failed because it could not be recorded.
pub(super) fn of_store(error: &StoreError) -> Status {
    Status::internal(error_chain(error))
}

/// Returns the status for an id that could not be created.
pub(super) fn of_randomness(error: NoRandomness) -> Status {
    Status::internal(error.to_string())
}

/// Returns the status for a record with an invalid id.
pub(super) fn of_id(error: &InvalidId) -> Status {
    Status::internal(error.to_string())
}

/// Returns the status for a request that the policy refuses.
pub(super) fn of_refusal(refusal: Refusal) -> Status {
    Status::invalid_argument(refusal.to_string())
}

/// Returns the status for a cell that could not be launched or ended.
pub(super) fn of_cell(error: &CellError) -> Status {
    Status::new(code_of_cell(error), error_chain(error))
}

fn code_of_cell(error: &CellError) -> Code {
    match error {
        CellError::Launches { last, .. } | CellError::NoProvider { last, .. } => code_of_cell(last),
        CellError::Denied { source, .. } | CellError::Provider(source) => {
            code_of_class(source.class)
        }
        CellError::NotLaunched { source, .. } => code_of_class(source.class),
        CellError::NoFit(_) => Code::InvalidArgument,
        CellError::AllRefused(_)
        | CellError::Full { .. }
        | CellError::OverBudget(_)
        | CellError::NodeFull { .. }
        | CellError::Queued { .. } => Code::ResourceExhausted,
        CellError::NoShare(refusal) => match **refusal {
            BudgetRefusal::Exhausted { .. } | BudgetRefusal::Spent(_) => Code::ResourceExhausted,
            BudgetRefusal::NotGranted { .. } | BudgetRefusal::NotKnown { .. } => Code::Unavailable,
        },
        CellError::Cordoned
        | CellError::Silent { .. }
        | CellError::Ended(..)
        | CellError::Blocked { .. }
        | CellError::Replaced(_)
        | CellError::PortTaken(_)
        | CellError::Removed(_)
        | CellError::NotListed(_)
        | CellError::Starting
        | CellError::Stopping => Code::Unavailable,
        CellError::Foreign(_) | CellError::Refused(_) => Code::FailedPrecondition,
        CellError::Store(..) | CellError::Randomness(_) => Code::Internal,
    }
}

fn code_of_class(class: ErrorClass) -> Code {
    match class {
        ErrorClass::Capacity | ErrorClass::Quota => Code::ResourceExhausted,
        ErrorClass::Throttled
        | ErrorClass::Ended
        | ErrorClass::Transient
        | ErrorClass::Unanswered => Code::Unavailable,
        ErrorClass::Auth => Code::PermissionDenied,
        ErrorClass::Invalid => Code::InvalidArgument,
        ErrorClass::NotFound => Code::Internal,
    }
}

/// Returns the status for a sandbox that could not be stopped or removed.
pub(super) fn of_teardown(error: TeardownError) -> Status {
    match error {
        TeardownError::Cell(error) => of_cell(&error),
        TeardownError::Store(error) => of_store(&error),
    }
}

/// Returns the status for a container that can't be created because of its other attempts.
pub(super) fn of_attempt(error: AttemptError) -> Status {
    match error {
        AttemptError::Running { .. } => Status::failed_precondition(error.to_string()),
        AttemptError::ExitNotRecorded { .. } => Status::unavailable(error.to_string()),
        AttemptError::Cell(failure) => failure.into(),
    }
}

/// Returns the status for a log that could not be reopened.
pub(super) fn of_reopen(error: ReopenError) -> Status {
    match error {
        ReopenError::Log(failure) => failure.into(),
        ReopenError::Store(error) => of_store(&error),
    }
}

impl From<LookupError> for Status {
    fn from(error: LookupError) -> Self {
        let code = match error {
            LookupError::NotFound { .. } => Code::NotFound,
            LookupError::Ambiguous { .. } => Code::Unknown,
        };
        Self::new(code, error.to_string())
    }
}

impl From<EventLost> for Status {
    fn from(error: EventLost) -> Self {
        Self::resource_exhausted(error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failure_of_a_cell_keeps_its_code_and_message() {
        for code in 1..=16 {
            let status = Status::new(Code::from_i32(code), "the disk is full");
            let converted = Status::from(Failure::of_cell(status));
            assert_eq!(
                (converted.code(), converted.message()),
                (Code::from_i32(code), "the disk is full")
            );
        }
    }
}
