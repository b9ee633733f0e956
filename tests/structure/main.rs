//! What holds of the tree itself: who imports whom, how long files are, that promises have tests,
//! that what is shipped beside the programs is right.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "what a test cannot set up fails the test, at the place"
)]
#![expect(clippy::unwrap_used, reason = "a test fails by a panic")]

mod examples;
mod imports;
mod manifests;
mod service;
mod sizes;
mod source;
mod specification;
mod tree;
