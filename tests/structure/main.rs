//! Checks of the tree: imports, dependencies, lengths of files, style, documents, promises and
//! their tests, examples, the unit file.
#![allow(clippy::expect_used, reason = "a failed setup fails the test at its place")]
#![expect(clippy::unwrap_used, reason = "a test fails by a panic")]

mod deploy;
mod documents;
mod examples;
mod imports;
mod joins;
mod lexer;
mod manifests;
mod scripts;
mod service;
mod sizes;
mod source;
mod specification;
mod style;
mod tree;
