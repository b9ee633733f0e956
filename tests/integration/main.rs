//! Integration tests against real parts. They need root.

fn main() {}
