//! What a cell is told before it can call home.

/// What a cell is told before it can call home. Holds a secret: its `Debug` leaves it out.
#[derive(Debug, Clone)]
pub struct Bootstrap {}
