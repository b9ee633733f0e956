//! Checks of the tree: imports, dependencies, lengths of files, style, documents, promises and
//! their tests, scripts, the unit file. A crate of its own, which compiles in seconds.
#![cfg(test)]

mod documents;
mod imports;
mod joins;
mod lexer;
mod manifests;
mod messages;
mod scripts;
mod service;
mod sizes;
mod source;
mod specification;
mod style;
mod tree;
