//! The CRI front door.
