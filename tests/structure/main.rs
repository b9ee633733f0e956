//! What holds of the tree itself: who imports whom, how long files are, that promises have tests, that what is shipped beside the programs is right.

mod examples;
mod imports;
mod manifests;
mod service;
mod sizes;
mod source;
mod specification;
mod tree;
