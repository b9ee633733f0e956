//! The order of a cell.

use crate::id::SandboxId;

/// The order that a cell was launched for, or that has taken the cell.
#[derive(Debug, Default)]
pub(in crate::engine) enum CellOrder {
    /// The cell has no order, and its commits write no record of an order.
    #[default]
    None,
    /// The order waits for the cell.
    Waiting(SandboxId),
    /// The order was answered. Its record is removed with the cell's next commit.
    Parted(SandboxId),
}

impl CellOrder {
    /// Returns the order that waits for the cell.
    pub(in crate::engine) fn waiting(&self) -> Option<&SandboxId> {
        match self {
            Self::Waiting(sandbox) => Some(sandbox),
            Self::None | Self::Parted(_) => None,
        }
    }

    /// Returns the order whose record is written with the cell's record.
    pub(in crate::engine) fn recorded(&self) -> Option<&SandboxId> {
        match self {
            Self::Waiting(sandbox) | Self::Parted(sandbox) => Some(sandbox),
            Self::None => None,
        }
    }

    /// Parts the order from the cell. Returns the order if it waited.
    pub(in crate::engine) fn part(&mut self) -> Option<SandboxId> {
        let sandbox = self.waiting().cloned()?;
        *self = Self::Parted(sandbox.clone());
        Some(sandbox)
    }
}
