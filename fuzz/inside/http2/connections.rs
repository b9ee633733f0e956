//! Arbitrary frames of a container runtime and of a kubelet, for kiyot-fuzz.

mod kubelet;
mod model;
mod runtime;
mod script;

pub use kubelet::kubelet;
pub use runtime::runtime;
