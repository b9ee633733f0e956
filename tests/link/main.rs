//! The link.
